"""Thresholds against figures: the first that is missed, in words; an empty string when none is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore_xfer.gate.figures import CONTROLS
from kvstore_xfer.gate.lengths import CALIBRATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.gate.record import GateRecord, Thresholds


def record_failure(record: GateRecord, limits: Thresholds, lengths: Sequence[str]) -> str:
    """An accepted record against other thresholds than those it was made with."""
    figures = record.to_json()
    measured = {CALIBRATION: figures, **{n: f for n, f in record.lengths.items() if "arms" in f}}
    missing = [name for name in lengths if name not in (*measured, *record.lengths)]
    if missing:
        return f"lengths.{missing[0]}: not measured"
    size = min(measured.values(), key=lambda length: int(length["passages"]))
    for name in ("passages", "documents"):
        if size[name] < getattr(limits, f"min_{name}"):
            return f"{name}: measured on {size[name]}, needed are {getattr(limits, f'min_{name}')}"
    reason = identity_failure(record.identity_max_abs_diff, limits)
    reason = reason or attention_failure(record.attention, limits)
    for name, length in measured.items():
        reason = reason or arms_failure(name, length, figures, limits)
    return reason or (tasks_failure(record.tasks, limits) if record.tasks else "")


def held_back_failure(record: GateRecord, hold_back: int) -> str:
    """A record against the `hold_back_tokens` of the policy that the mapper is to serve under."""
    measured = record.hold_back_tokens
    if measured <= hold_back:
        return ""
    return (
        f"hold_back_tokens: the check left the newest {measured} tokens to the target, the policy "
        f"leaves {hold_back}; set hold_back_tokens: {measured} under policy, or check again"
    )


def identity_failure(difference: float, limits: Thresholds) -> str:
    if difference <= limits.max_identity_difference:
        return ""
    return f"identity: the target's own cache changes its logits by {difference:.3g}"


def attention_failure(attention: dict[str, Any], limits: Thresholds) -> str:
    mean = attention["mean"]["low"]
    if not mean >= limits.min_cosine:
        return (
            f"attention.mean: the cosine of the attention output may be {mean:.3f}, needed is "
            f"{limits.min_cosine}"
        )
    layer = attention["worst_layer"]
    worst = attention["by_layer"][layer]["low"]
    if not worst >= limits.min_layer_cosine:
        return (
            f"attention.layer: in layer {layer} the cosine of the attention output may be "
            f"{worst:.3f}, needed is {limits.min_layer_cosine}"
        )
    return ""


def arms_failure(
    name: str, figures: dict[str, Any], calibration: dict[str, Any], limits: Thresholds
) -> str:
    """One length; `calibration` are the figures at the calibration length."""
    where = "" if name == CALIBRATION else f"lengths.{name}."
    for control in CONTROLS:
        share = figures["kl_share"][control]["high"]
        if not share <= limits.max_kl_share:
            return (
                f"{where}kl_share.{control}: mapped KL may be {share:.0%} of the control's, "
                f"allowed is {limits.max_kl_share:.0%}"
            )
    agreement = figures["arms"]["mapped"]["top1"]["low"]
    if not agreement >= limits.min_top1:
        return (
            f"{where}top1: agreement may be as low as {agreement:.3f}, needed is {limits.min_top1}"
        )
    return _loss_failure(where, figures, limits) or _growth_failure(
        where, figures, calibration, limits
    )


def _loss_failure(where: str, figures: dict[str, Any], limits: Thresholds) -> str:
    ratio = figures["perplexity_ratio"]["high"]
    if not ratio <= limits.max_perplexity_ratio:
        return (
            f"{where}perplexity_ratio: may be {ratio:.3f}, allowed is {limits.max_perplexity_ratio}"
        )
    loss = {arm: figures["arms"][arm]["loss"]["mean"] for arm in ("mapped", "native", "source")}
    behind = loss["mapped"] - max(loss["native"], loss["source"])
    if not behind <= limits.max_behind_both:
        return (
            f"{where}behind_both: {behind:.3f} nats a token worse than both models, allowed is "
            f"{limits.max_behind_both}"
        )
    return ""


def _growth_failure(
    where: str, figures: dict[str, Any], calibration: dict[str, Any], limits: Thresholds
) -> str:
    """Only where a length is longer than the calibration's."""
    if figures["prefix_tokens"] <= calibration["prefix_tokens"]:
        return ""
    growth = growth_of(figures, calibration)
    what = "KL over that of no context" if figures.get("hold_back_tokens") else "KL"
    if not growth <= limits.max_growth:
        return (
            f"{where}growth: {what} is {growth:.2f} times that at the calibration length, allowed "
            f"is {limits.max_growth}"
        )
    return ""


def growth_of(figures: dict[str, Any], calibration: dict[str, Any]) -> float:
    """KL at one length over that at the calibration length.

    Tokens that are held back tell less and less of a longer prefix, with any map and with none: KL
    then counts as a share of that of no context.
    """

    def growth(arm: str) -> float:
        kl, base = (cell["arms"][arm]["kl"]["mean"] for cell in (figures, calibration))
        return float(kl / max(base, 1e-12))

    if figures.get("hold_back_tokens"):
        return growth("mapped") / max(growth("none"), 1e-12)
    return growth("mapped")


def tasks_failure(figures: dict[str, Any], limits: Thresholds) -> str:
    """Nothing is asked of a mapper where the target itself does not beat guessing."""
    kept = figures["floor_normalised"]
    if kept is None:
        return ""
    if not kept["low"] >= limits.min_task_retention:
        return (
            f"tasks.floor_normalised: retention above chance may be {kept['low']:.3f}, needed is "
            f"{limits.min_task_retention}"
        )
    controls = [arm for arm in ("wrong", "none") if figures["needs_context"]]
    controls += ["source"] if figures["gap_recovered"] is not None else []
    for arm in controls:
        margin = figures["over_controls"][arm]["low"]
        if not margin > 0:
            return (
                f"tasks.{arm}: the mapped cache may answer no better than this control "
                f"({margin:+.3f})"
            )
    return ""
