"""A fit from pages against the formulas in float64, with all rows in memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstore_xfer.errors import ConfigError, ModelError
from kvstore_xfer.fit import accumulate
from kvstore_xfer.fit.accumulate import HELD_OUT_EVERY, Accumulator, FitOptions
from kvstore_xfer.fit.low_rank import LowRankAccumulator
from kvstore_xfer.mapper.maps import Method

TOKENS, SEQUENCES, RIDGE = 12, 24, 1e-2

# name: source (layers, heads, key width, value width), then the target's
GEOMETRIES = {
    "equal": ((2, 2, 8, 8), (2, 2, 8, 8)),
    "fewer target heads": ((3, 4, 8, 8), (2, 2, 8, 8)),
    "more target heads": ((2, 2, 8, 8), (3, 4, 8, 8)),
    "other widths": ((2, 3, 8, 4), (4, 3, 12, 6)),
    "odd heads": ((2, 3, 4, 4), (2, 2, 6, 4)),
}


@pytest.fixture(params=GEOMETRIES)
def pair(request, make_description):
    return tuple(
        make_description(name, *geometry, theta=theta)
        for name, geometry, theta in zip(
            ("source", "target"), GEOMETRIES[request.param], (10_000.0, 500.0), strict=True
        )
    )


@pytest.fixture
def make_pages(random_page):
    def make(pair, sequences=SEQUENCES):
        return [
            tuple(random_page(model, TOKENS, 2 * index + side) for side, model in enumerate(pair))
            for index in range(sequences)
        ]

    return make


def run(pair, pages, **options):
    accumulator = Accumulator(*pair, FitOptions(**{"ridge": RIDGE, **options}))
    for index, (source, target) in enumerate(pages):
        accumulator.add(index, source, target)
    return accumulator.finish()


def stripped(keys, model):
    """Keys ``[L, T, H, D]`` rotated back by their position, half-split pairs, in float64."""
    keys = keys.double().numpy()
    half = model.key_dim // 2
    angles = np.arange(keys.shape[1])[:, None] * np.array(model.rope.inv_freq)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = keys[..., :half], keys[..., half:]
    return np.concatenate([a * cos + b * sin, b * cos - a * sin], -1)


def all_rows(pair, pages):
    """``{component: (source [L, N, H, D], target)}`` of all sequences, behind position 0."""
    columns = {}
    for name in ("keys", "values"):
        columns[name] = tuple(
            np.concatenate(
                [
                    (
                        stripped(page[side].keys, model)
                        if name == "keys"
                        else page[side].values.double().numpy()
                    )[:, 1:]
                    for page in pages
                ],
                1,
            )
            for side, model in enumerate(pair)
        )
    return columns


def ridge_solution(x, y, rho):
    cx, cy = x - x.mean(0), y - y.mean(0)
    gram = cx.T @ cx
    weight = np.linalg.solve(gram + rho * np.diag(gram).mean() * np.eye(x.shape[1]), cx.T @ cy)
    return weight, y.mean(0) - x.mean(0) @ weight


def assert_close(found, expected):
    """Weights are kept in float16; positions are rounded to float32 when keys are rotated."""
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=2**-10, atol=2e-6)


def test_head_local_maps_are_the_formula(pair, make_pages):
    source, target = pair
    pages = make_pages(pair)
    mapper, _ = run(pair, pages, layers=source.layers)
    rows = all_rows(pair, pages)
    for name, layers in (("keys", mapper.keys), ("values", mapper.values)):
        inputs, outputs = rows[name]
        for index, layer in enumerate(layers):
            assert layer.source_layers == tuple(range(source.layers))
            for head in range(target.kv_heads):
                x = np.concatenate(list(inputs[:, :, head * source.kv_heads // target.kv_heads]), 1)
                weight, bias = ridge_solution(x, outputs[index, :, head], RIDGE)
                assert_close(layer.weight[head], weight)
                assert_close(layer.bias[head], bias)


def test_position_0_is_the_mean_of_the_target_and_no_row_of_the_maps(pair, make_pages):
    source, _ = pair
    pages = make_pages(pair)
    mapper, _ = run(pair, pages, layers=source.layers)
    for name, layers in (("keys", mapper.keys), ("values", mapper.values)):
        expected = torch.stack([getattr(page, name)[:, 0] for _, page in pages]).double().mean(0)
        for index, layer in enumerate(layers):
            torch.testing.assert_close(layer.first.double(), expected[index])
    for side in (0, 1):
        for page in pages:
            page[side].keys[:, 0] = page[side].values[:, 0] = 1e4
    other, _ = run(pair, pages, layers=source.layers)
    for one, two in zip((*mapper.keys, *mapper.values), (*other.keys, *other.values), strict=True):
        assert torch.equal(one.weight, two.weight)
        assert torch.equal(one.bias, two.bias)
        assert (two.first == 1e4).all()


def test_full_head_maps_are_the_formula(pair, make_pages):
    source, target = pair
    pages = make_pages(pair)
    mapper, _ = run(pair, pages, method=Method.FULL_HEAD, layers=source.layers)
    rows = all_rows(pair, pages)
    for name, layers in (("keys", mapper.keys), ("values", mapper.values)):
        inputs, outputs = rows[name]
        x = np.concatenate([layer.reshape(layer.shape[0], -1) for layer in inputs], 1)
        for index, layer in enumerate(layers):
            y = outputs[index].reshape(len(x), -1)
            weight, bias = ridge_solution(x, y, RIDGE)
            assert_close(layer.weight, weight)
            assert_close(layer.bias, bias.reshape(target.kv_heads, -1))


def test_the_best_layer_is_that_of_the_probes_on_held_out_sequences(make_description, make_pages):
    """Target layer 1 is made from source layer 2, target layer 0 from source layer 0."""
    pair = make_description("s", 3, 2, 8), make_description("t", 2, 2, 8)
    pages = make_pages(pair)
    for source, target in pages:
        for made, origin in ((0, 0), (1, 2)):
            target.keys[made] += 3 * source.keys[origin]
            target.values[made] += 3 * source.values[origin]
    mapper, choice = run(pair, pages, layers=1)
    assert choice.layers == ((0,), (2,))
    assert [layer.source_layers for layer in mapper.keys] == [(0,), (2,)]
    held = [page for i, page in enumerate(pages) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    fitted = [page for i, page in enumerate(pages) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    for row, name in enumerate(("keys", "values")):
        (x, y), (held_x, held_y) = (all_rows(pair, part)[name] for part in (fitted, held))
        for target, origin in ((0, 0), (1, 2)):
            scores = []
            for head in range(2):
                weight, bias = ridge_solution(x[origin, :, head], y[target, :, head], RIDGE)
                truth = held_y[target, :, head]
                error = truth - held_x[origin, :, head] @ weight - bias
                scores.append(1 - (error**2).sum() / ((truth - truth.mean(0)) ** 2).sum())
            assert choice.scores[row][target] == pytest.approx(np.mean(scores), abs=1e-5)


def test_no_sequence_is_on_both_sides(make_description, random_page):
    model = make_description()
    accumulator = Accumulator(model, replace(model, name="other"), FitOptions())
    pages = [random_page(model, TOKENS, seed) for seed in range(17)]
    for index, page in enumerate(pages):
        accumulator.add(index, page, page)
    sides = {"held_out": pages[7::8], "fitted": [p for i, p in enumerate(pages) if i % 8 != 7]}
    for side, members in sides.items():
        moments = accumulator.moments[f"values.{side}"]
        rows = torch.cat([page.values[:, 1:] for page in members], 1).double()  # [L, N, H, D]
        assert moments.rows == rows.shape[1]
        mean = rows.mean(1).transpose(0, 1).flatten(1)  # [H, L * D]
        torch.testing.assert_close(moments.mean_x, mean)


def test_maps_follow_their_heads(make_description, make_pages):
    """Renaming the heads of both models renames the maps, and changes nothing else."""
    pair = make_description("s", 2, 4, 8), make_description("t", 2, 4, 8)
    pages = make_pages(pair)
    order = [2, 0, 3, 1]
    renamed = [
        tuple(replace(p, keys=p.keys[:, :, order], values=p.values[:, :, order]) for p in page)
        for page in pages
    ]
    one, _ = run(pair, pages, layers=1)
    other, _ = run(pair, renamed, layers=1)
    for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        assert a.source_layers == b.source_layers
        torch.testing.assert_close(a.weight[order], b.weight, rtol=2**-10, atol=1e-6)
        torch.testing.assert_close(a.bias[order], b.bias, rtol=1e-5, atol=1e-6)


def test_the_maps_of_a_head_do_not_depend_on_other_heads(make_description, make_pages):
    """What lets every rank of a tensor-parallel group fit or map its own heads."""
    pair = make_description("s", 2, 2, 8), make_description("t", 2, 2, 8)
    pages = make_pages(pair)
    whole, _ = run(pair, pages, layers=2)
    for head in range(2):
        cut = slice(head, head + 1)
        part = [
            tuple(replace(p, keys=p.keys[:, :, cut], values=p.values[:, :, cut]) for p in page)
            for page in pages
        ]
        alone, _ = run(tuple(replace(model, kv_heads=1) for model in pair), part, layers=2)
        for a, b in zip((*whole.keys, *whole.values), (*alone.keys, *alone.values), strict=True):
            torch.testing.assert_close(a.weight[cut], b.weight, rtol=2**-10, atol=1e-6)


def test_weights_beyond_float16_are_kept_in_bfloat16(make_description, make_pages):
    pair = make_description("s"), make_description("t")
    pages = make_pages(pair)
    for source, target in pages:
        target.values.copy_(source.values * 1e6)
    mapper, _ = run(pair, pages, layers=1)
    assert {layer.weight.dtype for layer in mapper.values} == {torch.bfloat16}
    assert {layer.weight.dtype for layer in mapper.keys} == {torch.float16}
    largest = max(float(layer.weight.abs().max()) for layer in mapper.values)
    assert largest == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_a_cache_of_no_numbers_is_refused(make_description, make_pages, value, side):
    pair = make_description("source"), make_description("target")
    pages = make_pages(pair, 1)
    pages[0][side].values[0, 3, 0, 0] = value
    with pytest.raises(ModelError, match=f"^{pair[side].name}: its cache of sequence 0 .*--dtype"):
        run(pair, pages)


def test_too_few_sequences_are_refused(make_description, make_pages):
    pair = make_description("s"), make_description("t")
    with pytest.raises(ConfigError, match=r"--sequences: .*at least 8.*more text"):
        run(pair, make_pages(pair, 7))


@pytest.mark.parametrize("layers", [0, 3])
def test_more_layers_than_the_source_has_are_refused(make_description, layers):
    pair = make_description("s"), make_description("t")
    with pytest.raises(ConfigError, match=f"--layers {layers}: s has 2 layers; give 1 to 2"):
        Accumulator(*pair, FitOptions(layers=layers))


def test_models_that_are_no_pair_are_refused(make_description):
    source = make_description("s")
    with pytest.raises(ModelError, match="s and t: tokenizers differ"):
        Accumulator(source, make_description("t", tokenizer_digest="x"), FitOptions())
    with pytest.raises(ModelError, match="t: its cache cannot be converted: MLA"):
        Accumulator(source, make_description("t", refusal="MLA"), FitOptions())


def test_moments_that_do_not_fit_into_memory_are_refused(make_description, monkeypatch):
    monkeypatch.setattr(accumulate, "_available_bytes", lambda: 1000)
    models = (make_description("s"), make_description("t"))
    for method, remedy in (
        (Method.HEAD_LOCAL, "use a device with more memory"),
        (Method.FULL_HEAD, "use --method head-local or use a device"),
    ):
        with pytest.raises(ConfigError, match=rf"--method: .*GiB free; {remedy}"):
            Accumulator(*models, FitOptions(method))
    with pytest.raises(ConfigError, match=r"GiB free; give fewer --layers or use a device"):
        LowRankAccumulator(*models, FitOptions(Method.LOW_RANK))
