"""What all stores of one process that name the same folder share.

One LMDB handle, one thread pool, one housekeeping thread, and the changes that wait for the next
write transaction: touches of blocks that were read, and trash rows whose files are gone.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import lmdb

from kvstore_xfer.errors import BlockFormatError, StoreError
from kvstore_xfer.store.local import seal
from kvstore_xfer.store.local.check import Check, is_marked, set_mark
from kvstore_xfer.store.local.environment import DAMAGE
from kvstore_xfer.store.local.index import Entry, Index, raw_key
from kvstore_xfer.store.local.layout import Layout, open_regular, parse_name, payload_name
from kvstore_xfer.store.local.payload import read_header
from kvstore_xfer.store.local.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore_xfer.store.local.index import Rows

T = TypeVar("T")
logger = logging.getLogger(__name__)

FAILURES = (lmdb.Error, OSError, struct.error)
_TICK_SECONDS = 2.0
_SWEEP_TICKS = 30
_WALK_BATCH = 1024
_PROGRESS_SECONDS = 5.0


class _Found(NamedTuple):
    """A payload file met by the walk; `entry` is None when its header is damaged."""

    name: str
    key: bytes
    entry: Entry | None


class Folder:
    """One store folder, opened once per process. Raises StoreError when it cannot be used."""

    def __init__(self, root: Path) -> None:
        self.pid = os.getpid()
        self.layout = Layout(root)
        self.layout.prepare()
        self.writer = threading.RLock()
        self._damaged = False
        self._pending_lock = threading.Lock()
        self._touched: dict[str, int] = {}
        self._unlinked: list[str] = []
        self._users = self.layout.users()
        try:
            self._index = self._open_index(first=True)
        except BaseException:
            os.close(self._users)
            raise
        self.workers = Workers(f"store {root}")
        self._stop = threading.Event()
        self._check: Check | None = None
        try:
            if self._index.walked() is None:
                self.walk()
            self.sweep_temporaries()
        except FAILURES as error:
            self._abort()
            raise self._unusable(error) from None
        self._keeper = threading.Thread(target=self._keep_house, name="kvxfer-keeper", daemon=True)
        self._keeper.start()

    def query(self, work: Callable[[Index], T]) -> T:
        """Run a read of the index; one that lost its place on the disk is not asked."""
        if not self._index.environment.current:
            with self.writer:
                self._reopen_index()
        try:
            return work(self._index)
        except DAMAGE:
            self._damaged = True
            raise

    def condemn_index(self) -> None:
        """Drop an index found damaged; whoever opens the folder next rebuilds it."""
        self._damaged = True
        with self.writer:
            self._reopen_index()

    def update(self, work: Callable[[Rows], T]) -> T:
        """Run `work` in one write transaction, after the changes that were waiting for one.

        `work` may run twice.
        """
        with self.writer:
            while True:
                with self.layout.locked(exclusive=False):
                    if self._index.environment.current and not self._damaged:
                        return self._settle_and(work)
                self._reopen_index()

    def touch(self, keys: Iterable[str]) -> None:
        """Remember a use; it reaches the index with the next write transaction."""
        now = time.time_ns()
        with self._pending_lock:
            for position, key in enumerate(keys):
                self._touched[key] = now + position

    def pin(self, keys: Sequence[str], seconds: float) -> None:
        """Uses in the future: nothing is evicted before its time."""
        until = time.time_ns() + int(seconds * 1e9)

        def work(rows: Rows) -> None:
            for key in keys:
                if raw := raw_key(key):
                    rows.touch(raw, until)

        self.update(work)

    def unlink(self, names: Iterable[str]) -> None:
        """Remove files whose rows are in the trash; one that resists stays there and counts."""
        gone = [name for name in names if self._remove_file(name)]
        with self._pending_lock:
            self._unlinked += gone

    def evict(self, needed: int) -> int:
        """Remove least recently used blocks of `needed` bytes; how many there were."""
        names = self.update(lambda rows: rows.evict(needed, time.time_ns()))
        self.unlink(names)
        return len(names)

    def used_bytes(self) -> int:
        """Bytes of all files that are still there."""
        _, totals = self.query(lambda index: index.totals())
        with self._pending_lock:
            gone = len(self._unlinked)
        if not gone:
            return totals.used
        return self.update(lambda rows: rows.totals.used)

    def walk(self) -> None:
        """Bring into the index every intact block that it does not know."""
        boot = _boot_id()
        started = reported = time.monotonic()
        count = 0
        batch: list[str] = []
        for share, names in self.layout.payloads():
            if self._stop.is_set():
                return  # closing; whoever opens the store next starts again
            batch += names
            count += len(names)
            if len(batch) >= _WALK_BATCH:
                self._adopt(batch)
                batch = []
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                logger.info(
                    "store %s: indexing, %.0f %%, %d blocks", self.layout.root, 100 * share, count
                )
        self._adopt(batch)
        self.update(lambda rows: rows.set_walked(boot))
        if count:
            seconds = time.monotonic() - started
            logger.info("store %s: indexed %d blocks in %.1f s", self.layout.root, count, seconds)

    def sweep_temporaries(self) -> None:
        """Remove what dead writers left: files that the index does not know."""
        for path, blocks in self.layout.abandoned():
            if blocks:
                self._unpublish(blocks)
            with suppress(IsADirectoryError):  # a stray; not ours to empty
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._stop.set()
        self._keeper.join()
        self.workers.shutdown()
        self._end_check()
        try:
            self.update(lambda rows: None)
        except FAILURES as error:
            logger.debug("store %s: last touches lost: %s", self.layout.root, error)
        self._index.close()
        self._leave()

    def compact(self) -> tuple[int, int]:
        """Write the index anew without its free pages; its bytes before and after.

        Every process finds its handle out of date then, and opens the new one.
        """
        index = self.layout.index
        fresh, old = index.with_name("index.new"), index.with_name("index.old")
        with self.writer, self.layout.locked(exclusive=True):
            for leftover in (fresh, old):
                shutil.rmtree(leftover, ignore_errors=True)
            fresh.mkdir()
            self._index.environment.copy_compact(fresh)
            if is_marked(index):
                set_mark(fresh)
            sizes = [os.stat(folder / "data.mdb").st_size for folder in (index, fresh)]
            index.rename(old)
            fresh.rename(index)
            shutil.rmtree(old, ignore_errors=True)
        return sizes[0], sizes[1]

    def repair(self) -> None:
        """Bring index and files together: adopt what nobody knows, drop what has no file."""
        self.sweep_temporaries()
        self.unlink(self.query(lambda index: index.trash()))
        self.walk()
        lost = [
            (key.encode(), entry.generation)
            for key, entry in self.query(lambda index: index.scan(""))
            if not os.path.isfile(self.layout.payload(payload_name(key.encode(), entry.generation)))
        ]
        self.update(lambda rows: [rows.remove_corrupt(*item) for item in lost])

    def _leave(self) -> None:
        """The last user seals the index."""
        try:
            with self.layout.locked(exclusive=True):
                if seal.is_last_user(self._users):
                    seal.write(self.layout.index)
        except OSError as error:
            logger.debug("store %s: index not sealed: %s", self.layout.root, error)
        finally:
            os.close(self._users)

    def before_fork(self) -> None:
        self.writer.acquire()
        self._index.environment.gate.close()

    def after_fork_in_parent(self) -> None:
        self._index.environment.gate.open()
        self.writer.release()

    def after_fork_in_child(self) -> None:
        self._index.environment.close_after_fork()
        os.close(self._users)  # the parent's lock stays
        if self._check is not None:
            self._check.after_fork_in_child()

    def _settle_and(self, work: Callable[[Rows], T]) -> T:
        with self._pending_lock:
            touched, self._touched = self._touched, {}
            unlinked, self._unlinked = self._unlinked, []

        def settled(rows: Rows) -> T:
            for key, stamp in touched.items():
                rows.touch(key.encode(), stamp)
            for name in unlinked:
                rows.forget(name)
            return work(rows)

        try:
            return self._index.update(settled)
        except BaseException as error:
            with self._pending_lock:
                self._unlinked = unlinked + self._unlinked
            self._damaged = self._damaged or isinstance(error, DAMAGE)
            raise

    def _remove_file(self, name: str) -> bool:
        try:
            self.layout.remove_payload(name)
        except OSError as error:
            logger.warning("store %s: cannot remove %s: %s", self.layout.root, name, error)
            return False
        return True

    def _open_index(self, *, first: bool = False) -> Index:
        """Open the index, or start an empty one where it is lost or damaged."""
        with self.layout.locked(exclusive=True):
            try:
                self.layout.index.mkdir(exist_ok=True)
                if first:
                    seal.check(self.layout.index, alone=seal.become_user(self._users))
                return Index(self.layout.index)
            except DAMAGE as error:
                logger.warning("store %s: index rebuilt: %s", self.layout.root, error)
                shutil.rmtree(self.layout.index)
                self.layout.index.mkdir()
                return Index(self.layout.index)
            except FAILURES as error:
                raise self._unusable(error) from None

    def _reopen_index(self) -> None:
        """After the index was replaced by another process, or found damaged by this one."""
        if self._index.environment.current and not self._damaged:
            return
        found_damaged_here = self._damaged and self._index.environment.current
        self._index.environment.abandon()
        if found_damaged_here:
            with self.layout.locked(exclusive=True):
                shutil.rmtree(self.layout.index, ignore_errors=True)
        self._index = self._open_index()
        self._damaged = False

    def _adopt(self, names: list[str]) -> None:
        found = self.workers.map(self._inspect, names)

        def work(rows: Rows) -> list[str]:
            # Asked inside the transaction: who is not in progress now has come to its end before.
            unfinished = self.layout.in_progress()
            rest = [item for item in found if item.name not in unfinished]
            # What was half there then may be whole, and known, by now.
            rest = [item if item.entry else self._inspect(item.name) for item in rest]
            return [name for item in rest if (name := self._adopt_one(rows, item))]

        self.unlink(self.update(work))

    def _inspect(self, name: str) -> _Found:
        digest_and_generation = parse_name(name)
        generation = digest_and_generation[1] if digest_and_generation else 0
        try:
            descriptor, _ = open_regular(self.layout.payload(name))
        except OSError:
            return _Found(name, b"", None)
        try:
            header, length = read_header(descriptor)
            stamp = os.fstat(descriptor).st_mtime_ns
        except (BlockFormatError, OSError):
            return _Found(name, b"", None)
        finally:
            os.close(descriptor)
        key = header.key.encode()
        if payload_name(key, generation) != name:
            return _Found(name, b"", None)
        return _Found(
            name, key, Entry(generation, length, header.payload_bytes, header.created, stamp)
        )

    def _adopt_one(self, rows: Rows, found: _Found) -> str | None:
        """The name of a file that has to go: damaged, or older than another of its key."""
        if rows.in_trash(found.name) or not os.path.exists(self.layout.payload(found.name)):
            return None
        if found.entry is None:
            return found.name
        known = rows.get(found.key)
        if known is None or known.generation < found.entry.generation:
            return rows.put(found.key, found.entry)
        return None if known.generation == found.entry.generation else found.name

    def _unpublish(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        def work(rows: Rows) -> None:
            for key, generation in blocks:
                name = payload_name(key, generation)
                entry = rows.get(key)
                committed = entry is not None and entry.generation == generation
                if not committed and not rows.in_trash(name):
                    self.layout.remove_payload(name)

        self.update(work)

    def _keep_house(self) -> None:
        self._see_to_check(begin=True)
        ticks = 0
        while not self._stop.wait(_TICK_SECONDS):
            sweep = ticks % _SWEEP_TICKS == 0
            self._see_to_check(begin=sweep)
            try:
                self._tick(sweep=sweep)
            except FAILURES as error:
                logger.debug("store %s: housekeeping: %s", self.layout.root, error)
            ticks += 1

    def _tick(self, *, sweep: bool) -> None:
        if self._touched or self._unlinked or self._damaged or not self._index.environment.current:
            self.update(lambda rows: None)
        self.unlink(self.query(lambda index: index.trash()))
        if self.query(lambda index: index.walked()) != _boot_id():
            self.walk()
        if sweep:
            self.query(lambda index: index.environment.clear_stale_readers())
            self.sweep_temporaries()

    def _see_to_check(self, *, begin: bool) -> None:
        """Begin the check of rows that a crash has left, or act on what it has found."""
        try:
            if self._check is None:
                if begin:
                    self._check = Check.begin(self.layout.index)
                return
            if not self._check.ended:
                return
            ended, self._check = self._check, None
            with self.layout.locked(exclusive=False):  # the index is replaced under the other
                damage = ended.conclude()
            if damage is not None:
                logger.warning("store %s: index rebuilt: %s", self.layout.root, damage)
                with self.writer:
                    self._reopen_index()  # it may be another than this process has open
                    self.condemn_index()
        except FAILURES as error:
            logger.debug("store %s: check of the index: %s", self.layout.root, error)

    def _end_check(self) -> None:
        self._see_to_check(begin=False)
        if self._check is not None:
            self._check.end()
            self._check = None

    def _unusable(self, error: Exception) -> StoreError:
        if isinstance(error, OSError):
            return self.layout.unusable(error)
        return StoreError(
            f"store {self.layout.root}: index: {error}; remove {self.layout.index} to rebuild it"
        )

    def _abort(self) -> None:
        self.workers.shutdown()
        self._index.close()
        os.close(self._users)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


_opened: dict[tuple[int, int], tuple[Folder, int]] = {}
_opened_lock = threading.Lock()


def acquire(root: Path) -> Folder:
    """The process's folder at `root`, opened at first use; give it back with `release`."""
    with _opened_lock:
        identity = _identity(root)
        known = _opened.get(identity) if identity else None
        if known is None:
            folder, users = Folder(root), 0
        else:
            folder, users = known
        identity = _identity(root)
        if identity is None:
            raise StoreError(f"store {root}: the folder has vanished; create it again")
        _opened[identity] = (folder, users + 1)
        return folder


def release(folder: Folder) -> None:
    with _opened_lock:
        for identity, (known, users) in list(_opened.items()):
            if known is not folder:
                continue
            if users > 1:
                _opened[identity] = (known, users - 1)
            else:
                del _opened[identity]
                known.close()


def _identity(root: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(root)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _before_fork() -> None:
    _opened_lock.acquire()
    for folder, _ in _opened.values():
        folder.before_fork()


def _after_fork_in_parent() -> None:
    for folder, _ in _opened.values():
        folder.after_fork_in_parent()
    _opened_lock.release()


def _after_fork_in_child() -> None:
    for folder, _ in _opened.values():
        folder.after_fork_in_child()
    _opened.clear()
    _opened_lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
