"""Is the index file still what its last user left?

LMDB maps its file and trusts it: a page damaged on the disk can end the process with a signal
instead of an exception. So the last process that closes an index writes down the digest of the
file, and the first that opens it compares. Without a digest, after a crash, a child process reads
every row first; what would have killed us kills the child.
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
from kvstore_xfer.store.local.layout import open_regular

if TYPE_CHECKING:
    from pathlib import Path

_NAME = "digest"
_STEP = 4 << 20
_CHECK_SECONDS = 120


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
    """Called by the last user, after its handle is closed."""
    fresh = folder / f"{_NAME}.new"
    fresh.write_text(_digest(folder))
    fresh.rename(folder / _NAME)


def check(folder: Path, *, alone: bool) -> None:
    """Raises lmdb.CorruptedError for a damaged index; the digest is used up."""
    if not alone or not os.path.lexists(folder / "data.mdb"):
        return
    sealed = folder / _NAME
    try:
        expected = sealed.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        expected = ""  # not closed by its last user
    if expected != _digest(folder):
        if expected:
            raise lmdb.CorruptedError("index: the file is not what its last user left")
        _read_in_child(folder)
    sealed.unlink(missing_ok=True)


def _digest(folder: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        descriptor, _ = open_regular(folder / "data.mdb")
    except BlockFormatError as error:
        raise lmdb.CorruptedError(f"index: {error}") from None
    with open(descriptor, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_STEP))
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def _read_in_child(folder: Path) -> None:
    path = os.pathsep.join(part for part in sys.path if part)
    command = [sys.executable, "-m", "kvstore_xfer.store.local.check_index", os.fspath(folder)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise lmdb.CorruptedError("index: reading it does not come to an end") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = last or f"reading it ends with status {done.returncode}"
        raise lmdb.CorruptedError(f"index: {reason}")
