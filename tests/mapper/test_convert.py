"""The CPU converter against strip, map, rotate in float64, written from the formulas."""

import numpy as np
import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.maps import Method

GEOMETRIES = {
    "equal": ((3, 2, 8, 8), (2, 2, 8, 8)),
    "fewer target heads": ((3, 4, 8, 8), (2, 2, 8, 8)),
    "more target heads": ((3, 2, 8, 8), (2, 4, 8, 8)),
    "other widths": ((3, 3, 8, 4), (2, 2, 12, 6)),
}
FIRSTS, LENGTHS = (0, 64, 4000, 130_000), (16, 16, 5, 1)

AFFINE = [method for method in Method if method.affine]


@pytest.fixture(params=[(g, m) for g in GEOMETRIES for m in AFFINE], ids=str)
def mapper(request, make_mapper):
    geometry, method = request.param
    return make_mapper(*GEOMETRIES[geometry], method, layers=[(0, 2), (1, 2)])


@pytest.fixture
def sources(random_page):
    def make(mapper, dtype=torch.float32):
        return [
            random_page(mapper.source, length, seed, dtype) for seed, length in enumerate(LENGTHS)
        ]

    return make


def empty_like(mapper, length, dtype=torch.float32):
    target = mapper.target
    heads = len(mapper.head_assignment)
    return KvPage(
        torch.full((target.layers, length, heads, target.key_dim), torch.nan, dtype=dtype),
        torch.full((target.layers, length, heads, target.value_dim), torch.nan, dtype=dtype),
    )


def convert(mapper, pages, firsts=FIRSTS, dtype=torch.float32):
    targets = [empty_like(mapper, page.keys.shape[1], dtype) for page in pages]
    TorchConverter(mapper, dtype).convert(pages, firsts, targets)
    return targets


def turn(keys, model, first, sign):
    """Half-split rotation by ``sign * angle``; the angle is rounded to float32 as engines do."""
    half = model.key_dim // 2
    frequencies = np.array(model.rope.inv_freq, dtype=np.float32)
    positions = np.arange(first, first + keys.shape[1]).astype(np.float32)
    angles = (positions[:, None] * frequencies).astype(np.float64) * sign
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = keys[..., :half], keys[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def mapped(inputs, layers, mapper):
    """``[L_s, T, H_s, d_s]`` -> ``[L_t, T, H_t, d_t]``, one token and head at a time."""
    target = mapper.target
    result = []
    for layer in layers:
        weight, bias = layer.weight.double().numpy(), layer.bias.double().numpy()
        tokens = np.empty((inputs.shape[1], target.kv_heads, bias.shape[1]))
        for token in range(inputs.shape[1]):
            if mapper.method is Method.FULL_HEAD:
                row = np.concatenate([inputs[s, token].reshape(-1) for s in layer.source_layers])
                tokens[token] = (row @ weight).reshape(target.kv_heads, -1) + bias
                continue
            for head, origin in enumerate(mapper.head_assignment):
                row = np.concatenate([inputs[s, token, origin] for s in layer.source_layers])
                tokens[token, head] = row @ weight[head] + bias[head]
        result.append(tokens)
    return np.stack(result)


def reference(mapper, page, first):
    keys, values = (part.double().numpy() for part in (page.keys, page.values))
    content = turn(keys, mapper.source, first, -1)
    keys = turn(mapped(content, mapper.keys, mapper), mapper.target, first, 1)
    return keys, mapped(values, mapper.values, mapper)


def assert_within_baseline(found, expected, dtype):
    """No further from the truth than a few roundings of the dtype to the size of the numbers."""
    found, scale = found.double().numpy(), np.abs(expected).max()
    assert np.isfinite(found).all()
    eps = torch.finfo(dtype).eps
    assert np.abs(found - expected).max() <= 4 * eps * scale
    assert np.sqrt(((found - expected) ** 2).mean()) <= eps * np.sqrt((expected**2).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_stripped_mapped_and_rotated(mapper, sources, dtype):
    pages = sources(mapper, dtype)
    for page, first, target in zip(pages, FIRSTS, convert(mapper, pages, dtype=dtype), strict=True):
        keys, values = reference(mapper, page, first)
        # At 130,000 the float32 sine of a large angle adds to the rounding of the products.
        accuracy = dtype if dtype is torch.bfloat16 else None
        for found, expected in ((target.keys, keys), (target.values, values)):
            if accuracy:
                assert found.dtype is torch.bfloat16
                assert_within_baseline(found, expected, dtype)
            else:
                np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=2e-5)


def test_the_position_matters(mapper, sources):
    pages = sources(mapper)[:1]
    (at_zero,), (later,) = convert(mapper, pages, [0]), convert(mapper, pages, [64])
    assert torch.equal(at_zero.values, later.values)
    assert (at_zero.keys - later.keys).abs().max() > 0.1


def test_blocks_of_one_call_do_not_mix(mapper, sources):
    """Ragged blocks together give what each gives alone."""
    pages = sources(mapper)
    together = convert(mapper, pages)
    for page, first, target in zip(pages, FIRSTS, together, strict=True):
        (alone,) = convert(mapper, [page], [first])
        torch.testing.assert_close(target.keys, alone.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target.values, alone.values, rtol=1e-5, atol=1e-5)


def test_a_long_call_equals_its_parts(make_mapper, random_page):
    """More tokens than one group takes, with a block that crosses no border evenly."""
    mapper = make_mapper()
    lengths = [700, 300, 1500, 7, 64]
    pages = [random_page(mapper.source, length, seed) for seed, length in enumerate(lengths)]
    firsts = [0, 700, 1000, 2500, 2507]
    whole = KvPage(*(torch.cat([getattr(p, n) for p in pages], 1) for n in ("keys", "values")))
    parts = convert(mapper, pages, firsts)
    (one,) = convert(mapper, [whole], [0])
    for name in ("keys", "values"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        torch.testing.assert_close(joined, getattr(one, name), rtol=1e-5, atol=1e-5)


def test_targets_may_have_any_strides_and_nothing_else_is_written(mapper, sources):
    """Targets cut out of an engine's pool, ``[token, layer, head, width]`` with room around."""
    pages = sources(mapper)
    plain = convert(mapper, pages)
    targets, pools = [], []
    for page in plain:
        parts = []
        for part in (page.keys, page.values):
            layers, tokens, heads, width = part.shape
            pool = torch.full((tokens + 2, layers, heads + 1, width + 3), -7.0)
            pools.append(pool)
            parts.append(pool[1:-1, :, :heads, :width].transpose(0, 1))
        targets.append(KvPage(*parts))
    TorchConverter(mapper, torch.float32).convert(pages, FIRSTS, targets)
    for page, target in zip(plain, targets, strict=True):
        assert torch.equal(page.keys, target.keys)
        assert torch.equal(page.values, target.values)
    for pool, part in zip(pools, [p for t in targets for p in (t.keys, t.values)], strict=True):
        part.fill_(-7.0)
        assert (pool == -7).all()


def test_sources_may_have_any_strides(mapper, sources):
    pages = sources(mapper)
    strided = [
        KvPage(
            *(p.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for p in (s.keys, s.values))
        )
        for s in pages
    ]
    before = [page.keys.clone() for page in strided]
    for a, b in zip(convert(mapper, pages), convert(mapper, strided), strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.values, b.values, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b.keys) for a, b in zip(before, strided, strict=True))


def test_no_blocks_are_no_work(mapper):
    TorchConverter(mapper, torch.float32).convert([], [], [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_conversions_of_all_ranks_are_the_whole(mapper, sources, ranks):
    pages = sources(mapper)
    whole = convert(mapper, pages)
    heads = mapper.target.kv_heads
    step = heads // ranks
    parts = [convert(mapper.shard(first, first + step), pages) for first in range(0, heads, step)]
    for block, page in enumerate(whole):
        for name in ("keys", "values"):
            joined = torch.cat([getattr(part[block], name) for part in parts], 2)
            torch.testing.assert_close(joined, getattr(page, name), rtol=1e-5, atol=1e-5)


def test_a_rank_may_read_only_the_source_heads_it_needs(make_mapper, sources):
    mapper = make_mapper((3, 4, 8, 8), (2, 4, 8, 8))
    pages = sources(mapper)
    whole = convert(mapper, pages)
    narrowed = mapper.shard(2, 4).reading_from(2)
    assert narrowed.head_assignment == (0, 1)
    cut = [KvPage(page.keys[:, :, 2:4], page.values[:, :, 2:4]) for page in pages]
    for page, target in zip(whole, convert(narrowed, cut), strict=True):
        torch.testing.assert_close(target.keys, page.keys[:, :, 2:4], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target.values, page.values[:, :, 2:4], rtol=1e-5, atol=1e-5)
