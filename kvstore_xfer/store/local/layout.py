"""Names inside the folder of a local store, and the locks that several processes agree on.

====================== =============================================================
path                   content
====================== =============================================================
``format``             one line with the format version
``users``              empty; flock: shared by every process that has the index open
``lock``               empty; flock: shared while publishing, exclusive to change the index
``index/``             the LMDB environment
``blocks/ab/NAME``     one block; NAME is ``<sha256 of the key>.<generation>``
``tmp/NUMBER``         names of the blocks on their way in; their writer holds a flock on it
====================== =============================================================

In a folder of format 1 blocks lie one level deeper, ``blocks/ab/cd/NAME``, which costs a folder for
nearly every block; it stays so.

A block is written under its final name at once, and is there for others with its row in the index.
Until then its name stands in a file in ``tmp/``: what a dead writer left unfinished is found there.
A payload file never changes afterwards: overwriting makes a new generation. Names are made of
digests and numbers only, so no key can lead out of the folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import re
import secrets
import shutil
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvstore_xfer.errors import BlockFormatError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_FORMATS = {  # and the levels of folders that blocks lie in
    "kvstore_xfer local store, format 1": 2,
    "kvstore_xfer local store, format 2": 1,
}
FORMAT = "kvstore_xfer local store, format 2"
_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})")
_ANNOUNCED = re.compile(rb"([0-9a-f]{16}) (\S+)")
_NUMBER = re.compile(r"[0-9a-f]{32}")
_ANNOUNCED_BYTES = 1 << 20  # more than a group of writes can have
_OWN = frozenset({"format", "lock", "users", "lost+found"})
_SAFELY = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_REMEDIES = {
    errno.EROFS: "mount it read-write or choose another folder",
    errno.EACCES: "make it writable for this user or choose another folder",
    errno.EPERM: "make it writable for this user or choose another folder",
    errno.ENOSPC: "free some space or choose another disk",
    errno.EDQUOT: "raise the quota or choose another disk",
    errno.ENOTDIR: "name a folder",
    errno.EEXIST: "name a folder",
    errno.ELOOP: "remove it",
    errno.EISDIR: "remove it",
}
_WHAT_IT_IS = {errno.ELOOP: "a symbolic link", errno.EISDIR: "a folder"}  # where a file belongs


def payload_name(key: bytes, generation: int) -> str:
    return f"{hashlib.sha256(key).hexdigest()}.{generation:016x}"


def parse_name(name: str) -> tuple[str, int] | None:
    """Digest of the key and generation, None for a name that is not ours."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2], 16))


def open_safely(path: str | Path) -> int:
    """A descriptor for reading; without blocking: to open a pipe would wait for its writer.

    Raises BlockFormatError for a symbolic link.
    """
    try:
        return os.open(path, _SAFELY)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BlockFormatError(f"{os.path.basename(path)} is a symbolic link") from None
        raise


def refuse_irregular(descriptor: int, path: str | Path) -> int:
    """The file's length. Raises BlockFormatError when it is a pipe, a folder or the like."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise BlockFormatError(f"{os.path.basename(path)} is not a regular file")
    return found.st_size


def open_regular(path: str | Path) -> tuple[int, int]:
    """A descriptor for reading, and the file's length.

    Raises BlockFormatError when it is not a regular file.
    """
    descriptor = open_safely(path)
    try:
        return descriptor, refuse_irregular(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise


def open_own(path: str | Path) -> int:
    """A descriptor for reading and writing of a file that is made if missing; never of a link's."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    return os.open(path, flags, 0o644)


def write_anew(path: Path, text: str) -> None:
    """Into a file of its own, whatever lay there. Raises OSError."""
    remove_stray(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "w", encoding="utf-8") as file:
        file.write(text)


def remove_stray(path: Path) -> None:
    """Whatever lies there, with what is in it. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def new_generation() -> int:
    """Unique among all writers of a key, and later ones are larger."""
    return time.time_ns() & ~0xFFFF | random.getrandbits(16)


class Layout:
    """Paths of one store folder. Raises StoreError where the folder cannot be used."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blocks = root / "blocks"
        self._blocks = os.fspath(self.blocks)
        self._levels = _FORMATS[FORMAT]
        self.temporary = root / "tmp"
        self._temporary = os.fspath(self.temporary)
        self.index = root / "index"
        self._format = root / "format"
        self._lock = root / "lock"

    def prepare(self) -> None:
        """Create what is missing and prove that the folder can be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()  # before the lock file is made: a refusal changes nothing
            with self.locked(exclusive=True):
                self._check_format()
                for folder in (self.blocks, self.temporary, self.index):
                    folder.mkdir(exist_ok=True)
            with self.announced([]):
                pass
        except OSError as error:
            raise self.unusable(error) from None

    def unusable(self, error: OSError) -> StoreError:
        if isinstance(error, StoreError):
            return error
        number = error.errno or 0
        remedy = _REMEDIES.get(number, "check the disk or choose another folder")
        if number in _WHAT_IT_IS and error.filename:
            return StoreError(
                f"store {self.root}: {error.filename} is {_WHAT_IT_IS[number]}; {remedy}"
            )
        return StoreError(f"store {self.root}: {error.strerror or error}; {remedy}")

    def _check_format(self) -> None:
        try:
            descriptor, _ = open_regular(self._format)
        except FileNotFoundError:
            self._write_format()
            return
        except BlockFormatError:
            raise StoreError(
                f"store {self.root}: {self._format} is not a regular file; remove it"
            ) from None
        with open(descriptor, "rb") as file:
            found = file.read(1000).decode(errors="replace").strip()
        if found not in _FORMATS:
            raise StoreError(
                f"store {self.root}: unknown format {found[:60]!r}, this version reads up to "
                f"{FORMAT!r}; use the version that made it or an empty folder"
            )
        self._levels = _FORMATS[found]

    def _refuse_foreign(self) -> None:
        if self._format.exists():
            return
        foreign = sorted(set(os.listdir(self.root)) - _OWN - {"format.new"})
        # Looked at again: another process may have made the store since, its format first.
        if foreign and not self._format.exists():
            raise StoreError(
                f"store {self.root}: the folder holds other files ({foreign[0]}) and no store "
                "format; choose an empty folder"
            )

    def _write_format(self) -> None:
        self._refuse_foreign()
        fresh = self.root / "format.new"
        write_anew(fresh, FORMAT + "\n")
        fresh.rename(self._format)

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Hold the folder's lock; the kernel releases it when the process dies."""
        descriptor = open_own(self._lock)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            # Unlock by name: a child forked in between holds a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def users(self) -> int:
        """A descriptor of the file whose lock says who has the index open."""
        try:
            return open_own(self.root / "users")
        except OSError as error:
            raise self.unusable(error) from None

    def payload(self, name: str) -> str:
        if self._levels == 1:
            return f"{self._blocks}/{name[:2]}/{name}"
        return f"{self._blocks}/{name[:2]}/{name[2:4]}/{name}"

    def remove_payload(self, name: str) -> None:
        """Delete a block's file, if it is there. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self.payload(name))

    def create_payload(self, name: str) -> int:
        """A new file for a block. Raises OSError."""
        path = self.payload(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o644)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return os.open(path, flags, 0o644)

    @contextmanager
    def announced(self, blocks: Sequence[tuple[bytes, int]]) -> Iterator[None]:
        """Say which keys and generations are about to be written, until that is done or undone.

        After OSError the announcement stays, for the sweep to finish.
        """
        path = f"{self._temporary}/{secrets.token_hex(16)}"
        descriptor = _create_locked(path)
        try:
            text = b"".join(b"%016x %s\n" % (generation, key) for key, generation in blocks)
            if os.write(descriptor, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            yield
            os.unlink(path)
        finally:
            os.close(descriptor)

    def abandoned(self) -> Iterator[tuple[Path, list[tuple[bytes, int]]]]:
        """Announcements whose writer is dead, locked, with their keys and generations."""
        for entry in list(os.scandir(self.temporary)):
            if not _NUMBER.fullmatch(entry.name) and parse_name(entry.name) is None:
                continue  # the latter from an earlier version, which had the block in here
            with _try_lock(entry.path, fcntl.LOCK_EX) as descriptor:
                if descriptor is not None:
                    yield self.temporary / entry.name, _announced_in(descriptor)

    def in_progress(self) -> set[str]:
        """Names of blocks whose writer lives and has not told the index yet."""
        names: set[str] = set()
        for entry in list(os.scandir(self.temporary)):
            if not _NUMBER.fullmatch(entry.name):
                continue
            # Shared: two that ask at once must not take each other for a writer.
            with _try_lock(entry.path, fcntl.LOCK_SH) as descriptor:
                if descriptor is not None:
                    continue
            with suppress(OSError, BlockFormatError):
                descriptor, _ = open_regular(entry.path)
                names |= {payload_name(*block) for block in _announced_in(descriptor)}
                os.close(descriptor)
        return names

    def payloads(self) -> Iterator[tuple[float, list[str]]]:
        """All payload names, one folder at a time, with the share of the walk done."""
        outer = _subfolders(self.blocks)
        for done, first in enumerate(outer):
            inner = [first]
            if self._levels == 2:
                inner = [f"{first}/{second}" for second in _subfolders(self.blocks / first)]
            for folder in inner:
                names = os.listdir(self.blocks / folder)
                ours = [name for name in names if parse_name(name)]
                here = folder.replace("/", "")
                yield done / len(outer), [name for name in ours if name.startswith(here)]

    def free_bytes(self) -> int:
        usage = os.statvfs(self.root)
        return usage.f_bavail * usage.f_frsize


def _create_locked(path: str) -> int:
    """A new file that no sweep removes while its descriptor is open."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # a sweep saw it between the open and the lock


@contextmanager
def _try_lock(path: str, lock: int) -> Iterator[int | None]:
    """A locked descriptor for reading; None when another has the lock or there is nothing."""
    try:
        descriptor = os.open(path, _SAFELY)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _announced_in(descriptor: int) -> list[tuple[bytes, int]]:
    """Keys and generations; what a power cut left of a line is skipped."""
    try:
        lines = os.pread(descriptor, _ANNOUNCED_BYTES, 0).split(b"\n")
    except OSError:  # a stray
        return []
    found = [_ANNOUNCED.fullmatch(line) for line in lines]
    return [(match[2], int(match[1], 16)) for match in found if match]


def _subfolders(folder: Path) -> list[str]:
    """Names of ours in it; what else lies there is left alone."""
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if _FAN_OUT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )
