"""Row weights: the formulas in float64 token by token, and derivatives of the attention output."""

import math

import numpy as np
import pytest
import torch

from kvstore_xfer.fit.attention import boundaries, row_weights, shrinkage


def random_layers(layers, tokens, heads, groups, width, seed=0):
    """Keys, values, and queries that are scaled already."""
    chance = np.random.default_rng(seed)
    shapes = [(layers, tokens, n, width) for n in (heads, heads, heads * groups)]
    return [chance.normal(0, 1, shape) for shape in shapes]


def attention(keys, values, query):
    """Output and weights of one query over one head's tokens."""
    logits = keys @ query
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights @ values, weights


def reference(keys, values, queries):
    """r^K and r^V by the formulas: ``[L, H, T]`` each."""
    layers, tokens, heads, _ = keys.shape
    groups = queries.shape[2] // heads
    at = boundaries(tokens).tolist()
    result = np.zeros((2, layers, heads, tokens))
    for layer in range(layers):
        for head in range(heads):
            for c in at:
                part = np.zeros((2, tokens))
                for u in range(head * groups, (head + 1) * groups):
                    query = queries[layer, c, u]
                    output, a = attention(
                        keys[layer, : c + 1, head], values[layer, : c + 1, head], query
                    )
                    for i in range(c):
                        distance = ((values[layer, i, head] - output) ** 2).sum()
                        part[0, i] += a[i] ** 2 * distance * (query**2).sum()
                        part[1, i] += a[i] ** 2
                result[:, layer, head] += part / part.sum(1, keepdims=True)
    return result / result.mean(-1, keepdims=True)


@pytest.mark.parametrize(("tokens", "groups"), [(2, 1), (12, 2), (40, 1), (70, 3)])
def test_weights_are_the_formula(tokens, groups):
    parts = random_layers(2, tokens, 2, groups, 8)
    found = row_weights(*(torch.tensor(part) for part in parts))
    for weights, expected in zip(found, reference(*parts), strict=True):
        assert weights.shape == (2, 2, tokens)
        np.testing.assert_allclose(weights, expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("component", ["keys", "values"])
def test_weights_are_what_the_attention_output_says_of_a_token(component):
    """Squared Frobenius norms of do/dk_i and do/dv_i, by central differences."""
    tokens, groups, width, step = 9, 2, 6, 1e-5
    keys, values, queries = random_layers(1, tokens, 1, groups, width, seed=3)
    boundary = tokens - 1  # the only one of so short a sequence
    assert boundaries(tokens).tolist() == [boundary]
    moved = {"keys": keys, "values": values}[component]
    strength = np.zeros(tokens)
    for i in range(boundary):
        for j in range(width):
            outputs = []
            for sign in (1, -1):
                moved[0, i, 0, j] += sign * step
                outputs.append(
                    [attention(keys[0, :, 0], values[0, :, 0], q)[0] for q in queries[0, boundary]]
                )
                moved[0, i, 0, j] -= sign * step
            derivative = (np.array(outputs[0]) - outputs[1]) / (2 * step)
            strength[i] += (derivative**2).sum()
    found = row_weights(*(torch.tensor(part) for part in (keys, values, queries)))
    weights = found[component == "values"][0, 0]
    np.testing.assert_allclose(weights, strength / strength.mean(), rtol=1e-4, atol=1e-7)


def test_boundaries_are_log_spaced():
    found = boundaries(1024)
    assert (found[0], found[-1]) == (12, 1023)
    assert (found.diff() > 0).all()
    far = found[found > 200].double()  # where rounding to whole positions does not show
    assert len(far) > 40
    ratios = far[1:] / far[:-1]
    assert ratios.max() / ratios.min() < 1.01
    assert boundaries(1).tolist() == []


def test_a_query_that_sees_itself_alone_says_nothing():
    keys = torch.zeros(1, 9, 1, 4)
    keys[0, 8] = 1e4
    queries = torch.full((1, 9, 1, 4), 1e4)
    for weights in row_weights(keys, torch.randn(1, 9, 1, 4), queries):
        assert torch.equal(weights, torch.ones(1, 1, 9))


@pytest.mark.parametrize("spread", [0.5, 3.0, 40.0])
def test_shrinkage_is_the_largest_that_keeps_enough_rows(spread):
    rows, inputs = 1000, 50
    squares = torch.tensor([rows * (1 + spread)], dtype=torch.float64)
    alpha = float(shrinkage(rows, squares, inputs))

    def effective(share):
        return rows / (1 + share**2 * spread)

    assert effective(alpha) >= 2 * inputs * (1 - 1e-12)
    assert alpha == 1 or effective(alpha * 1.001) < 2 * inputs
    assert float(shrinkage(60, squares * 60 / rows, inputs)) == 0  # too few rows to lose any
    assert math.isfinite(float(shrinkage(rows, torch.tensor([1000.0]), inputs)))
