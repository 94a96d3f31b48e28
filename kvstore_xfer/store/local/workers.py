"""Threads that move blocks, each at home on processors of its own.

Left to itself the kernel may put a thread that wakes up beside the one that woke it, on one
processor, and leave both there for longer than a batch takes: two threads are then no faster than
one, most often after a pause, which is how engines read.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from kvstore_xfer.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

T = TypeVar("T")
U = TypeVar("U")

_THREADS = 4
_SMALL_BYTES = 1 << 20
_SMALL_THREADS = 2
_ALONE_BYTES = 16 << 20


class Workers:
    """A few threads for the batches of all callers.

    They run on the processors that the thread which makes this may use, shared out among them.
    `owner` is named by the error.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        processors = sorted(os.sched_getaffinity(0))
        shares = [processors[n % len(processors) :: _THREADS] for n in range(_THREADS)]
        self._threads = [
            ThreadPoolExecutor(1, "kvxfer-store", initializer=_settle, initargs=(share,))
            for share in shares
        ]
        self._batches = count()

    def map(
        self, work: Callable[[T], U], items: list[T], sizes: Sequence[int] | None = None
    ) -> list[U]:
        """`work` for each item of so many bytes, several at once; returns when all are done.

        Small items get two threads: more wait for the interpreter and not for the disk. A few
        small ones the caller does alone: while an engine keeps the interpreter busy, handing over
        takes longer than the work. Raises StoreError after `shutdown`.
        """
        threads = min(len(items), _THREADS)
        if sizes is not None and max(sizes, default=0) < _SMALL_BYTES:
            threads = 1 if sum(sizes) <= _ALONE_BYTES else _SMALL_THREADS
        if threads < 2:
            return [work(item) for item in items]
        todo = deque(enumerate(items))
        results: dict[int, U] = {}

        def take() -> None:
            while True:
                try:
                    position, item = todo.popleft()
                except IndexError:
                    return
                results[position] = work(item)

        first = next(self._batches) * threads  # batches of several callers take turns
        chosen = [self._threads[(first + n) % _THREADS] for n in range(threads)]
        working: list[Future[None]] = []
        try:
            working.extend(thread.submit(take) for thread in chosen)
            wait(working)
        except BaseException as error:
            todo.clear()
            wait(working)  # none may touch the caller's memory afterwards
            if isinstance(error, RuntimeError):  # shut down by another thread
                raise StoreError(f"{self._owner}: closed") from error
            raise
        for future in working:
            future.result()
        return [results[position] for position in range(len(items))]

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def _settle(processors: list[int]) -> None:
    with suppress(OSError):  # refused in some sandboxes: it goes without
        os.sched_setaffinity(0, processors)
