"""A gate's record in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvstore_xfer.gate.arms import ARM_NAMES

if TYPE_CHECKING:
    from rich.console import Console

    from kvstore_xfer.gate.record import GateRecord


def print_record(record: GateRecord, console: Console) -> None:
    """Verdict first, then the arms with their 95 % intervals, length by length."""
    reason = f": {record.reason}" if record.reason else ""
    console.print(f"{record.verdict.upper()}{reason}", highlight=False)
    if not record.passages:
        return
    console.print(
        f"{record.passages} passages of {record.documents} documents, {record.prefix_tokens} "
        f"tokens from the cache, {record.tail_tokens} read after them, {record.dtype}",
        highlight=False,
    )
    if record.hold_back_tokens:
        console.print(
            f"of each prefix the newest {record.hold_back_tokens} tokens are computed by the "
            f"target (hold_back_tokens)",
            highlight=False,
        )
    if record.attention:
        worst = record.attention["by_layer"][record.attention["worst_layer"]]
        console.print(
            f"attention output, cosine: {_interval(record.attention['mean'])}, worst layer "
            f"{record.attention['worst_layer']} {_interval(worst)}",
            highlight=False,
        )
    if not record.arms:
        return
    console.print(_arms_table(record.to_json(), "mean [95 % interval]"))
    gap = "target no better than source" if record.gap_recovered is None else ""
    console.print(
        f"retention {_interval(record.retention)}, gap recovered "
        f"{gap or _interval(record.gap_recovered or {})}, identity differs by "
        f"{record.identity_max_abs_diff:g}",
        highlight=False,
    )
    for name, figures in record.lengths.items():
        if "skipped" in figures:
            console.print(f"{name}: not measured: {figures['skipped']}", highlight=False)
        else:
            console.print(_arms_table(figures, f"{name}: {figures['prefix_tokens']} tokens"))
    if record.tasks:
        _print_tasks(record.tasks, console)


def _arms_table(figures: dict[str, Any], title: str) -> Table:
    table = Table("arm", "loss", "KL", "top-1 agreement", title=title)
    for arm, name in ARM_NAMES.items():
        if arm in figures["arms"]:
            cells = figures["arms"][arm]
            table.add_row(name, *(_interval(cells[column]) for column in ("loss", "kl", "top1")))
    return table


def _print_tasks(figures: dict[str, Any], console: Console) -> None:
    table = Table("arm", "right answers", title=f"{figures['items']} questions")
    for arm, cell in figures["arms"].items():
        table.add_row(ARM_NAMES[arm], _interval(cell))
    console.print(table)
    ratios = {
        "retention": figures["retention"],
        "floor-normalised": figures["floor_normalised"],
        "gap recovered": figures["gap_recovered"],
    }
    told = (f"{name} {_interval(c) if c else 'not defined'}" for name, c in ratios.items())
    console.print(", ".join(told), highlight=False)


def _interval(cell: dict[str, float]) -> str:
    return f"{cell['mean']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]"
