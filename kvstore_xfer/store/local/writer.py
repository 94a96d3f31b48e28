"""Blocks from the callers' memory into files: make room, announce, write, publish.

A block becomes visible with the commit of its index entry, after its file is complete: nobody ever
sees half a block.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from kvstore_xfer import metrics
from kvstore_xfer.errors import BlockFormatError
from kvstore_xfer.store.base import WriteStatus
from kvstore_xfer.store.frame import Plan, plan_write
from kvstore_xfer.store.local.folder import FAILURES
from kvstore_xfer.store.local.index import Entry
from kvstore_xfer.store.local.layout import new_generation, payload_name
from kvstore_xfer.store.local.payload import write_block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.store.base import WriteRequest
    from kvstore_xfer.store.local.folder import Folder
    from kvstore_xfer.store.local.index import Rows

_GROUP_BYTES = 256 << 20
_GROUP_ITEMS = 64
_ATTEMPTS = 4
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Written(NamedTuple):
    """A complete file that the index does not know yet."""

    plan: Plan
    name: str
    entry: Entry


class Writer:
    """One batch of writes. `statuses` holds what is known so far, ERROR where nothing is."""

    def __init__(
        self, folder: Folder, *, max_bytes: int, min_free_bytes: int, overwrite: bool
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._overwrite = overwrite
        self.statuses: list[WriteStatus] = []

    def run(self, requests: Sequence[WriteRequest]) -> None:
        """Fills in `statuses`. Raises OSError and lmdb.Error."""
        self.statuses = [WriteStatus.ERROR] * len(requests)
        plans = [plan_write(position, request) for position, request in enumerate(requests)]
        group_bytes = min(_GROUP_BYTES, self._max_bytes // 2)
        for group in _groups([plan for plan in plans if plan], group_bytes):
            self._write_group(group)

    def _write_group(self, group: list[Plan]) -> None:
        plans = group if self._overwrite else self._absent(group)
        try:
            room = self._make_room(sum(plan.size for plan in plans))
        except FAILURES as error:  # a full disk has none for the eviction's own commit
            self._set(plans, _failure(error))
            return
        if room:
            self._write_and_publish(plans)
        elif len(plans) > 1:
            for plan in plans:
                self._write_group([plan])
        else:
            self._set(plans, WriteStatus.FULL)

    def _absent(self, group: list[Plan]) -> list[Plan]:
        keys = [plan.header.key for plan in group]
        entries = self._folder.query(lambda index: index.entries(keys))
        absent = []
        for plan, entry in zip(group, entries, strict=True):
            if entry is not None and _has_file(self._folder, plan.key, entry):
                self._set([plan], WriteStatus.EXISTS)
            else:
                absent.append(plan)
        return absent

    def _write_and_publish(self, plans: list[Plan]) -> None:
        if not plans:
            return
        planned = [(plan, new_generation()) for plan in plans]
        announcement = [(plan.key, generation) for plan, generation in planned]
        try:
            with self._folder.layout.announced(announcement):
                self._write_announced(planned)
        except OSError as error:
            unknown = [p for p in plans if self.statuses[p.position] is WriteStatus.ERROR]
            self._set(unknown, _failure(error))

    def _write_announced(self, planned: list[tuple[Plan, int]]) -> None:
        sizes = [plan.size for plan, _ in planned]
        outcomes = self._folder.workers.map(
            lambda item: _write_file(self._folder, *item), planned, sizes
        )
        written: list[_Written] = []
        for (plan, _), outcome in zip(planned, outcomes, strict=True):
            if isinstance(outcome, WriteStatus):
                self._set([plan], outcome)
            else:
                written.append(outcome)
        published: set[str] = set()
        try:
            self._publish(written, published)
        finally:
            for item in written:
                if item.name not in published:
                    self._folder.layout.remove_payload(item.name)

    def _publish(self, written: list[_Written], published: set[str]) -> None:
        """Fills in the names that the index knows afterwards."""
        for _ in range(_ATTEMPTS):
            if not written:
                return
            batch = _Publication(self._folder, written, self._max_bytes, overwrite=self._overwrite)
            try:
                replaced = self._folder.update(batch.run)
            except FAILURES as error:
                self._set([item.plan for item in written], _failure(error))
                return
            published |= {item.name for item in batch.stored}
            self._folder.unlink(replaced)
            self._set([item.plan for item in batch.stored], WriteStatus.STORED)
            self._set([item.plan for item in batch.present], WriteStatus.EXISTS)
            written = batch.left_over  # other writers took the room meanwhile
            if not self._make_room(sum(item.entry.size for item in written)):
                break
        self._set([item.plan for item in written], WriteStatus.FULL)

    def _make_room(self, incoming: int) -> bool:
        """Evict until `incoming` bytes fit under the cap and above the free-space floor."""
        if not incoming:
            return True
        for _ in range(_ATTEMPTS):
            used = self._folder.used_bytes()
            short = self._shortfall(used, incoming)
            if short <= 0:
                return True
            if short > used:
                return False  # not even an empty store would do
            # At least a small share of the store: not every write then pays for an eviction.
            evicted = self._folder.evict(max(short, used // 128))
            if not evicted:
                return False
            reason = "size_cap" if used + incoming > self._max_bytes else "free_space"
            metrics.EVICTIONS.labels("local", reason).inc(evicted)
        return self._shortfall(self._folder.used_bytes(), incoming) <= 0

    def _shortfall(self, used: int, incoming: int) -> int:
        over_cap = used + incoming - self._max_bytes
        below_floor = self._min_free_bytes + incoming - self._folder.layout.free_bytes()
        return max(over_cap, below_floor)

    def _set(self, plans: list[Plan], status: WriteStatus) -> None:
        for plan in plans:
            self.statuses[plan.position] = status


class _Publication:
    """One transaction that makes written files visible. `run` may be called twice."""

    def __init__(
        self, folder: Folder, written: list[_Written], max_bytes: int, *, overwrite: bool
    ) -> None:
        self._folder = folder
        self._written = written
        self._max_bytes = max_bytes
        self._overwrite = overwrite
        self.stored: list[_Written] = []
        self.present: list[_Written] = []
        self.left_over: list[_Written] = []

    def run(self, rows: Rows) -> list[str]:
        """Names of the payloads that were replaced."""
        self.stored, self.present, self.left_over = [], [], []
        replaced = [self._publish_one(rows, item) for item in self._written]
        return [name for name in replaced if name]

    def _publish_one(self, rows: Rows, item: _Written) -> str | None:
        present = rows.get(item.plan.key)
        if present and not self._overwrite and _has_file(self._folder, item.plan.key, present):
            self.present.append(item)
            return None
        if rows.totals.used + item.entry.size > self._max_bytes:
            self.left_over.append(item)
            return None
        self.stored.append(item)
        return rows.put(item.plan.key, item.entry)


def _groups(plans: list[Plan], group_bytes: int) -> Iterator[list[Plan]]:
    """Runs of plans that are written together, so that what is in flight stays bounded."""
    group: list[Plan] = []
    size = 0
    for plan in plans:
        if group and (size + plan.size > group_bytes or len(group) == _GROUP_ITEMS):
            yield group
            group, size = [], 0
        group.append(plan)
        size += plan.size
    if group:
        yield group


def _write_file(folder: Folder, plan: Plan, generation: int) -> _Written | WriteStatus:
    name = payload_name(plan.key, generation)
    try:
        descriptor = folder.layout.create_payload(name)
        try:
            length = write_block(descriptor, plan.header, plan.runs)
        except (OSError, EOFError, BlockFormatError):
            folder.layout.remove_payload(name)
            raise
        finally:
            os.close(descriptor)
    except (OSError, EOFError, BlockFormatError) as error:
        return _failure(error)
    header = plan.header
    entry = Entry(generation, length, header.payload_bytes, header.created, time.time_ns())
    return _Written(plan, name, entry)


def _has_file(folder: Folder, key: bytes, entry: Entry) -> bool:
    """Whether the file of an entry is there in its full length."""
    try:
        size = os.stat(folder.layout.payload(payload_name(key, entry.generation))).st_size
    except OSError:
        return False
    return size == entry.size


def _failure(error: Exception) -> WriteStatus:
    no_room = isinstance(error, lmdb.DiskError) or getattr(error, "errno", None) in _NO_ROOM
    return WriteStatus.FULL if no_room else WriteStatus.ERROR
