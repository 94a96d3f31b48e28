"""From a family manifest and the facts of a running engine to a tier."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvstore_xfer import metrics
from kvstore_xfer.blocks.identity import (
    Identity,
    IdentityRecord,
    block_shape,
    identity_of,
    whole_shard,
)
from kvstore_xfer.errors import ArtifactError, ConfigError, ModelError, StoreError
from kvstore_xfer.exporter import serve
from kvstore_xfer.family import (
    Family,
    PairEntry,
    load_family,
    policy_of,
    unmet,
)
from kvstore_xfer.gate.watch import load_watch
from kvstore_xfer.mapper.artifact import Artifact, load
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.mapper.maps import Mapper, Method
from kvstore_xfer.models.description import describe
from kvstore_xfer.outcome import Reason
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_xfer.store.url import open_store
from kvstore_xfer.tier.pair import Pair, layouts_of, make_pair
from kvstore_xfer.tier.policy import direction_of
from kvstore_xfer.tier.store_gauges import StoreGauges
from kvstore_xfer.tier.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore_xfer.blocks.key import Shard
    from kvstore_xfer.blocks.page import KvShape
    from kvstore_xfer.mapper.convert import Converter
    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.store.base import BlockStore

_log = logging.getLogger(__name__)
_ANNOUNCE_ATTEMPTS = 3


@dataclass(frozen=True)
class Engine:
    """What a running engine says about itself.

    `shard` is this rank's part, None for the whole model; `layout` the shards of all ranks.
    `shape` is needed only where it does not follow from model and shard. `variant` names anything
    that changes the cache beyond the model files; such an engine's blocks match only its own.
    """

    model: ModelDescription
    kv_dtype: str
    block_tokens: int
    hash_scheme: str
    shard: Shard | None = None
    layout: tuple[Shard, ...] | None = None
    shape: KvShape | None = None
    variant: str = ""

    def __post_init__(self) -> None:
        if type(self.block_tokens) is not int or self.block_tokens < 1:
            raise ConfigError(f"block_tokens {self.block_tokens!r}: give a whole number from 1")

    @property
    def identity(self) -> Identity:
        return identity_of(
            self.model, self.kv_dtype, self.block_tokens, self.hash_scheme, self.variant
        )

    @property
    def own_shard(self) -> Shard:
        return self.shard or whole_shard(self.model)

    @property
    def block_shape(self) -> KvShape:
        dtype: torch.dtype = getattr(torch, self.kv_dtype)
        return self.shape or block_shape(self.model, self.own_shard, self.block_tokens, dtype)


def open_tier(
    manifest: str | Path,
    member: str,
    engine: Engine,
    *,
    store: BlockStore | None = None,
    make_converter: Callable[[Mapper, torch.dtype], Converter] = make_converter,
) -> Tier:
    """The tier of `member` (a name under ``models`` of the manifest), announced in the store.

    A mapper folder that cannot be loaded turns its pair off, with an error in the log; the rest
    works. By default conversion runs on the GPU when there is one. `store` overrides the
    manifest's; the tier closes, and exports the totals of, only a store it opened itself.

    Raises
    ------
    ConfigError
        The manifest is wrong, or has no such member.
    StoreError
        The store cannot be opened or written.
    """
    family = load_family(manifest)
    if member not in family.models:
        known = ", ".join(sorted(family.models))
        raise ConfigError(f"{manifest}: models: no {member!r}; known: {known}")
    folder = Path(manifest).resolve().parent
    used = open_store(family.store, base=folder) if store is None else store
    try:
        announce(used, engine)
        pairs = _pairs(family, member, folder, engine, make_converter)
    except Exception:
        if store is None:
            used.close()
        raise
    tier = Tier(
        used,
        member,
        engine.identity,
        engine.own_shard,
        engine.block_shape,
        pairs,
        layout=engine.layout or (),
        owns_store=store is None,
        read_seconds=family.read_seconds,
    )
    if store is None:
        export(tier, used, family, family.store.partition(":")[0])
    elif family.metrics is not None:
        serve(family.metrics)
    return tier


def export(tier: Tier, store: BlockStore, family: Family, store_label: str) -> None:
    """The store's totals as gauges while the tier is open, and the manifest's metrics port."""
    gauges = StoreGauges(store, store_label)
    tier.store_is_down = gauges.is_down
    tier.at_close(gauges.close)
    if family.metrics is not None:
        serve(family.metrics)


def announce(store: BlockStore, engine: Engine) -> None:
    """Write the identity record; another layout of the same identity is kept beside ours.

    Raises StoreError when it cannot be written.
    """
    layout = engine.layout or (engine.own_shard,)
    # Another layout's engine may start at the same moment and overwrite what we have just written.
    for _ in range(_ANNOUNCE_ATTEMPTS):
        layouts = _announced(store, engine.identity)
        if layout in layouts:
            return
        record = IdentityRecord(engine.identity, engine.model, (*layouts, layout))
        header, payload = record.encode()
        status = store.write([WriteRequest(header, [memoryview(payload)])], overwrite=True)[0]
        if status is not WriteStatus.STORED:
            raise StoreError(
                f"store: the identity record could not be written ({status.value}); "
                "check that its folder is writable and has room"
            )


def _announced(store: BlockStore, identity: Identity) -> tuple[tuple[Shard, ...], ...]:
    known = store.read([ReadRequest(IdentityRecord.key(identity.digest))])[0]
    if known.status is not ReadStatus.OK or known.payload is None:
        return ()
    return layouts_of(known.payload)


def _pairs(
    family: Family,
    member: str,
    folder: Path,
    engine: Engine,
    make_converter: Callable[[Mapper, torch.dtype], Converter],
) -> list[Pair]:
    pairs = []
    for entry in family.pairs:
        if entry.target != member:
            continue
        try:
            pair = _pair(entry, folder, engine, make_converter)
            pair = _held_to(family, entry, pair)
        except ArtifactError as error:
            about = (entry.source, member, Reason.MAPPER.value)
            _log.error("kvxfer: pair %s -> %s is off (%s): %s", *about, error)
            unread = _unread(family, entry, folder, engine)
            if unread is None:
                metrics.GATE_OPEN.labels(entry.source, member, "unknown").set(0)
                continue
            pair = unread
        if pair.refusal not in (None, Reason.MAPPER):
            _log.warning("kvxfer: %s", off_line(entry, folder, engine.kv_dtype, pair.refusal))
        metrics.GATE_OPEN.labels(*pair.labels).set(pair.refusal is None)
        metrics.SWITCHED_OFF.labels(*pair.labels).set(0)
        if pair.gate is not None:
            metrics.set_bounds(metrics.GATE_RETENTION, pair.labels, pair.gate.retention)
        pairs.append(pair)
    return pairs


def off_line(entry: PairEntry, folder: Path, kv_dtype: str, reason: Reason) -> str:
    """Why a pair is off and what helps, in one line."""
    remedy = {
        Reason.GATE_MISSING: "never checked: run 'kvxfer check'",
        Reason.GATE_DTYPE: f"not checked in {kv_dtype}: run 'kvxfer check --dtype {kv_dtype}'",
        Reason.GATE_REJECTED: "the check, or the manifest, rejected it: 'kvxfer doctor' says why",
        Reason.GATE_OUTDATED: "accepted by an older check, which asked for less: check it again",
        Reason.FINGERPRINT: "fitted or checked for other model files: fit it again",
        Reason.DISABLED: "the manifest's policy says enabled: false",
    }.get(reason, "not possible for this engine")
    about = f"pair {entry.source} -> {entry.target} is off ({reason.value})"
    return f"{about}: {folder / entry.mapper}: {remedy}"


def _unread(family: Family, entry: PairEntry, folder: Path, engine: Engine) -> Pair | None:
    """The pair of a mapper that cannot be read, so that what it would serve is counted as declined.

    None where the source is not a local folder: a hub would hold up the engine's start.
    """
    source = folder / family.models[entry.source].path
    try:
        model = describe(source) if source.is_dir() else None
    except ModelError:
        model = None
    if model is None:
        return None
    mapper = Mapper(Method.HEAD_LOCAL, model, engine.model, (), (), (), digest="unread")
    pair = make_pair(
        Artifact(mapper),
        engine.model,
        engine.identity,
        engine.own_shard,
        policy_of(entry.policy),
        direction_of(model, engine.model),
        make_converter,
        name=entry.source,
        target_name=entry.target,
    )
    return replace(pair, refusal=Reason.MAPPER)


def _held_to(family: Family, entry: PairEntry, pair: Pair) -> Pair:
    """The pair, refused when its record does not show what the manifest asks."""
    if pair.refusal is not None or pair.gate is None:
        return pair
    failure = unmet(family, entry, pair.gate)
    if not failure:
        return pair
    _log.warning(
        "pair %s -> %s: the manifest: %s; run 'kvxfer check' with --family",
        entry.source,
        entry.target,
        failure,
    )
    return replace(pair, refusal=Reason.GATE_REJECTED, converter=None)


def _pair(
    entry: PairEntry,
    folder: Path,
    engine: Engine,
    make_converter: Callable[[Mapper, torch.dtype], Converter],
) -> Pair:
    artifact = load(folder / entry.mapper)
    direction = direction_of(artifact.mapper.source, artifact.mapper.target)
    if entry.direction not in (None, direction):
        raise ConfigError(
            f"pair {entry.source} -> {entry.target}: direction: the models' sizes say "
            f"{direction.value}; correct or remove it"
        )
    return make_pair(
        artifact,
        engine.model,
        engine.identity,
        engine.own_shard,
        policy_of(entry.policy),
        direction,
        make_converter,
        name=entry.source,
        target_name=entry.target,
        watch=load_watch(folder / entry.mapper, engine.kv_dtype),
    )
