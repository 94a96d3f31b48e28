"""`kvxfer family validate`: is a manifest right, and would its pairs serve."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from kvstore_xfer.cli.output import open_console
from kvstore_xfer.errors import ConfigError, KvxferError
from kvstore_xfer.family import (
    Family,
    PairEntry,
    json_schema,
    load_family,
    unmet,
)
from kvstore_xfer.gate.record import GateRecord, refusal
from kvstore_xfer.mapper.artifact import load
from kvstore_xfer.models.description import ModelDescription, describe
from kvstore_xfer.store.url import check_url
from kvstore_xfer.tier.policy import direction_of

if TYPE_CHECKING:
    import argparse

    from kvstore_xfer.mapper.artifact import Artifact


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("family", help="validate a family manifest")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    validate = commands.add_parser(
        "validate",
        help="check the manifest, its models and its mappers",
        description="Exit code 0: all as stated (a pair may be off), 2: something is wrong.",
    )
    validate.add_argument("manifest", type=Path, metavar="FILE")
    validate.set_defaults(run=run)
    schema = commands.add_parser("schema", help="print the manifest's JSON Schema")
    schema.set_defaults(run=print_schema)


def run(options: argparse.Namespace) -> int:
    family = load_family(options.manifest)
    folder = options.manifest.resolve().parent
    try:
        check_url(family.store)
    except ConfigError as error:
        raise ConfigError(f"{options.manifest}: store: {error}") from None
    models = {
        name: _describe(options.manifest, name, entry.path, entry.revision, folder)
        for name, entry in family.models.items()
    }
    table = Table("source", "target", "direction", "mapper", "state")
    for number, entry in enumerate(family.pairs):
        table.add_row(entry.source, entry.target, *_pair(options.manifest, family, number, models))
    console = open_console()
    console.print(f"{options.manifest}: {family.family}, {_count(family)}", highlight=False)
    if family.pairs:
        console.print(table)
    return 0


def print_schema(options: argparse.Namespace) -> int:
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
    return 0


def _count(family: Family) -> str:
    return f"{len(family.models)} models, {len(family.pairs)} pairs"


def _describe(
    manifest: Path, name: str, path: str, revision: str | None, folder: Path
) -> ModelDescription:
    local = folder / path
    try:
        return describe(local if local.is_dir() else path, revision=revision)
    except KvxferError as error:
        raise ConfigError(f"{manifest}: models.{name}.path: {error}") from None


def _pair(
    manifest: Path, family: Family, number: int, models: dict[str, ModelDescription]
) -> tuple[str, str, str]:
    """Direction, mapper and state of one pair. Raises ConfigError naming the field."""
    entry = family.pairs[number]
    where = f"{manifest}: pairs.{number}"
    try:
        artifact = load(manifest.resolve().parent / entry.mapper)
    except KvxferError as error:
        raise ConfigError(f"{where}.mapper: {error}") from None
    for role in ("source", "target"):
        fitted: ModelDescription = getattr(artifact.mapper, role)
        if fitted.fingerprint() != models[getattr(entry, role)].fingerprint():
            raise ConfigError(
                f"{where}.mapper: was fitted for another {role} ({fitted.name}); fit this pair"
            )
    direction = direction_of(artifact.mapper.source, artifact.mapper.target)
    if entry.direction not in (None, direction):
        raise ConfigError(f"{where}.direction: the models' sizes say {direction.value}; correct it")
    return direction.value, artifact.mapper.digest[:12], _state(family, entry, artifact)


def _state(family: Family, entry: PairEntry, artifact: Artifact) -> str:
    if not entry.policy.enabled:
        return "off: disabled"
    states = []
    for dtype, stored in artifact.gate.items():
        record = GateRecord.from_json(stored)
        reason = refusal(record, artifact.mapper, artifact.mapper.target)
        state = unmet(family, entry, record) or "serves" if reason is None else reason.value
        states.append(f"{dtype}: {state}")
    return ", ".join(states) or "off: not checked yet (kvxfer check)"
