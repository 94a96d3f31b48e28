"""The manifest, its models, its store and its pairs, as they lie on this machine."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.blocks.key import BlockKey
from kvstore_xfer.doctor.findings import note, ok, problem
from kvstore_xfer.errors import KvxferError
from kvstore_xfer.family import load_family
from kvstore_xfer.mapper.artifact import load
from kvstore_xfer.models.description import describe
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_xfer.store.parameters import shown
from kvstore_xfer.store.url import local_folders, open_store
from kvstore_xfer.tier.policy import direction_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore_xfer.doctor.findings import Finding
    from kvstore_xfer.family import Family, PairEntry
    from kvstore_xfer.mapper.artifact import Artifact
    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.store.base import BlockStore

_PROBE_BYTES = 4096
_STORE_REMEDY = "correct `store` in the manifest, start its server, or give rights and room"


@dataclass
class Patient:
    """What has been found usable so far; later checks build on it."""

    manifest: Path
    family: Family | None = None
    store: BlockStore | None = None
    models: dict[str, ModelDescription] = field(default_factory=dict)
    artifacts: dict[tuple[str, str], Artifact] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.manifest.resolve().parent


def check_manifest(patient: Patient) -> Iterator[Finding]:
    try:
        patient.family = load_family(patient.manifest)
    except KvxferError as error:
        yield problem("manifest", "manifest", str(error), "see docs/family.schema.json")
        return
    text = f"{len(patient.family.models)} models, {len(patient.family.pairs)} pairs"
    yield ok("manifest", f"{patient.manifest}: {text}")


def check_models(patient: Patient) -> Iterator[Finding]:
    if patient.family is None:
        return
    for name, entry in patient.family.models.items():
        local = patient.folder / entry.path
        try:
            model = describe(local if local.is_dir() else entry.path, revision=entry.revision)
        except KvxferError as error:
            remedy = f"correct models.{name}.path in the manifest, or get the files"
            yield problem(f"model {name}", "model", str(error), remedy)
            continue
        patient.models[name] = model
        if model.refusal is not None:
            remedy = "such a model is stored and served; take its pairs out of the manifest"
            yield problem(f"model {name}", "unsupported_model", model.refusal, remedy)
        else:
            yield ok(f"model {name}", f"{model.layers} layers, {model.kv_heads} KV heads")


def check_store(patient: Patient) -> Iterator[Finding]:
    """Opened, and one block written, read back and deleted. A folder that is not there stays so."""
    if patient.family is None:
        return
    url = patient.family.store
    try:
        missing = _missing(url, patient.folder)
        if missing:
            text = f"{missing[0]} is not there: engines make it when they start, and have lost "
            yield note("store", text + "what they stored if it was there before", "start an engine")
            rest = [part for part in url.split("|") if not _missing(part, patient.folder)]
            for part in rest:
                with open_store(part.strip(), base=patient.folder) as store:
                    yield _works(store, part)
            return
        patient.store = open_store(url, base=patient.folder)
        yield _works(patient.store, url)
    except (KvxferError, OSError) as error:
        yield problem("store", "store", str(error), _STORE_REMEDY)


def _missing(url: str, base: Path) -> list[Path]:
    return [folder for folder in local_folders(url, base) if not os.path.lexists(folder)]


def _works(store: BlockStore, url: str) -> Finding:
    fault = _round_trip(store)
    if fault:
        return problem("store", "store_write", f"{shown(url)}: {fault}", _STORE_REMEDY)
    return ok("store", f"{shown(url)}: reachable, writable, reads back what was written")


def _round_trip(store: BlockStore) -> str:
    """What went wrong; empty when nothing did."""
    key = str(BlockKey("doctor", "whole", "record", uuid.uuid4().hex))
    payload = os.urandom(_PROBE_BYTES)
    header = BlockHeader(key=key, payload_bytes=len(payload))
    written = store.write([WriteRequest(header, [memoryview(payload)])])[0]
    if written is not WriteStatus.STORED:
        return f"a block could not be written ({written.value})"
    try:
        read = store.read([ReadRequest(key)])[0]
        if read.status is not ReadStatus.OK or read.payload != payload:
            return f"a block was not read back as written ({read.status.value})"
    finally:
        deleted = store.delete([key])[0]
    return "" if deleted else "a block could not be deleted"


def check_mappers(patient: Patient) -> Iterator[Finding]:
    """Each pair's mapper: there, whole, of these two models, and switched on."""
    if patient.family is None:
        return
    for entry in patient.family.pairs:
        yield from _mapper(patient, entry)


def _mapper(patient: Patient, entry: PairEntry) -> Iterator[Finding]:
    about = f"pair {entry.source} -> {entry.target}"
    if not {entry.source, entry.target} <= patient.models.keys():
        return  # said of the model
    if any(patient.models[name].refusal for name in (entry.source, entry.target)):
        return
    if len({patient.models[name].tokenizer_digest for name in (entry.source, entry.target)}) > 1:
        text = "tokenizers differ: token i of one is not token i of the other, nothing can match"
        remedy = "pair models with the same tokenizer files, or take the pair out"
        yield problem(about, "tokenizer", text, remedy)
        return
    fit_it = f"kvxfer fit --source {entry.source} --target {entry.target}"
    try:
        artifact = load(patient.folder / entry.mapper)
    except KvxferError as error:
        yield problem(about, "mapper", str(error), fit_it)
        return
    for role in ("source", "target"):
        fitted: ModelDescription = getattr(artifact.mapper, role)
        model = patient.models[getattr(entry, role)]
        if fitted.fingerprint() != model.fingerprint():
            what = difference(fitted, model)
            text = f"the mapper was fitted for another {role} than the manifest's: {what}"
            yield problem(about, "fingerprint", text, fit_it)
            return
    direction = direction_of(artifact.mapper.source, artifact.mapper.target)
    if entry.direction not in (None, direction):
        text = f"direction {entry.direction.value} is stated, the sizes say {direction.value}"
        remedy = "correct or remove `direction` in the manifest"
        yield problem(about, "direction", text, remedy)
        return
    if not entry.policy.enabled:
        text = "off: `enabled: false` in its policy"
        yield problem(about, "disabled", text, "remove it from the manifest when it may serve")
        return
    patient.artifacts[entry.source, entry.target] = artifact
    if not artifact.gate:
        text = "the mapper was never checked, so it does not serve"
        yield problem(about, "gate_missing", text, f"kvxfer check {entry.mapper} --text ...")
        del patient.artifacts[entry.source, entry.target]
        return
    yield ok(about, f"mapper {artifact.mapper.digest[:12]}, {direction.value}")


def difference(fitted: ModelDescription, model: ModelDescription) -> str:
    """In words, what two descriptions that should be equal differ in."""
    names = ("weights_digest", "tokenizer_digest", "rope", "layers", "kv_heads", "key_dim")
    differing = [name for name in names if getattr(fitted, name) != getattr(model, name)]
    return ", ".join(name.removesuffix("_digest") for name in differing) or "its configuration"
