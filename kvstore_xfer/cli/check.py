"""`kvxfer check`: measure mappers on held-out text, record the verdicts, exit 0 or 3."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_xfer.cli.common import natural_int, positive_int, progress
from kvstore_xfer.cli.models import add_model_options, load_pair
from kvstore_xfer.cli.output import open_console
from kvstore_xfer.cli.show_record import print_record
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.family import GateEntry, gate_of, load_family, thresholds_of
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.lengths import CALIBRATION, LENGTHS, Length, cut_lengths
from kvstore_xfer.gate.relation import LEAST_TOKENS
from kvstore_xfer.gate.tasks import read_tasks
from kvstore_xfer.gate.watch import make_watch, save_watch
from kvstore_xfer.mapper.artifact import load, record_gate
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.report.page import require_report, write_report
from kvxfer_transformers.model import LoadedModel
from kvxfer_transformers.queries import capture_queries
from kvxfer_transformers.remembered import RememberedModel

if TYPE_CHECKING:
    from kvstore_xfer.gate.record import GateRecord
    from kvstore_xfer.mapper.artifact import Artifact

EXIT_REJECTED = 3


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="measure a mapper on held-out text and decide whether it may serve",
        description="Exit code 0: accepted, 3: rejected. The record is kept in the mapper folder. "
        "Of several mappers of one pair the cheapest accepted one is proposed.",
    )
    parser.add_argument("mapper", type=Path, nargs="+", metavar="MAPPER", help="mapper folder")
    parser.add_argument("--text", required=True, type=Path, help="held-out .txt, .jsonl, .parquet")
    parser.add_argument("--source", help="source model, if it is no longer where it was fitted")
    parser.add_argument("--target", help="target model, likewise")
    parser.add_argument("--passages", type=positive_int, default=60, help="default: 60")
    parser.add_argument(
        "--prefix-tokens",
        type=positive_int,
        help="tokens served from the cache (default: three quarters of the fitted length)",
    )
    parser.add_argument(
        "--tail-tokens",
        type=positive_int,
        help="tokens read after it (default: a quarter of the fitted length)",
    )
    parser.add_argument(
        "--hold-back",
        type=natural_int,
        metavar="TOKENS",
        help="newest tokens of every prefix that the target computes itself, as under the policy's "
        "hold_back_tokens (default: those of the pair in --family, else 0)",
    )
    parser.add_argument(
        "--lengths",
        type=length_names,
        metavar="NAME,...",
        help=f"lengths to measure (default: {','.join(LENGTHS)})",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive_int,
        help="longest context both models can use (default: what their configs state)",
    )
    parser.add_argument("--tasks", type=Path, metavar="FILE", help=".jsonl of questions to answer")
    parser.add_argument(
        "--family",
        type=Path,
        metavar="FILE",
        help="family manifest with thresholds and policy of this pair",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write a page, .html (extra: report)"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.report:
        require_report(options.report)
    folders = list(dict.fromkeys(options.mapper))
    artifacts = {folder: load(folder) for folder in folders}
    _require_one_pair(artifacts, options.report)
    asked = {folder: _asked(options, folder) for folder in folders}
    for each in asked.values():
        _require_passages(options.passages, thresholds_of(each.gate).min_passages)
    mapper = artifacts[folders[0]].mapper
    models = load_pair(
        options.source or mapper.source.name, options.target or mapper.target.name, options
    )
    with tempfile.TemporaryDirectory() as kept:
        measured: Models = models
        if len(folders) > 1:  # both models then read every text once
            source, target = (
                RememberedModel(model, Path(kept) / role)
                for model, role in zip(models, ("source", "target"), strict=True)
            )
            measured = source, target
        records = {
            folder: _check(options, folder, artifact, asked[folder], models, measured)
            for folder, artifact in artifacts.items()
        }
    proposed = cheapest({f: (artifacts[f].mapper.parameters, records[f]) for f in folders})
    if options.json:
        shown: Any = {str(folder): record.to_json() for folder, record in records.items()}
        if len(folders) == 1:
            (shown,) = shown.values()
        else:
            shown = {"proposed": proposed and str(proposed), "records": shown}
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        _print_all(artifacts, records, proposed)
    return EXIT_REJECTED if proposed is None else 0


Models = tuple[LoadedModel, LoadedModel] | tuple[RememberedModel, RememberedModel]


@dataclass(frozen=True)
class _Asked:
    """What one mapper is held to, and how many of the newest tokens it will not serve."""

    gate: GateEntry
    hold_back: int


def _require_one_pair(artifacts: dict[Path, Artifact], report: Path | None) -> None:
    if report and len(artifacts) > 1:
        raise ConfigError(f"--report {report}: a page is about one mapper; check it alone")
    pairs = {
        (a.mapper.source.fingerprint(), a.mapper.target.fingerprint()): folder
        for folder, a in artifacts.items()
    }
    if len(pairs) > 1:
        first, second, *_ = pairs.values()
        raise ConfigError(
            f"MAPPER: {first} and {second} are of different pairs, of which none is cheaper; "
            "check them one by one"
        )


def _check(
    options: argparse.Namespace,
    folder: Path,
    artifact: Artifact,
    asked: _Asked,
    models: tuple[LoadedModel, LoadedModel],
    measured: Models,
) -> GateRecord:
    """Check one mapper and keep what the tier needs of it. `measured` stand for `models`."""
    lengths = _lengths(options, artifact, asked, models)
    source, target = measured
    with progress("checking") as update:
        record = check(
            artifact,
            source,
            target,
            lengths[0].passages,
            lengths[0].prefix_tokens,
            lengths=lengths[1:],
            tasks=read_tasks(options.tasks, models[1].tokenize) if options.tasks else (),
            thresholds=thresholds_of(asked.gate),
            hold_back=asked.hold_back,
            progress=update,
        )
    if record.concerns_mapper:
        record_gate(folder, record.dtype, record.to_json())
    if record.accepted:
        _keep_watch(folder, artifact, models, lengths[0], asked.hold_back)
    if options.report:
        write_report(options.report, artifact, record)
    return record


def _lengths(
    options: argparse.Namespace,
    artifact: Artifact,
    asked: _Asked,
    models: tuple[LoadedModel, LoadedModel],
) -> list[Length]:
    """The passages to measure, those of the calibration length first."""
    gate = asked.gate
    fitted = int(artifact.fit["calibration"]["tokens_per_sequence"])
    tail = options.tail_tokens or max(2, fitted // 4)
    prefix = options.prefix_tokens or max(1, fitted * 3 // 4)
    if tail < 2:
        raise ConfigError("--tail-tokens 1: one token leaves nothing to predict; give 2 or more")
    stated = [model.description.max_positions for model in models]
    lengths = cut_lengths(
        options.text,
        models[1].tokenize,
        prefix=prefix,
        tail=tail,
        count=options.passages,
        longest=options.max_tokens or gate.max_tokens or min(filter(None, stated), default=0),
        wanted=(CALIBRATION, *(options.lengths or gate.lengths or LENGTHS)),
        hold_back=asked.hold_back,
    )
    _require_watchable(prefix, asked.hold_back)
    return lengths


def _require_watchable(prefix: int, hold_back: int) -> None:
    """Raises ConfigError where too little is converted to relate it to what it costs."""
    if prefix - hold_back < LEAST_TOKENS:
        held = f" with --hold-back {hold_back} (or the policy's)" if hold_back else ""
        raise ConfigError(
            f"--prefix-tokens {prefix}{held}: leaves {max(0, prefix - hold_back)} tokens to "
            f"convert, a watch in production is measured on {LEAST_TOKENS}; give more "
            "--prefix-tokens, or hold back fewer"
        )


def cheapest(checked: dict[Path, tuple[int, GateRecord]]) -> Path | None:
    """Of the accepted mappers the one with the fewest parameters: each is used once a token.

    Among equals, such as the same maps under other weights, the one with the smallest KL.
    """
    accepted = {
        folder: (size, record.arms["mapped"]["kl"]["mean"])
        for folder, (size, record) in checked.items()
        if record.accepted
    }
    return min(accepted, key=lambda folder: accepted[folder], default=None)


def _print_all(
    artifacts: dict[Path, Artifact], records: dict[Path, GateRecord], proposed: Path | None
) -> None:
    console = open_console()
    for folder, record in records.items():
        if len(records) > 1:
            mapper = artifacts[folder].mapper
            console.print(
                f"\n{folder}: {mapper.method.value}, {mapper.parameters:,} parameters",
                highlight=False,
            )
        print_record(record, console)
    if len(records) > 1:
        accepted = sum(record.accepted for record in records.values())
        cost = f"{proposed}, the cheapest of {accepted} accepted" if proposed else "none"
        console.print(f"\nproposed: {cost}", highlight=False)


def _keep_watch(
    folder: Path,
    artifact: Artifact,
    models: tuple[LoadedModel, LoadedModel],
    length: Length,
    hold_back: int,
) -> None:
    """What a running tier needs to relate what it sees to retention."""
    source, target = models
    with progress("relating it to retention") as update:
        watch = make_watch(
            artifact.mapper.digest,
            source,
            target,
            make_converter(artifact.mapper, target.dtype, "cpu"),
            partial(capture_queries, target),
            length.passages,
            length.prefix_tokens,
            update,
            hold_back,
        )
    save_watch(folder, str(target.dtype).removeprefix("torch."), watch)


def length_names(text: str) -> list[str]:
    """An argparse type: names of lengths, with commas between."""
    names = text.split(",")
    unknown = [name for name in names if name not in LENGTHS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no length; known: {', '.join(LENGTHS)}"
        )
    return names


def _require_passages(asked: int, needed: int) -> None:
    """Raises ConfigError where no text is enough."""
    if asked < needed:
        raise ConfigError(f"--passages {asked}: the gate needs {needed}; give {needed} or more")


def _asked(options: argparse.Namespace, mapper: Path) -> _Asked:
    """What the options, else the family manifest's pair with this mapper folder, ask."""
    manifest, given = options.family, options.hold_back
    if manifest is None:
        return _Asked(GateEntry(), given or 0)
    family = load_family(manifest)
    for pair in family.pairs:
        if (manifest.resolve().parent / pair.mapper).resolve() == mapper.resolve():
            held = pair.policy.hold_back_tokens if given is None else given
            return _Asked(gate_of(family, pair) or GateEntry(), held)
    raise ConfigError(f"--family {manifest}: no pair has the mapper {mapper}; correct one of them")
