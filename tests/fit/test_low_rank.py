"""Low-rank maps against the formulas in float64, with all rows in memory."""

import numpy as np
import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit import low_rank
from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.low_rank import LowRankAccumulator
from kvstore_xfer.mapper.maps import Method

TOKENS, SEQUENCES, RIDGE = 20, 16, 1e-2


@pytest.fixture
def pair(make_description):
    return (
        make_description("source", 3, 2, 4, 6),
        make_description("target", 2, 2, 6, 4, theta=500.0),
    )


@pytest.fixture
def captured(pair, random_page):
    """Pages of both models and gradients; some directions matter a hundred times as much."""
    source, target = pair
    rows = []
    for n in range(SEQUENCES):
        keys, values = (part.clone() for part in vars(random_page(target, TOKENS, 90 + n)).values())
        keys[..., 0] *= 10
        values[1] *= 100
        pages = (random_page(source, TOKENS, 2 * n), random_page(target, TOKENS, 2 * n + 1))
        rows.append((*pages, KvPage(keys, values)))
    return rows


def fitted(pair, captured, *, gradients=True, **options):
    given = {"method": Method.LOW_RANK, "ridge": RIDGE, **options}
    accumulator = LowRankAccumulator(*pair, FitOptions(**given))
    for index, pages in enumerate(captured):
        accumulator.add(index, *(pages if gradients else pages[:2]))
    return accumulator.finish()[0]


def stripped(keys, model):
    keys = keys.double().numpy()
    half = model.key_dim // 2
    angles = np.arange(keys.shape[1])[:, None] * np.array(model.rope.inv_freq)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = keys[..., :half], keys[..., half:]
    return np.concatenate([a * cos + b * sin, b * cos - a * sin], -1)


def rows_of(pair, captured, side, layers=None):
    model = pair[side]
    parts = []
    for row in captured:
        chosen = slice(None) if layers is None else layers
        both = (stripped(row[side].keys, model), row[side].values.double().numpy())
        later = [part[chosen][:, 1:] for part in both]
        flat = [part.transpose(1, 0, 2, 3).reshape(TOKENS - 1, -1) for part in later]
        parts.append(np.concatenate(flat, 1))
    return np.concatenate(parts)


def ridge_solution(x, y, split):
    cx, cy = x - x.mean(0), y - y.mean(0)
    gram = cx.T @ cx
    scales = [np.diag(gram)[:split].mean(), np.diag(gram)[split:].mean()]
    penalty = np.repeat(scales, (split, len(gram) - split)) * RIDGE
    return gram, np.linalg.solve(gram + np.diag(penalty), cx.T @ cy)


def metric(pair, captured):
    """The sensitivity as one block-diagonal matrix ``[q, q]``."""
    blocks = []
    for name in ("keys", "values"):
        parts = [getattr(row[2], name)[:, 1:].double().numpy() for row in captured]
        slopes = np.concatenate(parts, 1)
        for layer in slopes:
            for head in layer.transpose(1, 0, 2):
                blocks += [head.T @ head / len(head)]
    size = sum(map(len, blocks))
    result, start = np.zeros((size, size)), 0
    for block in blocks:
        stop = start + len(block)
        result[start:stop, start:stop] = block
        start = stop
    return result


def product(mapper):
    """Encoder times decoders ``[p, q]``, and the bias ``[q]``."""
    maps = (*mapper.keys, *mapper.values)
    decoder = torch.cat([layer.weight.double() for layer in maps], 1)
    bias = torch.cat([layer.bias.double().flatten() for layer in maps])
    return (mapper.encoder.double() @ decoder).numpy(), bias.numpy()


def test_at_full_rank_it_is_the_ridge_solution(pair, captured):
    x, y = (rows_of(pair, captured, side) for side in (0, 1))
    mapper = fitted(pair, captured, rank=40)
    found, bias = product(mapper)
    _, expected = ridge_solution(x, y, 3 * 2 * 4)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-4)
    np.testing.assert_allclose(bias, y.mean(0) - x.mean(0) @ found, atol=1e-5)


def test_a_rank_that_no_map_can_have_is_refused(pair):
    """Source: 3 layers of 2 heads of 4 + 6; target: 2 of 2 of 6 + 4."""
    LowRankAccumulator(*pair, FitOptions(Method.LOW_RANK, rank=40))
    with pytest.raises(ConfigError, match=r"--rank 41: .* is 40; give 1 to 40 or 'auto'"):
        LowRankAccumulator(*pair, FitOptions(Method.LOW_RANK, rank=41))
    with pytest.raises(ConfigError, match=r"--rank 21: .* is 20;"):
        LowRankAccumulator(*pair, FitOptions(Method.LOW_RANK, rank=21, layers=1))


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_the_reduced_map_is_the_best_of_its_rank(pair, captured, rank):
    """Eckart and Young in the norm of A and M: the error is the rest of the singular values."""
    x, y = (rows_of(pair, captured, side) for side in (0, 1))
    gram, full = ridge_solution(x, y, 3 * 2 * 4)
    M = metric(pair, captured)
    left, right = np.linalg.cholesky(gram).T, np.linalg.cholesky(M)
    strengths = np.linalg.svd(left @ full @ right, compute_uv=False)
    found, _ = product(fitted(pair, captured, rank=rank))
    error = np.linalg.norm(left @ (full - found) @ right)
    best = np.sqrt((strengths[rank:] ** 2).sum())
    assert best * 0.999 <= error <= best * 1.01


def test_the_sensitivity_decides_where_the_rank_goes(pair, captured):
    x, y = (rows_of(pair, captured, side) for side in (0, 1))
    gram, full = ridge_solution(x, y, 3 * 2 * 4)
    left, right = np.linalg.cholesky(gram).T, np.linalg.cholesky(metric(pair, captured))
    with_it, without = (
        np.linalg.norm(
            left @ (full - product(fitted(pair, captured, rank=4, gradients=given))[0]) @ right
        )
        for given in (True, False)
    )
    assert with_it < 0.9 * without


def test_many_outputs_are_reduced_by_iteration_alike(pair, captured, monkeypatch):
    dense, _ = product(fitted(pair, captured, rank=5))
    monkeypatch.setattr(low_rank, "_DENSE_SIDE", 0)
    iterated, _ = product(fitted(pair, captured, rank=5))
    np.testing.assert_allclose(iterated, dense, rtol=0, atol=2e-3 * np.abs(dense).max())


def test_the_default_rank_has_the_parameters_of_a_head_local_map(pair, captured):
    mapper = fitted(pair, captured)
    head_local = 2 * 2 * 3 * (4 * 6 + 6 * 4)
    p, q = 3 * 2 * 10, 2 * 2 * 10
    assert mapper.inputs == p
    without_bias = mapper.parameters - 2 * 2 * 10
    assert head_local - (p + q) < without_bias <= head_local


def test_some_layers_are_evenly_spaced(pair, captured):
    mapper = fitted(pair, captured, layers=1, rank=3)
    assert {layer.source_layers for layer in (*mapper.keys, *mapper.values)} == {(1,)}
    assert mapper.encoder.shape == (20, 3)
    x, y = rows_of(pair, captured, 0, [1]), rows_of(pair, captured, 1)
    _, bias = product(mapper)
    np.testing.assert_allclose(bias, y.mean(0) - x.mean(0) @ product(mapper)[0], atol=1e-5)


def test_more_layers_than_there_are_is_one_line(pair):
    with pytest.raises(ConfigError, match=r"--layers 4: source has 3 layers"):
        LowRankAccumulator(*pair, FitOptions(Method.LOW_RANK, layers=4))


def test_too_few_sequences_are_named(pair, captured):
    with pytest.raises(ConfigError, match="--sequences"):
        fitted(pair, captured[:7])


# Of the difference, between models of one geometry


@pytest.fixture
def siblings(make_description, random_page):
    """Two models, their pages, and gradients; the target is the source a tenth of the way off."""
    models = (
        make_description("source", 2, 2, 6, 4, theta=500.0),
        make_description("target", 2, 2, 6, 4, theta=500.0),
    )
    rows = []
    for n in range(SEQUENCES):
        source, other, slopes = (random_page(models[0], TOKENS, 3 * n + i) for i in range(3))
        target = KvPage(source.keys + 0.1 * other.keys, source.values + 0.1 * other.values)
        rows.append((source, target, slopes))
    return models, rows


def test_the_residual_at_full_rank_is_the_ridge_solution_of_the_difference(siblings):
    pair, captured = siblings
    x, y = (rows_of(pair, captured, side) for side in (0, 1))
    mapper = fitted(pair, captured, method=Method.LOW_RANK_RESIDUAL, rank=40)
    mapper.validate()
    found, bias = product(mapper)
    _, expected = ridge_solution(x, y - x, 2 * 2 * 6)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-5)
    np.testing.assert_allclose(bias, (y - x).mean(0) - x.mean(0) @ found, atol=1e-5)


def test_of_one_rank_the_residual_is_nearer_to_a_sibling(siblings):
    pair, captured = siblings
    scores = {}
    for method in (Method.LOW_RANK, Method.LOW_RANK_RESIDUAL):
        accumulator = LowRankAccumulator(*pair, FitOptions(method, ridge=RIDGE, rank=3))
        for index, pages in enumerate(captured):
            accumulator.add(index, *pages)
        mapper, choice = accumulator.finish()
        x, y = (rows_of(pair, captured, side) for side in (0, 1))
        found, bias = product(mapper)
        mapped = x @ found + bias + (x if method.residual else 0)
        scores[method] = 1 - ((y - mapped) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
        assert choice.mean_score > 0.9  # of the target, before the rank is reduced
    assert scores[Method.LOW_RANK_RESIDUAL] > 0.97 > scores[Method.LOW_RANK]


def test_a_residual_between_other_geometries_is_one_line(pair):
    with pytest.raises(ConfigError, match=r"--method low-rank-residual: .* use head-local"):
        LowRankAccumulator(*pair, FitOptions(Method.LOW_RANK_RESIDUAL))
