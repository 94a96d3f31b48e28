"""A circuit breaker: an engine that does not answer is left alone for a while."""

from __future__ import annotations

import threading
import time

FAILURES_TO_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 10.0


class Breaker:
    """Closed: calls pass. Open, after some failures in a row: none passes until the pause is over,
    then one is let through as a probe; if it fails, the next pause is twice as long.

    A lookup that succeeds does not make up for transfers that failed: an engine whose answers are
    quick and whose blocks do not come is as good as gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lookups = self._transfers = 0  # that failed in a row
        self._pause = FIRST_PAUSE_SECONDS
        self._closed_again = 0.0

    @property
    def ready(self) -> bool:
        """Whether a call would be allowed now."""
        return not self._open or time.monotonic() >= self._closed_again

    def allows(self) -> bool:
        """Whether a call may be made now; a probe takes the place of the pause."""
        with self._lock:
            if not self._open:
                return True
            now = time.monotonic()
            if now < self._closed_again:
                return False
            self._closed_again = now + self._pause
            return True

    def succeeded(self, *, transfer: bool) -> None:
        with self._lock:
            self._lookups = 0
            if transfer:
                self._transfers = 0
            if self._open:
                self._closed_again = 0.0  # a transfer may try
            else:
                self._pause = FIRST_PAUSE_SECONDS

    def failed(self, *, transfer: bool) -> bool:
        """True when this failure has opened it."""
        with self._lock:
            was_open = self._open
            self._transfers += transfer
            self._lookups += not transfer
            if not self._open:
                return False
            if was_open:
                self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._closed_again = time.monotonic() + self._pause
            return not was_open

    @property
    def _open(self) -> bool:
        return self._lookups + self._transfers >= FAILURES_TO_OPEN
