"""After a crash, while the store is in use: the rows' checksums and the order of eviction.

That takes seconds at a million blocks. Until it is done the mark, a file in the folder of the
index, says so. One process at a time sees to it, the one that has the mark locked. A mark belongs
to one index: who replaces the index makes another mark or none.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from kvstore_xfer.store.local.layout import write_anew

if TYPE_CHECKING:
    from pathlib import Path

DAMAGED = 3  # exit status of `check_index`
_MARK = "unchecked"
_OPENING = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_ARGUMENTS = ("-m", "kvstore_xfer.store.local.check_index")
_CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}


def set_mark(index: Path) -> None:
    write_anew(index / _MARK, "")


def is_marked(index: Path) -> bool:
    return os.path.lexists(index / _MARK)


def environment() -> dict[str, str]:
    """Of a child that imports what this process imports."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}


def last_line(stderr: bytes) -> str:
    return stderr.decode(errors="replace").strip().rpartition("\n")[2]


class Check:
    """A child process that reads the rows of a marked index."""

    def __init__(self, mark: Path, descriptor: int) -> None:
        self._mark = mark
        self._descriptor = descriptor
        self._child = subprocess.Popen(
            [sys.executable, *_ARGUMENTS, os.fspath(mark.parent)],
            env=environment(),
            stdin=subprocess.PIPE,  # the child ends when this process does
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the keyboard is no verdict
        )

    @classmethod
    def begin(cls, index: Path) -> Check | None:
        """None when nothing is to be checked, or another process sees to it. Raises OSError."""
        mark = index / _MARK
        try:
            descriptor = os.open(mark, _OPENING)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(mark, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def conclude(self) -> str | None:
        """What is damaged. Takes the mark off a sound index. To be called under the folder's lock.

        Without a verdict, as after a signal from outside, and when the index has been replaced, it
        does neither.
        """
        status, stderr = self._child.returncode, self._child.stderr
        reason = last_line(stderr.read()) if stderr else ""
        same = self._is_same_mark()
        self.end()
        if not same:
            return None
        if status == 0:
            self._mark.unlink()
        if status == DAMAGED:
            return reason
        return f"reading it ends with status {status}" if -status in _CRASHES else None

    def end(self) -> None:
        """Without waiting for what the child would find."""
        self._child.kill()
        with self._child:  # closes the pipes
            pass
        # Unlock by name: a process forked meanwhile holds a copy of the descriptor.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def after_fork_in_child(self) -> None:
        os.close(self._descriptor)  # the parent's lock stays

    def _is_same_mark(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._mark), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
