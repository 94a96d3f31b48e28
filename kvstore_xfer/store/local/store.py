"""The store protocol on a local folder."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_xfer.errors import StoreError
from kvstore_xfer.store.base import (
    BlockStat,
    BlockStore,
    ReadResult,
    ReadStatus,
    StoreStats,
    WriteStatus,
)
from kvstore_xfer.store.deadline import in_force
from kvstore_xfer.store.local.environment import DAMAGE
from kvstore_xfer.store.local.folder import FAILURES, Folder, acquire, release
from kvstore_xfer.store.local.index import raw_key
from kvstore_xfer.store.local.reader import read_blocks
from kvstore_xfer.store.local.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.store.base import ReadRequest, WriteRequest
    from kvstore_xfer.store.local.index import Rows

DEFAULT_MAX_BYTES = 50 << 30
DEFAULT_MIN_FREE_BYTES = 1 << 30


class LocalStore(BlockStore):
    """Blocks in a folder on a local disk; any number of processes may share it.

    `max_bytes` bounds the sum of all block files; the least recently used ones give way. Blocks
    also give way so that `min_free_bytes` stay free on the disk. Both are enforced by whoever
    writes. Raises StoreError when the folder cannot be used.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        min_free_bytes: int = DEFAULT_MIN_FREE_BYTES,
    ) -> None:
        self.root = Path(root).absolute()
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        self._shared: Folder | None = acquire(self.root)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        keys = list(keys)
        try:
            return self._folder.query(lambda index: index.contains(keys))
        except FAILURES:
            in_force().give_up()
            return [False] * len(keys)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        requests = list(requests)
        try:
            folder = self._folder
            entries = folder.query(lambda index: index.entries([item.key for item in requests]))
            results = read_blocks(folder, requests, entries)
        except FAILURES:
            return [ReadResult(ReadStatus.ERROR) for _ in requests]
        folder.touch(
            request.key
            for request, result in zip(requests, results, strict=True)
            if request.touch and result.status is ReadStatus.OK
        )
        return results

    def write(
        self, requests: Sequence[WriteRequest], *, overwrite: bool = False
    ) -> list[WriteStatus]:
        requests = list(requests)
        try:
            writer = Writer(
                self._folder,
                max_bytes=self._max_bytes,
                min_free_bytes=self._min_free_bytes,
                overwrite=overwrite,
            )
        except StoreError:
            return [WriteStatus.ERROR] * len(requests)
        with suppress(*FAILURES):  # what was not reached keeps its ERROR
            writer.run(requests)
        return writer.statuses

    def delete(self, keys: Sequence[str]) -> list[bool]:
        keys = list(keys)

        def work(rows: Rows) -> list[str | None]:
            return [rows.remove(raw) if (raw := raw_key(key)) else None for key in keys]

        try:
            folder = self._folder
            names = folder.update(work)
        except FAILURES:
            return [False] * len(keys)
        folder.unlink(name for name in names if name)
        return [name is not None for name in names]

    def scan(self, prefix: str = "") -> Iterator[BlockStat]:
        try:
            for key, entry in self._folder.query(lambda index: index.scan(prefix)):
                yield BlockStat(key, entry.size, entry.created, entry.stamp / 1e9)
        except FAILURES as error:
            raise self._unreadable(error) from error

    def stats(self) -> StoreStats:
        self._check_folder()
        try:
            blocks, totals = self._folder.query(lambda index: index.totals())
            oldest = self._folder.query(lambda index: index.oldest_stamp())
        except FAILURES as error:
            raise self._unreadable(error) from error
        return StoreStats(
            blocks=blocks,
            bytes=totals.used,
            capacity_bytes=self._max_bytes,
            evicted_blocks=totals.evicted,
            corrupt_blocks=totals.corrupt,
            oldest_use=None if oldest is None else oldest / 1e9,
        )

    def pin(self, keys: Sequence[str], seconds: float) -> bool:
        try:
            self._folder.pin(list(keys), seconds)
        except FAILURES:
            return False
        return True

    def compact(self) -> tuple[int, int]:
        try:
            return self._folder.compact()
        except FAILURES as error:
            raise self._unreadable(error) from error

    def repair(self) -> bool:
        try:
            self._folder.repair()
        except FAILURES as error:
            raise self._unreadable(error) from error
        return True

    def close(self) -> None:
        with self._lock:
            shared, self._shared = self._shared, None
        if shared is not None and shared.pid == os.getpid():
            release(shared)

    @property
    def _folder(self) -> Folder:
        shared = self._shared
        if shared is not None and shared.pid == os.getpid():
            return shared
        with self._lock:
            if self._shared is None:
                raise StoreError(f"store {self.root}: closed")
            if self._shared.pid != os.getpid():  # forked: nothing of the parent may be used
                self._shared = acquire(self.root)
            return self._shared

    def _check_folder(self) -> None:
        """What the index does not notice: it stays readable in memory when its folder is gone."""
        if not (self.root / "index").is_dir():  # writes may have made the rest of it anew
            raise StoreError(
                f"store {self.root}: the folder was removed while in use; put it back, or open "
                "the store again to make it anew"
            )
        if not os.access(self.root, os.W_OK):
            raise StoreError(f"store {self.root}: cannot be written any more; make it writable")

    def _unreadable(self, error: Exception) -> StoreError:
        if isinstance(error, StoreError):
            return error
        if isinstance(error, DAMAGE):
            with suppress(*FAILURES):
                self._folder.condemn_index()
        return StoreError(f"store {self.root}: index: {error}; open the store again to rebuild it")
