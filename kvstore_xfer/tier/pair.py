"""One ordered pair as the target's tier uses it: mapper, gate, policy and source blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvstore_xfer.blocks.identity import IdentityRecord, block_shape, identity_of, whole_shard
from kvstore_xfer.blocks.key import Shard, derived_kind
from kvstore_xfer.errors import ArtifactError
from kvstore_xfer.gate.record import GateRecord, refusal
from kvstore_xfer.outcome import Reason
from kvstore_xfer.store.base import ReadRequest, ReadStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore_xfer.blocks.identity import Identity
    from kvstore_xfer.blocks.page import KvShape
    from kvstore_xfer.gate.watch import WatchRecord
    from kvstore_xfer.mapper.artifact import Artifact
    from kvstore_xfer.mapper.convert import Converter
    from kvstore_xfer.mapper.maps import Mapper
    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.store.base import BlockStore
    from kvstore_xfer.tier.policy import Direction, Policy


@dataclass(frozen=True)
class SourceLayout:
    """Shards of one layout of the source: those to `read` for this rank's heads, and those of all
    heads, which must be `present`: another rank needs them, and all ranks must say the same."""

    read: tuple[Shard, ...]
    present: tuple[Shard, ...]


@dataclass(frozen=True)
class Pair:
    """A sibling whose blocks may be converted for the target.

    `name` (the source's) and `target_name` are those of the manifest, for metrics. `refusal` is why
    it must not serve now, None when it may. `heads` is the range of source heads that this rank's
    maps read; `mapper` is narrowed to the rank's target heads and to that range. With `watch`, what
    the gate left for it, retention is estimated while it serves.
    """

    name: str
    target_name: str
    source: ModelDescription
    direction: Direction
    policy: Policy
    identity: Identity
    mapper: Mapper
    heads: range
    source_shape: KvShape
    refusal: Reason | None
    gate: GateRecord | None
    converter: Converter | None
    watch: WatchRecord | None = None

    @property
    def derived_kind(self) -> str:
        return derived_kind(self.mapper.digest)

    @property
    def labels(self) -> tuple[str, str, str]:
        """Source, target and direction, as metric labels."""
        return self.name, self.target_name, self.direction.value

    @property
    def prefill_rate(self) -> float:
        """Tokens a second that the target prefills, by policy or gate; 0 when not known."""
        measured = 0.0 if self.gate is None else self.gate.prefill_tokens_per_second
        return self.policy.prefill_tokens_per_second or measured

    def too_long(self, end: int) -> Reason | None:
        """Why a block that ends at token `end` is not converted, or None when it may be."""
        longest = self.policy.max_prefix_tokens
        if longest is not None and end > longest:
            return Reason.MAX_PREFIX
        checked = 0 if self.gate is None else self.gate.longest_prefix_tokens
        return Reason.BEYOND_CHECKED if end > self.policy.checked_limit(checked) else None

    def source_layouts(self, store: BlockStore) -> list[SourceLayout]:
        """For each complete layout the source is served in: which shards hold what.

        Read from the store at every lookup, so that all ranks decide from the same facts.
        """
        result = store.read([ReadRequest(IdentityRecord.key(self.identity.digest))])[0]
        layouts: tuple[tuple[Shard, ...], ...] = ((whole_shard(self.source),),)
        if result.status is ReadStatus.OK and result.payload is not None:
            layouts = layouts_of(result.payload)
        everything = range(self.source.kv_heads)
        covers = (
            SourceLayout(
                _covering(layout, self.heads, self.source.layers),
                _covering(layout, everything, self.source.layers),
            )
            for layout in layouts
        )
        return [cover for cover in covers if cover.read and cover.present]

    def shard_heads(self, shard: Shard) -> tuple[slice, slice]:
        """Heads of a source page that a stored shard fills, and which of the shard's those are."""
        first = max(shard.first_head, self.heads.start)
        last = min(shard.last_head, self.heads.stop)
        into = slice(first - self.heads.start, last - self.heads.start)
        return into, slice(first - shard.first_head, last - shard.first_head)


def make_pair(
    artifact: Artifact,
    target: ModelDescription,
    target_identity: Identity,
    shard: Shard,
    policy: Policy,
    direction: Direction,
    make_converter: Callable[[Mapper, torch.dtype], Converter],
    *,
    name: str = "",
    target_name: str = "",
    watch: WatchRecord | None = None,
) -> Pair:
    """Bind an artifact to a running target; a refused pair is kept, so that it can be counted."""
    whole = artifact.mapper
    dtype_name = target_identity.kv_dtype
    record = artifact.gate.get(dtype_name)
    gate = None if record is None else _gate_record(record)
    reason = _refusal(artifact, gate, target, target_identity)
    if not policy.enabled:
        reason = Reason.DISABLED
    if reason is None and (shard.first_layer, shard.last_layer) != (0, target.layers):
        reason = Reason.UNSUPPORTED
    # A refused mapper may be of another geometry than the shard; it is kept whole.
    everything = (whole, range(whole.source.kv_heads))
    mapper, heads = _narrow(whole, shard) if reason is None else everything
    identity = identity_of(
        whole.source, dtype_name, target_identity.block_tokens, target_identity.hash_scheme
    )
    dtype: torch.dtype = getattr(torch, dtype_name)
    read = Shard(heads.start, heads.stop, 0, whole.source.layers)
    return Pair(
        name=name or whole.source.name,
        target_name=target_name or whole.target.name,
        source=whole.source,
        direction=direction,
        policy=policy,
        identity=identity,
        mapper=mapper,
        heads=heads,
        source_shape=block_shape(whole.source, read, target_identity.block_tokens, dtype),
        refusal=reason,
        gate=gate,
        converter=make_converter(mapper, dtype) if reason is None else None,
        watch=watch if watch is not None and watch.mapper_digest == whole.digest else None,
    )


def _refusal(
    artifact: Artifact, gate: GateRecord | None, target: ModelDescription, identity: Identity
) -> Reason | None:
    """Why the artifact must not serve a target that runs as `identity`, apart from policy."""
    reason = refusal(gate, artifact.mapper, target)
    if reason is Reason.GATE_MISSING and artifact.gate:
        return Reason.GATE_DTYPE
    if gate is not None and gate.dtype != identity.kv_dtype:
        return Reason.GATE_DTYPE
    measured = identity_of(target, identity.kv_dtype, identity.block_tokens, identity.hash_scheme)
    if reason is None and identity != measured:
        return Reason.FINGERPRINT  # adapter, scales or weights that no gate has seen
    return reason


def _gate_record(stored: dict[str, Any]) -> GateRecord:
    try:
        return GateRecord.from_json(stored)
    except TypeError as error:
        raise ArtifactError(f"mapper: gate record: {error}; run 'kvxfer check' again") from None


def layouts_of(payload: bytes) -> tuple[tuple[Shard, ...], ...]:
    """The layouts of an identity record; none when it cannot be read: unknown means no."""
    try:
        return IdentityRecord.decode(payload).layouts
    except (KeyError, TypeError, ValueError):
        return ()


def _narrow(mapper: Mapper, shard: Shard) -> tuple[Mapper, range]:
    """The maps for the shard's heads, reading only the source heads they need."""
    narrowed = mapper.shard(shard.first_head, shard.last_head)
    if not mapper.method.per_head:
        return narrowed, range(mapper.source.kv_heads)
    heads = range(min(narrowed.head_assignment), max(narrowed.head_assignment) + 1)
    return narrowed.reading_from(heads.start), heads


def _covering(layout: tuple[Shard, ...], heads: range, layers: int) -> tuple[Shard, ...]:
    """The shards of a layout that together hold the heads, each head once; empty if they do not."""
    chosen: list[Shard] = []
    covered = heads.start
    for shard in sorted(layout, key=lambda shard: shard.first_head):
        complete = (shard.first_layer, shard.last_layer) == (0, layers)
        if complete and shard.first_head <= covered < shard.last_head and covered < heads.stop:
            chosen.append(shard)
            covered = shard.last_head
    return tuple(chosen) if covered >= heads.stop else ()
