"""The check of one mapper: definitional tests first, then the arms, then the thresholds."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ModelError, TextError
from kvstore_xfer.fit.text import sequences_digest
from kvstore_xfer.gate.arms import ARMS, ArmScores, Runner, run_arms
from kvstore_xfer.gate.record import ACCEPTED, REJECTED, GateRecord, Thresholds, subject
from kvstore_xfer.gate.score import Interval, bootstrap, gap_recovered, retention
from kvstore_xfer.mapper.convert import TorchConverter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.mapper.artifact import Artifact
    from kvstore_xfer.mapper.maps import Mapper

CONTROLS = ("wrong", "none", "source")


def check(
    artifact: Artifact,
    source: Runner,
    target: Runner,
    passages: Sequence[TokenSequence],
    prefix: int,
    *,
    thresholds: Thresholds | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GateRecord:
    """Measure a mapper on held-out passages and decide.

    Passages of documents that the fit has seen are left out. Raises ModelError when the models are
    not those of the mapper, TextError when too few passages are left or they are too long.
    """
    mapper, limits = artifact.mapper, thresholds or Thresholds()
    _require_models(mapper, source, target)
    unseen = _unseen(artifact, passages)
    dtype = str(target.dtype).removeprefix("torch.")
    about: dict[str, Any] = {**subject(mapper, dtype), "thresholds": asdict(limits)}
    documents = len({passage.document for passage in unseen})
    size: dict[str, Any] = {
        "text_digest": sequences_digest(unseen),
        "passages": len(unseen),
        "documents": documents,
        "prefix_tokens": prefix,
        "tail_tokens": len(unseen[0].tokens) - prefix,
    }
    needed = max(2, limits.min_documents)  # the control takes its cache from another document
    if len(unseen) < limits.min_passages or documents < needed:
        # Not a verdict on the mapper: an earlier record must stay.
        raise TextError(
            f"--text: {len(unseen)} passages of {documents} documents that the fit has not seen, "
            f"needed are {limits.min_passages} of {needed}; give more text"
        )
    longest = mapper.target.max_positions
    if longest and len(unseen[0].tokens) > longest:
        raise TextError(
            f"--prefix-tokens: passages of {len(unseen[0].tokens)} tokens are longer than the "
            f"target's {longest}; give fewer"
        )
    scores = run_arms(
        source, target, TorchConverter(mapper, target.dtype), unseen, prefix, progress
    )
    broken = next((arm for arm in ARMS if not _finite(scores, arm)), None)
    if broken is not None:
        reason = f"logits: the {broken} arm gave values that are not numbers"
        return GateRecord(REJECTED, reason, **about, **size)
    figures = _figures(scores)
    reason = _first_failure(figures, limits)
    return GateRecord(REJECTED if reason else ACCEPTED, reason, **about, **size, **figures)


def _require_models(mapper: Mapper, source: Runner, target: Runner) -> None:
    for role, runner, fitted in (
        ("source", source, mapper.source),
        ("target", target, mapper.target),
    ):
        if runner.description.fingerprint() != fitted.fingerprint():
            raise ModelError(
                f"{runner.description.name}: not the {role} this mapper was fitted for "
                f"({fitted.name}); give the right model with --{role} or fit again"
            )
    if source.dtype != target.dtype:
        raise ModelError("source and target must be checked in one dtype; give --dtype")


def _unseen(artifact: Artifact, passages: Sequence[TokenSequence]) -> list[TokenSequence]:
    seen = set(artifact.fit.get("calibration", {}).get("documents", ()))
    unseen = [passage for passage in passages if passage.document not in seen]
    if not unseen:
        raise TextError(
            "--text: every document was used in the fit; give documents that the fit has not seen"
        )
    return unseen


def _finite(scores: ArmScores, arm: str) -> bool:
    return all(
        math.isfinite(score.kl) and math.isfinite(score.loss) for score in scores.scores[arm]
    )


def _figures(scores: ArmScores) -> dict[str, Any]:
    """Everything a record says about the arms, from the scores of all passages."""
    table = {
        (arm, name): [getattr(score, name) for score in scores.scores[arm]]
        for arm in ARMS
        for name in ("loss", "kl", "top1")
    }

    def interval(*columns: tuple[str, str], statistic: Callable[..., float]) -> Interval:
        rows = list(zip(*(table[column] for column in columns), strict=True))
        return bootstrap(scores.documents, rows, lambda means: float(statistic(*means)))

    arms = {
        arm: {
            name: asdict(interval((arm, name), statistic=lambda mean: mean))
            for name in ("loss", "kl", "top1")
        }
        for arm in ARMS
    }
    share = {
        arm: asdict(
            interval(("mapped", "kl"), (arm, "kl"), statistic=lambda m, c: m / max(c, 1e-12))
        )
        for arm in CONTROLS
    }
    losses = (("native", "loss"), ("mapped", "loss"))
    gap = interval(
        ("native", "loss"), ("source", "loss"), statistic=lambda native, source: source - native
    )
    return {
        "identity_max_abs_diff": scores.identity_max_abs_diff,
        "arms": arms,
        "kl_share": share,
        "retention": asdict(interval(*losses, statistic=retention)),
        "gap_recovered": asdict(interval(*losses, ("source", "loss"), statistic=gap_recovered))
        if gap.low > 0
        else None,
        "prefill_tokens_per_second": scores.prefix_tokens / scores.prefill_seconds,
        "conversion_tokens_per_second": scores.prefix_tokens / scores.conversion_seconds,
    }


def _first_failure(figures: dict[str, Any], limits: Thresholds) -> str:
    """The first threshold that is missed, in words; empty when all are met."""
    difference = figures["identity_max_abs_diff"]
    if not difference <= limits.max_identity_difference:
        return f"identity: the target's own cache changes its logits by {difference:.3g}"
    for control in CONTROLS:
        share = figures["kl_share"][control]["high"]
        if not share <= limits.max_kl_share:
            return (
                f"kl_share.{control}: mapped KL may be {share:.0%} of the control's, "
                f"allowed is {limits.max_kl_share:.0%}"
            )
    agreement = figures["arms"]["mapped"]["top1"]["low"]
    if not agreement >= limits.min_top1:
        return f"top1: agreement may be as low as {agreement:.3f}, needed is {limits.min_top1}"
    return ""
