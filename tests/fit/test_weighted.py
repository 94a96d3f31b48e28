"""Weighted maps against the formulas in float64, with all rows in memory."""

import numpy as np
import pytest
import torch

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit.accumulate import Accumulator, FitOptions, split_of
from kvstore_xfer.fit.attention import row_weights
from kvstore_xfer.fit.moments import Moments
from kvstore_xfer.fit.weighted import WeightedAccumulator
from kvstore_xfer.mapper.maps import Method

TOKENS, SEQUENCES, RIDGE = 30, 16, 1e-2


@pytest.fixture
def pair(make_description):
    return (
        make_description("source", 3, 4, 8, 6),
        make_description("target", 2, 2, 4, 8, theta=500.0),
    )


@pytest.fixture
def captured(pair, random_page):
    """Source page, target page, queries of every sequence; heads of keys look at few tokens."""
    source, target = pair
    generator = torch.Generator().manual_seed(1)
    shape = (target.layers, TOKENS, 2 * target.kv_heads, target.key_dim)
    return [
        (
            random_page(source, TOKENS, 2 * n),
            random_page(target, TOKENS, 2 * n + 1),
            3 * torch.randn(shape, generator=generator),
        )
        for n in range(SEQUENCES)
    ]


def fitted(pair, captured, ridge=RIDGE, layers=2, method=Method.HEAD_LOCAL):
    options = FitOptions(method, layers, ridge, weighted=True)
    first = Accumulator(*pair, options)
    for index, (source, target, _) in enumerate(captured):
        first.add(index, source, target)
    second = WeightedAccumulator(*pair, options, first.choose())
    for index, sequence in enumerate(captured):
        second.add(index, *sequence)
    return second.finish()


def stripped(keys, model):
    keys = keys.double().numpy()
    half = model.key_dim // 2
    angles = np.arange(keys.shape[1])[:, None] * np.array(model.rope.inv_freq)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = keys[..., :half], keys[..., half:]
    return np.concatenate([a * cos + b * sin, b * cos - a * sin], -1)


def weighted_ridge(x, y, r, rho, spread_of):
    """`spread_of`: the rows whose weights decide on the shrinkage."""
    own = r[spread_of]
    n, tau = len(own), min(len(own), 2 * x.shape[1])
    spread = (own**2).mean() / own.mean() ** 2 - 1
    w = 1 + min(1, np.sqrt((n / tau - 1) / spread)) * (r - 1)
    mx, my = w @ x / w.sum(), w @ y / w.sum()
    cx, cy = x - mx, y - my
    gram = cx.T @ (w[:, None] * cx)
    weight = np.linalg.solve(
        gram + rho * np.diag(gram).mean() * np.eye(len(gram)), cx.T @ (w[:, None] * cy)
    )
    return weight, my - mx @ weight


@pytest.mark.parametrize("method", [Method.HEAD_LOCAL, Method.FULL_HEAD])
def test_maps_are_the_formula(pair, captured, method):
    source, target = pair
    full = method is Method.FULL_HEAD
    mapper, choice = fitted(pair, captured, method=method)
    weights = [row_weights(t.keys, t.values, q) for _, t, q in captured]
    everything = np.ones(SEQUENCES * (TOKENS - 1), dtype=bool)
    for place, (name, maps) in enumerate((("keys", mapper.keys), ("values", mapper.values))):
        sides = [
            np.concatenate(
                [
                    (
                        stripped(row[side].keys, model)
                        if name == "keys"
                        else row[side].values.double().numpy()
                    )[:, 1:]
                    for row in captured
                ],
                1,
            )
            for side, model in enumerate(pair)
        ]
        for layer, found in enumerate(maps):
            assert found.source_layers == choice.layers[layer]
            for head in range(target.kv_heads):
                heads = range(source.kv_heads) if full else [2 * head]
                read = [sides[0][s][:, h] for s in found.source_layers for h in heads]
                later = [w[place][layer, head, 1:].double().numpy() for w in weights]
                r = np.concatenate([part / part.mean() for part in later])
                weight, bias = weighted_ridge(
                    np.concatenate(read, 1), sides[1][layer, :, head], r, RIDGE, everything
                )
                columns = slice(head * weight.shape[1], (head + 1) * weight.shape[1])
                made = found.weight[:, columns] if full else found.weight[head]
                np.testing.assert_allclose(made.double(), weight, rtol=2**-10, atol=5e-6)
                np.testing.assert_allclose(found.bias[head].double(), bias, rtol=1e-4, atol=5e-6)


def test_weights_change_the_maps_and_order_does_not(pair, captured):
    mapper, _ = fitted(pair, captured)
    flat = [(s, t, torch.zeros_like(q)) for s, t, q in captured]  # attention that looks everywhere
    other, _ = fitted(pair, flat)
    assert (mapper.keys[0].weight - other.keys[0].weight).abs().max() > 1e-2
    assert mapper.parameters == other.parameters


def test_ridges_are_picked_on_held_out_sequences(pair, captured):
    """Outputs that are noise alone: the strongest ridge is the best on what was not fitted."""
    _, choice = fitted(pair, captured, ridge=None)
    assert set(choice.ridges[0]) == {1e-2}
    assert max(map(max, choice.scores)) < 0.05


def test_blended_moments_are_those_of_the_blended_weights():
    chance = np.random.default_rng(0)
    x, y = chance.normal(3, 1, (2, 50, 4)), chance.normal(1, 2, (2, 50, 3))
    r = chance.gamma(0.5, 1, (2, 50))
    r /= r.mean(1, keepdims=True)
    plain, weighted, blend = (Moments.zero(2, 4, 3) for _ in range(3))
    share = torch.tensor([0.3, 0.8], dtype=torch.float64)
    final = 1 + share[:, None].numpy() * (r - 1)
    x, y = torch.tensor(x), torch.tensor(y)
    plain.update(x, y)
    weighted.update(x, y, torch.tensor(r))
    blend.update(x, y, torch.tensor(final))
    found = plain.blended(weighted, share)
    for name in ("mean_x", "mean_y", "xx", "xy", "yy"):
        np.testing.assert_allclose(getattr(found, name), getattr(blend, name), rtol=1e-10)
    np.testing.assert_allclose(weighted.squares, (r**2).sum(1))


def test_too_few_sequences_are_named(pair, captured):
    options = FitOptions(layers=1, ridge=RIDGE, weighted=True)
    first = Accumulator(*pair, options)
    for index, (source, target, _) in enumerate(captured[:8]):
        first.add(index, source, target)
    second = WeightedAccumulator(*pair, options, first.choose())
    second.add(0, *captured[0])
    assert split_of(0) == "fitted"
    with pytest.raises(ConfigError, match="--sequences"):
        second.finish()
