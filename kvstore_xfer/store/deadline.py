"""How long the caller of stores has time, and whether they answered.

A store that waits for others asks for the deadline in force on its thread; one that only reads a
disk of this machine does not. What has not come by then is an error of its item, like any other.
The deadline remembers it, because `BlockStore.exists` has no word for it.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Deadline:
    """`seconds` from now, then the time `at` of `time.monotonic`.

    `unanswered`: a store did not say all that it was asked; `missed`: because time was up.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds
        self.unanswered = self.missed = False

    @property
    def left(self) -> float:
        """Seconds; negative when it is over."""
        return self.at - time.monotonic()

    def give_up(self) -> None:
        """For the store that does not answer something, whatever the cause."""
        self.unanswered = True
        self.missed = self.missed or self.left <= 0


_in_force: ContextVar[Deadline | None] = ContextVar("kvxfer_deadline", default=None)


def in_force() -> Deadline:
    """The deadline of the calling thread; an endless one where nobody has set any."""
    return _in_force.get() or Deadline(math.inf)


@contextmanager
def within(seconds: float) -> Iterator[Deadline]:
    """Calls of stores in this block, on this thread, end within `seconds`.

    Gives the deadline in force, which is an outer one where that comes first.
    """
    outer, own = in_force(), Deadline(seconds)
    deadline = outer if outer.at <= own.at else own
    token = _in_force.set(deadline)
    try:
        yield deadline
    finally:
        _in_force.reset(token)
