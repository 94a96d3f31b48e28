"""A circuit breaker: an engine that does not answer is left alone for a while."""

from __future__ import annotations

import threading
import time

FAILURES_TO_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 10.0


class Breaker:
    """Closed: calls pass. Open, after some failures in a row: none passes until the pause is over,
    then one is let through as a probe; if it fails, the next pause is twice as long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._closed_again = 0.0

    @property
    def ready(self) -> bool:
        """Whether a call would be allowed now."""
        return self._failures < FAILURES_TO_OPEN or time.monotonic() >= self._closed_again

    def allows(self) -> bool:
        """Whether a call may be made now; a probe takes the place of the pause."""
        with self._lock:
            if self._failures < FAILURES_TO_OPEN:
                return True
            now = time.monotonic()
            if now < self._closed_again:
                return False
            self._closed_again = now + self._pause
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._pause = FIRST_PAUSE_SECONDS

    def failed(self) -> bool:
        """True when this failure has opened it."""
        with self._lock:
            self._failures += 1
            if self._failures < FAILURES_TO_OPEN:
                return False
            if self._failures > FAILURES_TO_OPEN:
                self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._closed_again = time.monotonic() + self._pause
            return self._failures == FAILURES_TO_OPEN
