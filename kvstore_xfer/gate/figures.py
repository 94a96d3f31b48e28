"""What a record says about scores: means with 95 % intervals over documents, and comparisons."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore_xfer.gate.score import Interval, bootstrap, gap_recovered, retention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.gate.arms import ArmScores
    from kvstore_xfer.gate.tasks import TaskScores

CONTROLS = ("wrong", "none", "source")


def first_broken_arm(scores: ArmScores) -> str | None:
    """The first arm whose logits are not numbers."""
    for arm, rows in scores.scores.items():
        if not all(math.isfinite(row.kl) and math.isfinite(row.loss) for row in rows):
            return arm
    return None


def arm_figures(scores: ArmScores) -> dict[str, Any]:
    """Everything a record says about the arms at one length, from the scores of all passages."""
    table = {
        (arm, name): [getattr(row, name) for row in rows]
        for arm, rows in scores.scores.items()
        for name in ("loss", "kl", "top1")
    }

    def interval(*columns: tuple[str, str], statistic: Callable[..., float]) -> dict[str, float]:
        rows = list(zip(*(table[column] for column in columns), strict=True))
        return asdict(bootstrap(scores.documents, rows, lambda means: float(statistic(*means))))

    losses = (("native", "loss"), ("mapped", "loss"))
    gap = interval(
        ("native", "loss"), ("source", "loss"), statistic=lambda native, source: source - native
    )
    return {
        "arms": {
            arm: {
                name: interval((arm, name), statistic=lambda mean: mean)
                for name in ("loss", "kl", "top1")
            }
            for arm in scores.scores
        },
        "kl_share": {
            arm: interval(("mapped", "kl"), (arm, "kl"), statistic=lambda m, c: m / max(c, 1e-12))
            for arm in CONTROLS
        },
        "perplexity_ratio": interval(*losses, statistic=lambda n, m: float(np.exp(m - n))),
        "behind_both": interval(
            *losses, ("source", "loss"), statistic=lambda n, m, s: m - max(n, s)
        ),
        "retention": interval(*losses, statistic=retention),
        "gap_recovered": interval(*losses, ("source", "loss"), statistic=gap_recovered)
        if gap["low"] > 0
        else None,
    }


def attention_figures(
    documents: Sequence[str], cosines: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Cosines per passage and layer as intervals: by layer, their mean, and the worst layer."""
    by_layer = [
        asdict(bootstrap(documents, [[row[layer]] for row in cosines], lambda mean: float(mean[0])))
        for layer in range(len(cosines[0]))
    ]
    mean = bootstrap(documents, cosines, lambda means: float(means.mean()))
    worst = min(range(len(by_layer)), key=lambda layer: by_layer[layer]["mean"])
    return {"mean": asdict(mean), "worst_layer": worst, "by_layer": by_layer}


def task_figures(scores: TaskScores) -> dict[str, Any]:
    """Share of right answers per arm; retention, floor-normalised retention and gap recovered.

    A ratio is None where its denominator is not above zero by more than noise: a target that does
    not beat guessing (or its source) says nothing about a mapper.
    """
    documents = scores.documents

    def interval(arms: Sequence[str], statistic: Callable[..., float]) -> Interval:
        columns = [*(scores.right[arm] for arm in arms), scores.chance]
        rows = list(zip(*columns, strict=True))
        return bootstrap(documents, rows, lambda means: float(statistic(*means)))

    above = interval(("native",), lambda native, chance: native - chance)
    gap = interval(("native", "source"), lambda native, source, _: native - source)
    needs_context = interval(("native", "none"), lambda native, none, _: native - none)

    def ratio(
        arms: Sequence[str], statistic: Callable[..., float], *, defined: bool
    ) -> dict[str, float] | None:
        return asdict(interval(arms, statistic)) if defined else None

    def safe(top: float, bottom: float) -> float:
        return top / bottom if bottom > 0 else 0.0

    both, three = ("native", "mapped"), ("native", "mapped", "source")
    return {
        "items": len(documents),
        "documents": len(set(documents)),
        "chance": sum(scores.chance) / len(scores.chance),
        "arms": {arm: asdict(interval((arm,), lambda mean, _: mean)) for arm in scores.right},
        "above_chance": above.low > 0,
        "needs_context": needs_context.low > 0,
        "retention": ratio(both, lambda n, m, _: safe(m, n), defined=above.low > 0),
        "floor_normalised": ratio(both, lambda n, m, c: safe(m - c, n - c), defined=above.low > 0),
        "gap_recovered": ratio(three, lambda n, m, s, _: safe(m - s, n - s), defined=gap.low > 0),
        "over_controls": {
            arm: asdict(interval(("mapped", arm), lambda mapped, other, _: mapped - other))
            for arm in CONTROLS
        },
    }
