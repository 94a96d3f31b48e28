"""Two models over one store: can the blocks of one be found and converted for the other?

Engines write who they are into the store when they start (`IdentityRecord`), and those records are
compared: a page hash covers token ids only, so everything else that decides is in them, but for
salts, which are inside the hashes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.identity import IdentityRecord
from kvstore_xfer.blocks.key import NATIVE, RECORD, UNPLACED, BlockKey
from kvstore_xfer.doctor.family import difference
from kvstore_xfer.doctor.findings import note, ok, problem
from kvstore_xfer.errors import BlockFormatError, StoreError
from kvstore_xfer.family import unmet
from kvstore_xfer.gate.record import GateRecord, refusal
from kvstore_xfer.outcome import Reason
from kvstore_xfer.store.base import ReadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore_xfer.blocks.identity import Identity
    from kvstore_xfer.doctor.family import Patient
    from kvstore_xfer.doctor.findings import Finding
    from kvstore_xfer.family import Family, PairEntry
    from kvstore_xfer.mapper.artifact import Artifact
    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.store.base import BlockStore

_MOST_BLOCKS = 200_000  # looked at; a store may hold many millions

# What must be equal for page hashes and blocks to match, and what to do when it is not.
_MUST_AGREE = {
    "tokenizer": (
        "tokenizer",
        "serve both models with the same tokenizer files",
    ),
    "block_tokens": ("page_size", "start both engines with the same --page-size"),
    "hash_scheme": ("hash_scheme", "start both with, or both without, EAGLE speculation"),
    "kv_dtype": ("kv_dtype", "start both with the same --kv-cache-dtype and --dtype"),
}


@dataclass
class Contents:
    """What a store holds: identity records, off records, chain hashes by identity and kind."""

    identities: list[IdentityRecord] = field(default_factory=list)
    off: set[str] = field(default_factory=set)
    hashes: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))

    def of(self, fingerprint: str) -> list[Identity]:
        return [r.identity for r in self.identities if r.model.fingerprint() == fingerprint]


def read_contents(store: BlockStore) -> Contents:
    """Raises StoreError when the store cannot be listed."""
    contents = Contents()
    for row in islice(store.scan(), _MOST_BLOCKS):
        try:
            key = BlockKey.parse(row.key)
        except BlockFormatError:
            continue
        if key.kind != RECORD:
            contents.hashes[key.identity, key.kind].add(key.chain_hash)
        elif key.chain_hash == "identity":
            payload = store.read([ReadRequest(row.key, touch=False)])[0].payload
            try:
                contents.identities.append(IdentityRecord.decode(payload or b""))
            except (ValueError, KeyError, TypeError):
                continue
        elif key.chain_hash.startswith("off-"):
            contents.off.add(key.chain_hash.split("-")[1])
    return contents


def check_matching(patient: Patient) -> Iterator[Finding]:
    """For each pair: did both models run over this store, and why can blocks match or not."""
    if patient.store is None or patient.family is None:
        return
    try:
        contents = read_contents(patient.store)
    except StoreError as error:
        remedy = "kvxfer store verify; open the store again to rebuild its index"
        yield problem("store", "store_index", str(error), remedy)
        return
    for name, model in patient.models.items():
        yield from _same_files(name, model, contents)
    for names, artifact in patient.artifacts.items():
        entry = next(e for e in patient.family.pairs if (e.source, e.target) == names)
        yield from _pair(patient.family, entry, artifact, contents)


def _same_files(name: str, model: ModelDescription, contents: Contents) -> Iterator[Finding]:
    """An engine that was started from this path with other files than lie there now."""
    started = [r.model for r in contents.identities if r.model.name == model.name]
    if started and all(other.fingerprint() != model.fingerprint() for other in started):
        what = difference(started[-1], model)
        text = f"the engine that ran over this store had other files than are there now: {what}"
        remedy = "restart the engine, so that it loads the files that the manifest names"
        yield problem(f"model {name}", "identity", text, remedy)


def _pair(
    family: Family, entry: PairEntry, artifact: Artifact, contents: Contents
) -> Iterator[Finding]:
    source, target = entry.source, entry.target
    about = f"pair {source} -> {target}"
    sides = (artifact.mapper.source, artifact.mapper.target)
    ran = [contents.of(side.fingerprint()) for side in sides]
    for name, side, identities in zip((source, target), sides, ran, strict=True):
        if not identities:
            if not any(r.model.name == side.name for r in contents.identities):
                yield note(about, f"{name} has not run over this store yet")
            return
    candidates = [(a, b) for a in ran[0] for b in ran[1]]
    first, second = min(candidates, key=lambda pair: len(_differences(*pair)))
    different = _differences(first, second)
    for name in different:
        cause, remedy = _MUST_AGREE[name]
        values = f"{getattr(first, name)} and {getattr(second, name)}"
        text = f"{cause.replace('_', ' ')} differs ({values}): their blocks can never match"
        yield problem(about, cause, text, remedy)
    if different:
        return
    yield from _private(source, first, about)
    yield from _private(target, second, about)
    yield from _gate(family, entry, artifact, second.kv_dtype, contents)
    yield from _blocks(first, second, about, contents)


def _differences(first: Identity, second: Identity) -> list[str]:
    return [name for name in _MUST_AGREE if getattr(first, name) != getattr(second, name)]


def _private(name: str, identity: Identity, about: str) -> Iterator[Finding]:
    set_apart = identity.variant or identity.adapter or identity.kv_scales
    if set_apart:
        what = set_apart.split("=")[0]
        text = f"{name} runs with something that its files do not say ({what})"
        remedy = "start it without LoRA, quantisation on loading, or weights from elsewhere"
        yield problem(about, "variant", text, remedy)


def _gate(
    family: Family, entry: PairEntry, artifact: Artifact, dtype: str, contents: Contents
) -> Iterator[Finding]:
    about = f"pair {entry.source} -> {entry.target}"
    stored = artifact.gate.get(dtype)
    if stored is None:
        text = f"checked in {', '.join(artifact.gate)}, the engines run in {dtype}"
        yield problem(about, "gate_dtype", text, f"kvxfer check ... --dtype {dtype}")
        return
    try:
        record = GateRecord.from_json(stored)
    except TypeError as error:
        text = f"the gate's record cannot be read ({error})"
        yield problem(about, "gate_record", text, "kvxfer check again")
        return
    reason = refusal(record, artifact.mapper, artifact.mapper.target)
    failure = unmet(family, entry, record) if reason is None else ""
    if failure:
        text, remedy = f"the manifest refuses it: {failure}", "kvxfer check ... --family"
        yield problem(about, Reason.GATE_REJECTED.value, text, remedy)
    elif reason is not None:
        text = f"the gate refuses it ({reason.value}{': ' if record.reason else ''}{record.reason})"
        yield problem(about, reason.value, text, "kvxfer check again, or fit a better mapper")
    elif artifact.mapper.digest in contents.off:
        text = "switched off: what it keeps in production was too low"
        yield problem(about, "retention", text, "kvxfer check again, then restart the engine")
    else:
        yield ok(about, f"accepted in {dtype}; the blocks of both models can match")


def _blocks(
    source: Identity, target: Identity, about: str, contents: Contents
) -> Iterator[Finding]:
    native = contents.hashes[source.digest, NATIVE]
    unplaced = contents.hashes[source.digest, UNPLACED]
    if unplaced and not native:
        text = "the source's blocks are stored without their position, so none can be converted"
        remedy = (
            "put hicache_storage_pass_prefix_keys: true and interface_v1: 1 into its extra config"
        )
        yield problem(about, "position", text, remedy)
        return
    own = {
        name
        for (identity, _), hashes in contents.hashes.items()
        if identity == target.digest
        for name in hashes
    }
    if native and own and not native & own:
        text = (
            "both models have blocks and not one of the same prefix: either their prompts are all "
            "different, or one of them is asked with another cache_salt or extra_key"
        )
        yield problem(about, "salt", text, "send the same salt to both models, or none")
