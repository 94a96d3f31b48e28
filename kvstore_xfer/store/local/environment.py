"""One LMDB environment of this process: growth, stale readers, damage, fork.

LMDB forbids a second handle of one environment in a process, resizing while a transaction is
open, and any use of a handle after a fork. `Environment` keeps those rules.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import lmdb

from kvstore_xfer.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

INITIAL_MAP_BYTES = 1 << 30  # address space, not disk space
_MAX_READERS = 512
DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    struct.error,  # a row of another length: LMDB's pages carry no checksum
)


class Gate:
    """Many may pass at once; who closes it waits until all have left."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            self._changed.wait_for(lambda: not self._inside)

    def open(self) -> None:
        with self._changed:
            self._closed = False
            self._changed.notify_all()


class Environment:
    """An opened LMDB folder.

    Raises one of `DAMAGE` when it is not an intact environment, StoreError when it cannot be
    shared.
    """

    def __init__(self, folder: Path, databases: int, map_bytes: int = INITIAL_MAP_BYTES) -> None:
        self._data = os.fspath(folder / "data.mdb")
        _refuse_irregular(folder)
        self._env = _open(folder, databases, map_bytes)
        self.gate = Gate()
        self._inode: int | None = os.stat(self._data).st_ino
        try:
            self._refuse_truncated()
            self._env.reader_check()
        except BaseException:
            self._env.close()
            raise

    def database(self, name: bytes) -> lmdb._Database:
        return self._env.open_db(name)

    @property
    def current(self) -> bool:
        """False once another process has replaced the index under its path."""
        try:
            return os.stat(self._data).st_ino == self._inode
        except FileNotFoundError:
            return False

    def copy_compact(self, folder: Path) -> None:
        """A copy without free pages, in an empty folder."""
        with self.gate.passing():
            self._env.copy(os.fspath(folder), compact=True)

    def abandon(self) -> None:
        """Close; never current again, even when the same folder comes back to its path."""
        self._inode = None
        self.close()

    @contextmanager
    def reading(self) -> Iterator[lmdb.Transaction]:
        while True:
            with self.gate.passing():
                self._refuse_read_only()
                try:
                    transaction = self._env.begin()
                except lmdb.MapResizedError:
                    pass
                except lmdb.ReadersFullError:
                    if not self._env.reader_check():
                        raise
                    continue
                else:
                    with transaction:
                        yield transaction
                    return
            self._resize(0)

    def update(self, work: Callable[[lmdb.Transaction], T]) -> T:
        """Run `work` in a write transaction; it runs again when the map had to grow."""
        while True:
            with self.gate.passing():
                self._refuse_read_only()
                try:
                    with self._env.begin(write=True) as transaction:
                        return work(transaction)
                except lmdb.MapFullError:
                    size = 2 * int(self._env.info()["map_size"])
                except lmdb.MapResizedError:
                    size = 0
            self._resize(size)

    def clear_stale_readers(self) -> int:
        with self.gate.passing():
            return int(self._env.reader_check())

    def close(self) -> None:
        self.gate.close()
        self._env.close()
        self.gate.open()

    def close_after_fork(self) -> None:
        """In the child, where the gate was closed before the fork: no transaction is open."""
        self._env.close()

    def _resize(self, size: int) -> None:
        """Zero adopts the size that another process has set."""
        self.gate.close()
        try:
            self._env.set_mapsize(size)
        finally:
            self.gate.open()

    def _refuse_read_only(self) -> None:
        """Raises OSError. Every transaction writes LMDB's mapped lock file.

        A kernel that has turned the file system read-only, as after a disk error, would answer
        that with a bus error, which ends the process.
        """
        if os.statvfs(self._data).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._data)

    def _refuse_truncated(self) -> None:
        """A page beyond the end of the file would be a bus error, not an exception."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if os.stat(self._data).st_size < needed:
            raise lmdb.CorruptedError("index: the file is shorter than its pages")


def _refuse_irregular(folder: Path) -> None:
    """LMDB would follow a link, and write over what it finds there."""
    for name in ("data.mdb", "lock.mdb"):
        path = folder / name
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise lmdb.CorruptedError(f"index: {name} is not a regular file")


def _open(folder: Path, databases: int, map_bytes: int) -> lmdb.Environment:
    try:
        return lmdb.open(
            os.fspath(folder),
            map_size=map_bytes,
            max_dbs=databases,
            max_readers=_MAX_READERS,
            # A power cut may undo the last commit but never tears the index; undone additions
            # are found again by the walk after a reboot. One flush a commit instead of two.
            sync=True,
            metasync=False,
            readahead=False,
            # A spare reader slot would be shared with a forked child.
            max_spare_txns=0,
        )
    except lmdb.LockError as error:
        raise StoreError(
            f"store {folder.parent}: another process with process id {os.getpid()} (in another "
            "container) has it open; let the containers share one process id namespace"
        ) from error
    except lmdb.DiskError as error:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
