"""Layers, k and ridge follow the held-out rows, where in-sample error would mislead."""

import numpy as np
import pytest
import torch

from kvstore_xfer.fit.moments import Moments
from kvstore_xfer.fit.select import RIDGES, Component, choose, rank_layers
from kvstore_xfer.fit.solve import r_squared, solve_ridge

LAYERS, WIDTH, OUT = 10, 8, 4
SIGNAL = (2, 5)


def draw(rows, seed, noise):
    """Outputs of one target layer that depend on source layers 2 and 5 only."""
    chance = np.random.default_rng(seed)
    x = chance.normal(0, 1, (1, rows, LAYERS * WIDTH))
    maps = np.random.default_rng(99).normal(0, 1, (2, WIDTH, OUT))
    parts = [x[:, :, layer * WIDTH : (layer + 1) * WIDTH] for layer in SIGNAL]
    y = sum(part @ weight for part, weight in zip(parts, maps, strict=True))
    return x, y + noise * chance.normal(0, 1, y.shape)


@pytest.fixture(scope="module")
def component():
    """p / n = 0.9: 80 input columns, 90 fitted rows."""
    moments = []
    for rows, seed in ((90, 1), (1000, 2)):
        x, y = draw(rows, seed, noise=4.0)
        moments.append(Moments.zero(1, LAYERS * WIDTH, OUT))
        moments[-1].update(torch.tensor(x), torch.tensor(y))
    return Component(*moments, WIDTH, OUT)


def test_the_ranking_finds_the_layers_that_matter(component):
    ranking = rank_layers((component,), LAYERS, 1)
    assert set(ranking[0].argsort(descending=True)[:2].tolist()) == set(SIGNAL)


def test_a_ranking_is_the_mean_over_components(component):
    x, y = draw(500, 3, noise=0.5)
    moments = Moments.zero(1, LAYERS * WIDTH, OUT)
    moments.update(torch.tensor(x), torch.tensor(y))
    other = Component(moments, moments, WIDTH, OUT)
    both = rank_layers((component, other), LAYERS, 1)
    single = [rank_layers((part,), LAYERS, 1) for part in (component, other)]
    torch.testing.assert_close(both, (single[0] + single[1]) / 2)


def test_k_follows_the_held_out_rows_where_in_sample_error_ranks_backwards(component):
    choice = choose((component,), rank_layers((component,), LAYERS, 1), layers=None, ridge=1e-5)
    everything = tuple(range(LAYERS))
    in_sample, held_out = (
        [
            float(r_squared(affine, moments, component.inputs(layers), component.outputs(0))[0])
            for layers in (SIGNAL, everything)
            for affine in [
                solve_ridge(component.fitted, component.inputs(layers), component.outputs(0), 1e-5)
            ]
        ]
        for moments in (component.fitted, component.held_out)
    )
    assert in_sample[1] > 0.9 > in_sample[0]
    assert held_out[1] < 0 < held_out[0]
    assert choice.layers == (SIGNAL,)
    assert choice.mean_score == pytest.approx(held_out[0], rel=1e-9)


def test_the_ridge_follows_the_held_out_rows(component):
    ranking = rank_layers((component,), LAYERS, 1)
    choice = choose((component,), ranking, layers=LAYERS, ridge=None)
    scores = {ridge: _score(component, component.held_out, ridge) for ridge in RIDGES}
    in_sample = {ridge: _score(component, component.fitted, ridge) for ridge in RIDGES}
    assert max(in_sample, key=in_sample.get) == min(RIDGES)
    assert choice.ridges == ((max(scores, key=scores.get),),) == ((max(RIDGES),),)
    assert choice.scores[0][0] == pytest.approx(max(scores.values()), rel=1e-9)


def test_given_numbers_are_taken_as_they_are(component):
    choice = choose((component,), rank_layers((component,), LAYERS, 1), layers=4, ridge=0.3)
    assert (len(choice.layers[0]), choice.ridges) == (4, ((0.3,),))
    assert list(choice.layers[0]) == sorted(choice.layers[0])
    assert set(SIGNAL) < set(choice.layers[0])


def _score(component, moments, ridge):
    inputs, outputs = component.inputs(tuple(range(LAYERS))), component.outputs(0)
    affine = solve_ridge(component.fitted, inputs, outputs, ridge)
    return float(r_squared(affine, moments, inputs, outputs)[0])
