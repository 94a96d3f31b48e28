"""Tasks that LMCache submits and polls: each is completed exactly once, in bounded time.

LMCache waits for a completion without a limit of its own, and takes the memory of a task's objects
back when it has it. So a task that takes too long is completed as failed, and from that moment its
work can no longer touch the objects: it does so only while it holds the task's lease.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

from kvstore_xfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)
_CLOSE_SECONDS = 5.0
_ids = itertools.count()  # unique over all kinds, so that no answer is taken for another's

T = TypeVar("T")


class ExpiredError(KvxferError, TimeoutError):
    """The task was completed as failed before its work came to use its objects."""


class Lease:
    """The right to touch a task's objects. Ends when the task is completed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the short time of a copy. Raises ExpiredError when the lease is over."""
        with self._lock:
            if self._over:
                raise ExpiredError("the task was given up; its objects are LMCache's again")
            yield

    def end(self) -> None:
        """Waits for a copy in progress."""
        with self._lock:
            self._over = True


@dataclass(frozen=True)
class _Task(Generic[T]):
    number: int
    run: Callable[[Lease], T]
    failed: T
    lease: Lease = field(default_factory=Lease)


class Lane(Generic[T]):
    """Runs the tasks of one kind on a few threads; completed ones wait to be taken.

    `count` is told of every task that was not completed by its own work: ``"timeout"``,
    ``"overload"`` (all threads are held up by tasks that were given up), ``"error"``.
    """

    def __init__(
        self, kind: str, threads: int, seconds: float, count: Callable[[str], None]
    ) -> None:
        self._seconds, self._threads, self._count = seconds, threads, count
        self._notifier = create_event_notifier()
        self._queue: SimpleQueue[_Task[T] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._open: dict[int, _Task[T]] = {}
        self._due: deque[tuple[float, int]] = deque()  # in order: all have the same time
        self._done: dict[int, T] = {}
        self._running: set[int] = set()
        self._closed = False
        # Daemons: a store that never answers must not keep the server from ending.
        self._workers = [
            threading.Thread(target=self._work, name=f"kvxfer-{kind}-{number}", daemon=True)
            for number in range(threads)
        ]
        self._watch = threading.Thread(
            target=self._expire, name=f"kvxfer-{kind}-watch", daemon=True
        )
        for thread in (*self._workers, self._watch):
            thread.start()

    @property
    def fd(self) -> int:
        """Readable after a completion."""
        return int(self._notifier.fileno())

    def submit(self, run: Callable[[Lease], T], failed: T) -> int:
        """Queue a task and return its number; never blocks. `failed` is its result in need."""
        task = _Task(next(_ids), run, failed)
        with self._changed:
            held_up = len(self._running - self._open.keys()) >= self._threads
            refused = self._closed or held_up
            self._open[task.number] = task
            if not refused:
                self._due.append((time.monotonic() + self._seconds, task.number))
                self._queue.put(task)
                self._changed.notify_all()
        if refused:
            self._give_up(task, "overload")
        return task.number

    def take(self, number: int) -> T | None:
        """The result of a completed task, once."""
        with self._changed:
            return self._done.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """The results of all completed tasks, once."""
        with self._changed:
            done, self._done = self._done, {}
            return done

    @property
    def waiting(self) -> int:
        with self._changed:
            return len(self._open)

    def close(self) -> None:
        """Complete what is left, as failed where the work takes longer than a moment."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for _ in self._workers:
            self._queue.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in (*self._workers, self._watch):
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            left = list(self._open.values())
        for task in left:
            self._give_up(task, "timeout")
        with self._changed:
            self._notifier.close()

    def _complete(self, task: _Task[T], result: T) -> bool:
        task.lease.end()
        with self._changed:
            if self._open.pop(task.number, None) is None:
                return False
            self._done[task.number] = result
            self._notifier.notify()
        return True

    def _give_up(self, task: _Task[T], why: str) -> None:
        if self._complete(task, task.failed):
            self._count(why)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            with self._changed:
                if task.number not in self._open:
                    continue  # given up while it waited in the queue
                self._running.add(task.number)
            self._complete(task, self._result(task))
            with self._changed:
                self._running.discard(task.number)

    def _result(self, task: _Task[T]) -> T:
        try:
            return task.run(task.lease)
        except ExpiredError:
            return task.failed
        except Exception:  # noqa: BLE001 - a lost task would hold its request for ever
            _log.exception("kvxfer: a task failed; answered as a miss")
            self._count("error")
            return task.failed

    def _expire(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                left = self._due[0][0] - time.monotonic() if self._due else None
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                task = self._open.get(self._due.popleft()[1])
            if task is not None:
                self._give_up(task, "timeout")
