"""`kvxfer doctor`: checks of the installation, a manifest, its store, and running engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from kvstore_xfer.cli.output import open_console
from kvstore_xfer.doctor.family import (
    Patient,
    check_manifest,
    check_mappers,
    check_models,
    check_store,
)
from kvstore_xfer.doctor.findings import Level
from kvstore_xfer.doctor.installation import check_installation
from kvstore_xfer.doctor.matching import check_matching
from kvstore_xfer.doctor.running import check_running

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.doctor.findings import Finding

EXIT_PROBLEMS = 1
_MARKS = {
    Level.OK: ("ok      ", "green"),
    Level.NOTE: ("note    ", ""),
    Level.PROBLEM: ("PROBLEM ", "red"),
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what works here and what does not, with the remedy",
        description="Exit code 0: no problem found, 1: at least one. Writes one block into the "
        "store and deletes it again; makes no folder.",
    )
    parser.add_argument("manifest", type=Path, metavar="FILE", help="family manifest")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="metrics endpoint of a running engine; may be given several times",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    console = open_console()
    worst = 0
    for finding in examine(options.manifest, options.engine):
        line = Text.assemble(_MARKS[finding.level], f"{finding.about}: {finding.text}")
        console.print(line)
        if finding.remedy:
            console.print(f"        remedy: {finding.remedy}", highlight=False)
        if finding.level is Level.PROBLEM:
            worst = EXIT_PROBLEMS
    return worst


def examine(manifest: Path, engines: Sequence[str] = ()) -> Iterator[Finding]:
    """All findings, in the order of the way of a block."""
    patient = Patient(manifest)
    try:
        yield from check_installation()
        yield from check_manifest(patient)
        yield from check_models(patient)
        yield from check_store(patient)
        yield from check_mappers(patient)
        yield from check_matching(patient)
        for url in engines:
            yield from check_running(url)
    finally:
        if patient.store is not None:
            patient.store.close()
