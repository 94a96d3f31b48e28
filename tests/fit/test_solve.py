"""The ridge solution against its formula, with all rows in memory."""

import numpy as np
import pytest
import torch

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit.moments import Moments
from kvstore_xfer.fit.solve import Affine, r_squared, solve_ridge


def ridge_reference(x, y, rho):
    """W = (Xc'Xc + rho mean(diag) I)^-1 Xc'Yc, b = mean(Y) - mean(X) W."""
    cx, cy = x - x.mean(0), y - y.mean(0)
    gram = cx.T @ cx
    weight = np.linalg.solve(gram + rho * np.diag(gram).mean() * np.eye(x.shape[1]), cx.T @ cy)
    return weight, y.mean(0) - x.mean(0) @ weight


def moments_of(x, y):
    moments = Moments.zero(x.shape[0], x.shape[2], y.shape[2])
    moments.update(torch.tensor(x), torch.tensor(y))
    return moments


def columns(*numbers):
    return torch.tensor(numbers)


@pytest.fixture
def rows():
    chance = np.random.default_rng(5)
    x = chance.normal(0.7, 1, (2, 60, 8)) * np.linspace(0.1, 10, 8)
    y = np.einsum("gnp,gpq->gnq", x, chance.normal(0, 1, (2, 8, 5))) + chance.normal(
        3, 2, (2, 60, 5)
    )
    return x, y


@pytest.mark.parametrize("rho", [1e-6, 1e-3, 0.5])
def test_the_solution_is_the_formula(rows, rho):
    x, y = rows
    inputs, outputs = [6, 1, 3], [4, 0]
    found = solve_ridge(moments_of(x, y), columns(*inputs), columns(*outputs), rho)
    for group in range(2):
        weight, bias = ridge_reference(x[group][:, inputs], y[group][:, outputs], rho)
        np.testing.assert_allclose(found.weight[group], weight, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(found.bias[group], bias, rtol=1e-9, atol=1e-11)


def test_an_affine_relation_is_recovered():
    chance = np.random.default_rng(1)
    x = chance.normal(2, 1, (1, 200, 6))
    weight, bias = chance.normal(0, 1, (6, 3)), chance.normal(0, 5, 3)
    found = solve_ridge(moments_of(x, x @ weight + bias), torch.arange(6), torch.arange(3), 1e-13)
    np.testing.assert_allclose(found.weight[0], weight, atol=1e-9)
    np.testing.assert_allclose(found.bias[0], bias, atol=1e-9)


def test_the_ridge_is_relative(rows):
    """Neither the number of rows nor the scale of the inputs changes what a ridge means."""
    x, y = rows
    everything = (torch.arange(8), torch.arange(5), 1e-2)
    one = solve_ridge(moments_of(x, y), *everything)
    more = solve_ridge(moments_of(np.tile(x, (1, 3, 1)), np.tile(y, (1, 3, 1))), *everything)
    scaled = solve_ridge(moments_of(1000 * x, y), *everything)
    np.testing.assert_allclose(more.weight, one.weight, rtol=1e-9)
    np.testing.assert_allclose(1000 * scaled.weight, one.weight, rtol=1e-9)
    np.testing.assert_allclose(scaled.bias, one.bias, rtol=1e-8)


def test_the_order_of_tokens_does_not_matter(rows):
    x, y = rows
    order = np.random.default_rng(2).permutation(60)
    everything = (torch.arange(8), torch.arange(5), 1e-3)
    one, other = (
        solve_ridge(moments_of(a, b), *everything) for a, b in ((x, y), (x[:, order], y[:, order]))
    )
    np.testing.assert_allclose(other.weight, one.weight, rtol=1e-9, atol=1e-12)


def test_a_large_ridge_leaves_the_mean(rows):
    x, y = rows
    found = solve_ridge(moments_of(x, y), torch.arange(8), torch.arange(5), 1e12)
    np.testing.assert_allclose(found.bias, y.mean(1), rtol=1e-6)


def test_inputs_without_variance_give_the_mean():
    x, y = np.full((1, 20, 3), 4.0), np.random.default_rng(0).normal(2, 1, (1, 20, 2))
    found = solve_ridge(moments_of(x, y), torch.arange(3), torch.arange(2), 1e-3)
    assert torch.equal(found.weight, torch.zeros(1, 3, 2, dtype=torch.float64))
    np.testing.assert_allclose(found.bias, y.mean(1))


def test_a_ridge_that_is_too_small_is_named():
    x = np.random.default_rng(0).normal(0, 1, (1, 50, 4))
    x[..., 3] = x[..., 2]
    x[..., 1] = x[..., 0]
    with pytest.raises(ConfigError, match=r"--ridge 1e-300: .*give 1e-05 or more"):
        solve_ridge(moments_of(x, x), torch.arange(4), torch.arange(4), 1e-300)


def test_r_squared_is_that_of_the_predictions_on_other_rows(rows):
    x, y = rows
    fitted = moments_of(x[:, :40], y[:, :40])
    inputs, outputs = [0, 2, 5, 7], [1, 3]
    affine = solve_ridge(fitted, columns(*inputs), columns(*outputs), 1e-3)
    found = r_squared(affine, moments_of(x[:, 40:], y[:, 40:]), columns(*inputs), columns(*outputs))
    for group in range(2):
        truth = y[group, 40:][:, outputs]
        error = (
            truth
            - (x[group, 40:][:, inputs] @ affine.weight[group].numpy())
            - affine.bias[group].numpy()
        )
        expected = 1 - (error**2).sum() / ((truth - truth.mean(0)) ** 2).sum()
        assert float(found[group]) == pytest.approx(expected, rel=1e-9)


def test_r_squared_of_a_wrong_map_is_negative_and_of_the_mean_zero(rows):
    x, y = rows
    moments = moments_of(x, y)
    mean = Affine(torch.zeros(2, 8, 5, dtype=torch.float64), torch.tensor(y.mean(1)))
    found = r_squared(mean, moments, torch.arange(8), torch.arange(5))
    np.testing.assert_allclose(found, [0, 0], atol=1e-12)
    wrong = Affine(mean.weight, mean.bias + 100)
    assert (r_squared(wrong, moments, torch.arange(8), torch.arange(5)) < -1).all()


def test_outputs_that_are_always_zero_are_explained():
    x = np.random.default_rng(0).normal(0, 1, (1, 30, 3))
    moments = moments_of(x, np.zeros((1, 30, 2)))
    affine = solve_ridge(moments, torch.arange(3), torch.arange(2), 1e-3)
    assert float(r_squared(affine, moments, torch.arange(3), torch.arange(2))[0]) == 1.0
