"""Comparing what a model says after a prefix with what it would have said natively.

Pure functions of logits and of per-passage figures. KL is KL(native || arm) in nats a token, loss
is nats a token against the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

BOOTSTRAP_SAMPLES = 2000
_SEED = 20_260_801  # one fixed resampling, so that a record can be reproduced


@dataclass(frozen=True)
class PassageScore:
    """One arm on one passage, means over the tokens read after the prefix."""

    loss: float
    kl: float
    top1: float


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def score_passage(
    logits: torch.Tensor, native: torch.Tensor, next_tokens: torch.Tensor
) -> PassageScore:
    """Score logits ``[T, vocab]`` of an arm against the native ones.

    `next_tokens` ``[T - 1]`` are the tokens that follow the first T - 1 positions in the text.
    """
    arm = torch.log_softmax(logits.double(), -1)
    reference = torch.log_softmax(native.double(), -1)
    divergence = (reference.exp() * (reference - arm)).sum(-1)
    agreement = (arm.argmax(-1) == reference.argmax(-1)).double()
    loss = torch.nn.functional.nll_loss(arm[:-1], next_tokens)
    mean = float(divergence.mean())
    if not math.isfinite(mean):  # logits that are not numbers agree with nothing
        return PassageScore(math.inf, math.inf, 0.0)
    return PassageScore(float(loss), max(0.0, mean), float(agreement.mean()))


def text_loss(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """Nats a token of a text ``[T]`` under the logits ``[T, vocab]`` of reading it."""
    following = torch.tensor(list(tokens[1:]), device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), following))


def bootstrap(
    documents: Sequence[str],
    figures: Sequence[Sequence[float]],
    statistic: Callable[[NDArray[np.float64]], float],
) -> Interval:
    """Interval of a statistic of means, resampling whole documents.

    Passages of one document resemble each other, so they are drawn together. `figures` has one row
    per passage; `statistic` takes the column means.
    """
    table = np.asarray(figures, dtype=np.float64)
    names, index = np.unique(np.asarray(documents), return_inverse=True)
    sums = np.zeros((len(names), table.shape[1]))
    np.add.at(sums, index, table)
    sizes = np.bincount(index).astype(np.float64)
    drawn = np.random.default_rng(_SEED).integers(
        0, len(names), size=(BOOTSTRAP_SAMPLES, len(names))
    )
    means = sums[drawn].sum(1) / sizes[drawn].sum(1, keepdims=True)
    samples = [statistic(row) for row in means]
    low, high = np.quantile(samples, (0.025, 0.975))
    return Interval(statistic(table.mean(0)), float(low), float(high))


def retention(native_loss: float, mapped_loss: float) -> float:
    """Share of the native likelihood per token that is kept: 1 is lossless."""
    return float(np.exp(native_loss - mapped_loss))


def gap_recovered(native_loss: float, mapped_loss: float, source_loss: float) -> float:
    """Share of the way from the source's own loss to the target's native loss.

    Meaningful only where the target is better than the source by more than noise.
    """
    return (source_loss - mapped_loss) / (source_loss - native_loss)
