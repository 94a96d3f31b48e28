"""Levels from fast to far as one store: ``memory -> local -> remote``.

read    from the first level that has the block; faster levels get a copy in the background
write   into the last near level, then the faster ones, at once; far ones in the background
delete  everywhere; where an engine does not answer, again later, and hidden until then

Near levels are folders of this machine (memory is one too), far ones are engines behind a circuit
breaker: when they are gone, the near ones go on.
"""

from __future__ import annotations

import heapq
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.key import RECORD, BlockKey
from kvstore_xfer.errors import BlockFormatError, ConfigError, StoreError
from kvstore_xfer.store.base import (
    BlockStat,
    BlockStore,
    ReadResult,
    ReadStatus,
    StoreStats,
    WriteStatus,
)
from kvstore_xfer.store.frame import byte_runs
from kvstore_xfer.store.remote.store import RemoteStore
from kvstore_xfer.store.tiered.mover import Mover

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.store.base import ReadRequest, WriteRequest

# What a read reports when no level has an intact block: damage is never hidden by an absence.
_WORST_FIRST = (ReadStatus.CORRUPT, ReadStatus.ERROR, ReadStatus.MISSING)
_FINAL = (ReadStatus.OK, ReadStatus.MISMATCH)


class TieredStore(BlockStore):
    """`levels` from fast to far, near ones first; they are closed with this store.

    Raises ConfigError for an order that makes no sense.
    """

    def __init__(self, levels: Sequence[BlockStore]) -> None:
        self._near = [level for level in levels if not isinstance(level, RemoteStore)]
        self._far = [level for level in levels if isinstance(level, RemoteStore)]
        if list(levels) != [*self._near, *self._far] or not self._near:
            raise ConfigError("store: levels go from near (memory:, local:) to far; reorder them")
        self._mover = Mover(self._read_near)

    @property
    def dropped(self) -> dict[str, int]:
        """Copies that were given up, by kind: their blocks are only where they were."""
        return dict(self._mover.dropped)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        keys = list(keys)
        found = [False] * len(keys)
        for level in (*self._near, *self._far):
            rest = [n for n, key in enumerate(keys) if not found[n] and self._visible(level, key)]
            if rest:
                answers = level.exists([keys[n] for n in rest])
                for number, answer in zip(rest, answers, strict=True):
                    found[number] = answer
        return found

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        requests = list(requests)
        results = [ReadResult(ReadStatus.MISSING)] * len(requests)
        levels = (*self._near, *self._far)
        for depth, level in enumerate(levels):
            rest = [
                n
                for n, request in enumerate(requests)
                if results[n].status not in _FINAL and self._visible(level, request.key)
            ]
            if not rest:
                continue
            for n, result in zip(rest, level.read([requests[n] for n in rest]), strict=True):
                results[n] = _better(results[n], result)
                if result.status is ReadStatus.OK and depth:
                    self._promote(requests[n], result, self._near[:depth])
        return results

    def write(
        self, requests: Sequence[WriteRequest], *, overwrite: bool = False
    ) -> list[WriteStatus]:
        requests = list(requests)
        keys = [request.header.key for request in requests]
        if overwrite:
            self._mover.forget(keys)
        statuses = self._near[-1].write(requests, overwrite=overwrite)
        for level in reversed(self._near[:-1]):
            self._write_above(level, requests, statuses, overwrite=overwrite)
        for far in self._far:
            stored = [k for k, s in zip(keys, statuses, strict=True) if s is WriteStatus.STORED]
            self._mover.upload(stored, far, overwrite=overwrite)
        return statuses

    def delete(self, keys: Sequence[str]) -> list[bool]:
        keys = list(keys)
        self._mover.forget(keys)
        gone = [False] * len(keys)
        unsure = [False] * len(keys)
        for level in (*self._near, *self._far):
            answers = self._delete_at(level, keys)
            gone = [bool(a) or b for a, b in zip(answers, gone, strict=True)]
            unsure = [a is None or b for a, b in zip(answers, unsure, strict=True)]
        return [a and not b for a, b in zip(gone, unsure, strict=True)]

    def pin(self, keys: Sequence[str], seconds: float) -> bool:
        pinned = [level.pin(keys, seconds) for level in self._near]
        return all(pinned)

    def compact(self) -> tuple[int, int]:
        sizes = [part.compact() for part in self._near]
        return sum(before for before, _ in sizes), sum(after for _, after in sizes)

    def repair(self) -> bool:
        repaired = [part.repair() for part in self._near]
        return any(repaired)

    def scan(self, prefix: str = "") -> Iterator[BlockStat]:
        """Far levels that cannot be listed are left out, unless nothing is left."""
        rows = [level.scan(prefix) for level in self._near]
        for far in self._far:
            with suppress(StoreError):
                rows.append(iter([r for r in far.scan(prefix) if self._visible(far, r.key)]))
        merged = heapq.merge(*rows, key=lambda row: row.key)
        for _, same in groupby(merged, key=lambda row: row.key):
            yield next(same)

    def stats(self) -> StoreStats:
        """Blocks and bytes of all levels together, each block once."""
        blocks = size = 0
        for row in self.scan():
            blocks += 1
            size += row.size
        near = [level.stats() for level in self._near]
        return StoreStats(
            blocks=blocks,
            bytes=size,
            capacity_bytes=near[-1].capacity_bytes,
            evicted_blocks=near[-1].evicted_blocks,
            corrupt_blocks=sum(stats.corrupt_blocks for stats in near),
            oldest_use=near[-1].oldest_use,
        )

    def flush(self, seconds: float = 60.0) -> bool:
        """Whether everything in the background was done within this time."""
        return self._mover.flush(seconds)

    def close(self) -> None:
        self._mover.close()
        for level in (*self._near, *self._far):
            level.close()

    def _visible(self, level: BlockStore, key: str) -> bool:
        return not isinstance(level, RemoteStore) or not self._mover.is_deleted(key, level)

    def _read_near(self, requests: list[ReadRequest]) -> list[ReadResult]:
        results = self._near[-1].read(requests)
        for level in self._near[:-1]:
            again = [n for n, r in enumerate(results) if r.status is not ReadStatus.OK]
            if again:
                found = level.read([requests[n] for n in again])
                for n, result in zip(again, found, strict=True):
                    results[n] = result
        return results

    def _promote(
        self, request: ReadRequest, result: ReadResult, levels: Sequence[BlockStore]
    ) -> None:
        header = result.header
        if header is None or not request.touch or _is_record(header.key):
            return
        if not self._mover.has_room(header.payload_bytes):
            self._mover.promote(header, bytes(header.payload_bytes), ())
            return
        payload = result.payload
        if payload is None:
            payload = b"".join(byte_runs(request.destination or ()))
        self._mover.promote(header, payload, levels)

    def _write_above(
        self,
        level: BlockStore,
        requests: list[WriteRequest],
        statuses: list[WriteStatus],
        *,
        overwrite: bool,
    ) -> None:
        """A faster level never holds another version than the one below it."""
        fresh = [n for n, status in enumerate(statuses) if status is WriteStatus.STORED]
        homeless = [n for n, status in enumerate(statuses) if status is WriteStatus.FULL]
        if overwrite:
            level.delete([request.header.key for request in requests])
            homeless = []
        kept = [n for n in (*fresh, *homeless) if not _is_record(requests[n].header.key)]
        answers = level.write([requests[n] for n in kept])
        for n, answer in zip(kept, answers, strict=True):
            if statuses[n] is WriteStatus.FULL:
                statuses[n] = answer

    def _delete_at(self, level: BlockStore, keys: list[str]) -> Sequence[bool | None]:
        if not isinstance(level, RemoteStore):
            return level.delete(keys)
        try:
            answers = level.try_delete(keys)
        except StoreError:
            answers = [None] * len(keys)
        late = [key for key, answer in zip(keys, answers, strict=True) if answer is None]
        if late:
            self._mover.delete_later(late, level)
        return answers


def _better(known: ReadResult, found: ReadResult) -> ReadResult:
    if found.status in _FINAL:
        return found
    return min(known, found, key=lambda result: _WORST_FIRST.index(result.status))


def _is_record(key: str) -> bool:
    """Records are overwritten; copies in faster levels could be out of date."""
    try:
        return BlockKey.parse(key).kind == RECORD
    except BlockFormatError:
        return True
