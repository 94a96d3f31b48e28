"""Scores and intervals: pure functions with known answers."""

import math

import numpy as np
import pytest
import torch

from kvstore_xfer.gate.score import bootstrap, gap_recovered, retention, score_passage


def test_a_passage_is_scored_by_the_definitions():
    generator = torch.Generator().manual_seed(0)
    native, arm = (torch.randn(5, 7, generator=generator) for _ in range(2))
    following = torch.tensor([3, 0, 6, 2])
    p, q = (logits.double().softmax(-1).numpy() for logits in (native, arm))
    score = score_passage(arm, native, following)
    assert score.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-9)
    assert score.loss == pytest.approx(-np.log(q[range(4), following.numpy()]).mean(), rel=1e-9)
    assert score.top1 == (p.argmax(1) == q.argmax(1)).mean()


def test_equal_logits_agree_completely():
    logits = torch.randn(4, 9)
    score = score_passage(logits, logits, torch.tensor([1, 2, 3]))
    assert (score.kl, score.top1) == (0.0, 1.0)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_numbers_agree_with_nothing(value, both):
    broken = torch.full((4, 9), value)
    native = broken if both else torch.randn(4, 9)
    score = score_passage(broken, native, torch.tensor([1, 2, 3]))
    assert (score.loss, score.kl, score.top1) == (math.inf, math.inf, 0.0)


def test_an_interval_covers_the_truth_as_often_as_it_says():
    chance = np.random.default_rng(3)
    covered = 0
    for _ in range(60):
        rows = chance.normal(2, 1, (60, 1))
        interval = bootstrap([str(n) for n in range(60)], rows, lambda mean: float(mean[0]))
        assert interval.mean == pytest.approx(rows.mean())
        covered += interval.low <= 2 <= interval.high
    assert 50 <= covered <= 60


def test_passages_of_one_document_count_as_one_draw():
    """Sixty passages of four documents, equal within each, know no more than four numbers."""
    values = np.repeat([1.0, 2.0, 3.0, 4.0], 15)[:, None]
    apart = bootstrap([str(n) for n in range(60)], values, lambda mean: float(mean[0]))
    together = bootstrap(np.repeat(list("abcd"), 15).tolist(), values, lambda mean: float(mean[0]))
    assert apart.mean == together.mean == 2.5
    assert together.high - together.low > 3 * (apart.high - apart.low)


def test_an_interval_is_reproducible():
    rows = np.random.default_rng(0).normal(0, 1, (20, 2))
    one, two = (
        bootstrap(list("abcdefghijklmnopqrst"), rows, lambda mean: float(mean[0] / mean[1]))
        for _ in range(2)
    )
    assert one == two


def test_retention_and_gap():
    assert retention(2.0, 2.0) == 1.0
    assert retention(2.0, 2.5) == pytest.approx(math.exp(-0.5))
    assert gap_recovered(2.0, 2.0, 3.0) == 1.0
    assert gap_recovered(2.0, 3.0, 3.0) == 0.0
    assert gap_recovered(2.0, 2.25, 3.0) == 0.75
    assert gap_recovered(2.0, 4.0, 3.0) == -1.0
