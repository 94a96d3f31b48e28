"""Writes that nobody waits for: derived blocks go to the store behind a bounded queue."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.05


def _run(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:  # noqa: BLE001 - one failed write must not end the thread
        _log.exception("a queued write failed")


class BackgroundWriter:
    """One thread that runs queued jobs in order; a full queue refuses, it never blocks.

    Jobs must not raise; one that does is logged and dropped.
    """

    def __init__(self, capacity: int) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(capacity)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvxfer-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job; False when the queue is full or closed, and the job is not kept."""
        if self._closed.is_set():
            return False
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return False
        return True

    def drain(self) -> None:
        """Return when everything queued before this call is done."""
        done = threading.Event()
        while not self._closed.is_set():
            try:
                self._queue.put(done.set, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            break
        # The thread may end before it comes to our job, when another thread closes meanwhile.
        while self._thread.is_alive() and not done.wait(_POLL_SECONDS):
            pass

    def close(self) -> None:
        """Refuse new jobs, finish the queued ones, stop the thread. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            _run(job)
        while not self._queue.empty():  # submitted by another thread while we were being closed
            late = self._queue.get()
            if late is not None:
                _run(late)
