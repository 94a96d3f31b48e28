"""`kvxfer eval`: benchmarks from mapped caches through lm-evaluation-harness, and hand-offs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvstore_xfer.cli.common import natural_int, positive_int, progress
from kvstore_xfer.cli.models import add_model_options, load_pair
from kvstore_xfer.cli.output import open_console
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.handoff import Drift, run_handoffs
from kvstore_xfer.mapper.artifact import load
from kvstore_xfer.mapper.convert_select import make_converter

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from kvstore_xfer.mapper.artifact import Artifact
    from kvxfer_transformers.model import LoadedModel


# What acts on tasks and what on hand-offs, with its default.
_OPTIONS_OF: dict[str, dict[str, Any]] = {
    "tasks": {
        "include": None,
        "limit": None,
        "few_shot": None,
        "split_at": "\\n\\n",
        "hold_back": 16,
    },
    "turns": {"handoffs": 10, "turn_tokens": 64, "conversations": 20},
}


@dataclass(frozen=True)
class TaskRow:
    """One benchmark in one direction. Ratios are None where their denominator is not positive."""

    source: str
    target: str
    task: str
    metric: str
    n: int
    chance: float
    native: float
    mapped: float
    none: float
    source_alone: float
    stderr: float

    @property
    def retention(self) -> float | None:
        return _ratio(self.mapped, self.native)

    @property
    def floor_normalised(self) -> float | None:
        return _ratio(self.mapped - self.chance, self.native - self.chance)

    @property
    def gap_recovered(self) -> float | None:
        return _ratio(self.mapped - self.source_alone, self.native - self.source_alone)

    def to_json(self) -> dict[str, Any]:
        ratios = ("retention", "floor_normalised", "gap_recovered")
        return {**asdict(self), **{name: getattr(self, name) for name in ratios}}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="benchmarks from mapped caches (lm-evaluation-harness), and hand-offs back and forth",
        description="The context of every question comes from a cache, question and answer are "
        "read natively. Nothing is recorded: 'kvxfer check' decides.",
    )
    parser.add_argument("mapper", type=Path, metavar="MAPPER", help="mapper folder")
    parser.add_argument("--back", type=Path, metavar="MAPPER", help="mapper of the other direction")
    parser.add_argument("--tasks", default="", metavar="NAME,...", help="tasks of the harness")
    parser.add_argument("--include", type=Path, metavar="DIR", help="folder with more task files")
    parser.add_argument("--limit", type=positive_int, help="at most this many questions a task")
    parser.add_argument("--few-shot", type=natural_int, help="examples before a question")
    parser.add_argument(
        "--split-at",
        help="the context is cached up to the last of these (default: a blank line)",
    )
    parser.add_argument(
        "--hold-back",
        type=positive_int,
        help="last tokens of a context without one, read natively (default: 16)",
    )
    parser.add_argument(
        "--turns", type=Path, metavar="FILE", help="text for hand-offs; with --back"
    )
    parser.add_argument("--handoffs", type=positive_int, help="default: 10")
    parser.add_argument("--turn-tokens", type=positive_int, help="default: 64")
    parser.add_argument("--conversations", type=positive_int, help="default: 20")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    names = [name for name in options.tasks.split(",") if name]
    if not names and options.turns is None:
        raise ConfigError("give --tasks NAME,... or --turns FILE")
    if options.turns is not None and options.back is None:
        raise ConfigError("--turns: hand-offs go both ways; give the other mapper with --back")
    _settle(options, tasks=bool(names))
    forward = load(options.mapper)
    back = None if options.back is None else load(options.back)
    if back is not None:
        _require_reverse(forward, back)
    mapper = forward.mapper
    source, target = load_pair(mapper.source.name, mapper.target.name, options)
    rows = _tasks(options, names, forward, source, target) if names else []
    if names and back is not None:
        rows += _tasks(options, names, back, target, source)
    drifts = _handoffs(options, (forward, back), source, target) if options.turns and back else []
    if options.json:
        told = {"tasks": [row.to_json() for row in rows], "turns": [d.to_json() for d in drifts]}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        _print(rows, drifts, open_console())
    return 0


def _settle(options: argparse.Namespace, *, tasks: bool) -> None:
    """Give options their defaults. Raises ConfigError for those that would be ignored."""
    wanted = {"tasks": tasks, "turns": options.turns is not None}
    for what, defaults in _OPTIONS_OF.items():
        for name, default in defaults.items():
            if getattr(options, name) is None:
                setattr(options, name, default)
            elif not wanted[what]:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: acts on --{what} only; add that, or leave it out"
                )


def _require_reverse(forward: Artifact, back: Artifact) -> None:
    there, here = forward.mapper, back.mapper
    if (there.source.fingerprint(), there.target.fingerprint()) != (
        here.target.fingerprint(),
        here.source.fingerprint(),
    ):
        raise ConfigError(
            f"--back: maps {here.source.name} to {here.target.name}, not back from "
            f"{there.target.name} to {there.source.name}; give the mapper of that direction"
        )


def _tasks(
    options: argparse.Namespace,
    names: list[str],
    artifact: Artifact,
    source: LoadedModel,
    target: LoadedModel,
) -> list[TaskRow]:
    try:
        from kvxfer_transformers.harness import Boundary, evaluate
    except ImportError as error:
        raise ConfigError(f"eval: needs {error.name}; pip install 'kvstore-xfer[eval]'") from None
    boundary = Boundary(options.split_at.encode().decode("unicode_escape"), options.hold_back)
    converter = make_converter(artifact.mapper, target.dtype, "cpu")
    results = evaluate(
        source,
        target,
        converter,
        names,
        boundary,
        include=options.include,
        limit=options.limit,
        few_shot=options.few_shot,
    )
    pair = (source.description.name, target.description.name)
    return [TaskRow(*pair, **result) for result in results]


def _handoffs(
    options: argparse.Namespace,
    artifacts: tuple[Artifact, Artifact],
    source: LoadedModel,
    target: LoadedModel,
) -> list[Drift]:
    """The source begins, then the target: every hand-off changes the direction."""
    tokens = options.turn_tokens
    passages = cut_sequences(
        options.turns,
        source.tokenize,
        tokens=tokens * (options.handoffs + 1),
        count=options.conversations,
        shorter="a smaller --turn-tokens or --handoffs",
    )
    converters = (
        make_converter(artifacts[0].mapper, target.dtype, "cpu"),
        make_converter(artifacts[1].mapper, source.dtype, "cpu"),
    )
    with progress("handing off") as update:
        return run_handoffs((source, target), converters, passages, tokens, update)


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom > 0 else None


def _print(rows: list[TaskRow], drifts: list[Drift], console: Console) -> None:
    for source, target in dict.fromkeys((row.source, row.target) for row in rows):
        table = Table(
            "task",
            "n",
            "chance",
            "target",
            "source",
            "no context",
            "mapped",
            "retention",
            "floor-norm.",
            "gap recovered",
            title=f"{source} -> {target}",
        )
        for row in rows:
            if (row.source, row.target) == (source, target):
                _add_task(table, row)
        console.print(table)
    if drifts:
        table = Table("hand-offs", "speaker", "KL", "top-1", "loss over own cache", title="drift")
        for drift in drifts:
            cells = [_interval(cell) for cell in (drift.kl, drift.top1, drift.excess_loss)]
            table.add_row(str(drift.handoffs), drift.speaker, *cells)
        console.print(table)


def _add_task(table: Table, row: TaskRow) -> None:
    scores = (row.native, row.source_alone, row.none)
    ratios = (row.retention, row.floor_normalised, row.gap_recovered)
    table.add_row(
        f"{row.task} ({row.metric})",
        str(row.n),
        f"{row.chance:.3f}",
        *(f"{score:.3f}" for score in scores),
        f"{row.mapped:.3f} ± {row.stderr:.3f}",
        *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
    )


def _interval(cell: dict[str, float]) -> str:
    return f"{cell['mean']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]"
