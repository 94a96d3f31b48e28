"""Is the index file still what its last user left?

LMDB maps its file and trusts it: a page damaged on the disk can end the process with a signal
instead of an exception. So the last process that closes an index writes down the digest of the
file, and the first that opens it compares. Without a digest, after a crash, a child process walks
through every page first; what would have killed us kills the child. Then the rows are marked for
`check`, and until that is done nobody writes a digest.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import lmdb
import xxhash

from kvstore_xfer.errors import BlockFormatError
from kvstore_xfer.store.local import walk_index
from kvstore_xfer.store.local.check import environment, is_marked, last_line, set_mark
from kvstore_xfer.store.local.layout import open_regular, remove_stray, write_anew

if TYPE_CHECKING:
    from pathlib import Path

_NAME = "digest"
_MOST_CHARACTERS = 100
_STEP = 4 << 20
_WALK_SECONDS = 120


def become_user(descriptor: int) -> bool:
    """Take part in the users' lock; True for the first."""
    first = is_last_user(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return first


def is_last_user(descriptor: int) -> bool:
    """Whether nobody else has the index open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write(folder: Path) -> None:
    """Called by the last user, after its handle is closed; not for rows still to be checked."""
    if is_marked(folder):
        return
    fresh = folder / f"{_NAME}.new"
    write_anew(fresh, _digest(folder))
    fresh.rename(folder / _NAME)


def check(folder: Path, *, alone: bool) -> None:
    """Raises lmdb.CorruptedError for a damaged index; the digest is used up."""
    if not alone or not os.path.lexists(folder / "data.mdb"):
        return
    sealed = folder / _NAME
    expected = _written(sealed)
    if not expected:
        _walk_in_child(folder)
        set_mark(folder)
    elif expected != _digest(folder):
        raise lmdb.CorruptedError("index: the file is not what its last user left")
    remove_stray(sealed)


def _written(sealed: Path) -> str:
    """The digest; empty when nobody has closed the index, or something else lies there."""
    try:
        descriptor, _ = open_regular(sealed)
        with open(descriptor, encoding="utf-8") as file:
            return file.read(_MOST_CHARACTERS)
    except (FileNotFoundError, BlockFormatError, UnicodeDecodeError):
        return ""


def _digest(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(_open_data(folder), "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_STEP))
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def _open_data(folder: Path) -> int:
    try:
        return open_regular(folder / "data.mdb")[0]
    except BlockFormatError as error:
        raise lmdb.CorruptedError(f"index: {error}") from None


def _walk_in_child(folder: Path) -> None:
    os.close(_open_data(folder))  # a pipe would hold the child up
    # By its path and without site-packages' start-up files: the opening of a store waits for it.
    command = [sys.executable, "-S", os.fspath(walk_index.__file__), os.fspath(folder)]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, timeout=_WALK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise lmdb.CorruptedError("index: reading it does not come to an end") from None
    if done.returncode:
        reason = last_line(done.stderr) or f"reading it ends with status {done.returncode}"
        raise lmdb.CorruptedError(f"index: {reason}")
