"""The store protocol over a driver: deadlines, validation, checksums, circuit breaker.

The driver works on memory of its own in threads of ours. So a call that runs out of time can be
abandoned: no late answer is ever written into a caller's buffer, no caller's buffer read late.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, TypeVar

from kvstore_xfer.blocks.header import encode, seal
from kvstore_xfer.blocks.key import is_key
from kvstore_xfer.errors import BlockFormatError, StoreError
from kvstore_xfer.store.base import (
    BlockStore,
    ReadResult,
    ReadStatus,
    StoreStats,
    WriteStatus,
)
from kvstore_xfer.store.deadline import in_force, within
from kvstore_xfer.store.frame import byte_runs, copy_runs, open_frame, plan_write
from kvstore_xfer.store.remote.breaker import Breaker
from kvstore_xfer.store.remote.driver import Frame, RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_xfer.store.base import BlockStat, ReadRequest, WriteRequest
    from kvstore_xfer.store.remote.driver import Driver, Fetched

T = TypeVar("T")
U = TypeVar("U")
_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 5.0
LOOKUP_SECONDS = 1.0  # at most, for what an engine's scheduler waits for
_LOOKS = 8
_WAVE_ITEMS = 64
_WAVE_BYTES = 256 << 20  # in flight at once, beside the callers' own memory


class _Link:
    """One connection to the engine, its threads, and the process that may use them."""

    def __init__(self, connect: Callable[[], Driver]) -> None:
        self.pid = os.getpid()
        self.driver = connect()
        self.parallel = self.driver.parallel
        self.pool = ThreadPoolExecutor(self.parallel, thread_name_prefix="kvxfer-remote")

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.driver.close()


class RemoteStore(BlockStore):
    """Blocks in an engine that `connect` reaches.

    `name` is shown in messages and holds no secret. A call takes at most `timeout` seconds, a
    lookup at most the smaller of it and one second, and none longer than its caller has time
    (`store/deadline.py`); what has not arrived by then is an ERROR, and False. Raises StoreError
    when the first connection fails.
    """

    def __init__(
        self,
        connect: Callable[[], Driver],
        name: str,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.name = name
        self._connect = connect
        self._timeout = timeout
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._corrupt = 0
        try:
            self._link: _Link | None = _Link(connect)
        except RemoteError as error:
            raise self._unreadable(error) from error

    @property
    def available(self) -> bool:
        """False while the circuit breaker keeps calls away from the engine."""
        return self._breaker.ready

    def exists(self, keys: Sequence[str]) -> list[bool]:
        keys = list(keys)
        asked = [n for n, key in enumerate(keys) if is_key(key)]
        found = [False] * len(keys)
        try:
            answers = self._look_up(
                lambda driver, part: driver.exists([keys[n] for n in part]), asked
            )
        except StoreError:
            return found
        for number, answer in zip(asked, answers, strict=True):
            found[number] = bool(answer)
        return found

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        requests = list(requests)
        results = [ReadResult(ReadStatus.MISSING)] * len(requests)
        asked = [n for n, request in enumerate(requests) if is_key(request.key)]
        with within(self._timeout):
            for wave in _waves([(n, _expected_bytes(requests[n])) for n in asked], lambda n: n):
                for n, answer in zip(wave, self._fetch([requests[n] for n in wave]), strict=True):
                    if answer is None:
                        results[n] = ReadResult(ReadStatus.ERROR)
                    elif answer[0] is not None:
                        results[n] = self._deliver(requests[n], answer[0])
        return results

    def write(
        self, requests: Sequence[WriteRequest], *, overwrite: bool = False
    ) -> list[WriteStatus]:
        requests = list(requests)
        statuses = [WriteStatus.ERROR] * len(requests)
        plans = [plan for n, r in enumerate(requests) if (plan := plan_write(n, r))]
        with within(self._timeout):
            if not overwrite:
                there = self.exists([plan.header.key for plan in plans])
                for plan, known in zip(plans, there, strict=True):
                    if known:
                        statuses[plan.position] = WriteStatus.EXISTS
            absent = [plan for plan in plans if statuses[plan.position] is WriteStatus.ERROR]
            for wave in _waves([(plan, plan.size) for plan in absent], lambda plan: plan.key):
                try:
                    answers = self._transfer(
                        lambda driver, part: driver.put(part, overwrite=overwrite),
                        [
                            Frame(
                                plan.header.key,
                                encode(seal(plan.header, plan.runs)),
                                b"".join(plan.runs),
                                plan.header.created,
                            )
                            for plan in wave
                        ],
                    )
                except StoreError:
                    break
                for plan, answer in zip(wave, answers, strict=True):
                    statuses[plan.position] = answer or WriteStatus.ERROR
        return statuses

    def delete(self, keys: Sequence[str]) -> list[bool]:
        keys = list(keys)
        try:
            return [bool(gone) for gone in self.try_delete(keys)]
        except StoreError:
            return [False] * len(keys)

    def try_delete(self, keys: Sequence[str]) -> list[bool | None]:
        """Like `delete`, with None where the engine did not answer. Raises StoreError."""
        keys = list(keys)
        results: list[bool | None] = [False] * len(keys)
        asked = [n for n, key in enumerate(keys) if is_key(key)]
        distinct = list({keys[n]: n for n in reversed(asked)}.values())
        answers = self._transfer(
            lambda driver, part: driver.remove([keys[n] for n in part]), distinct
        )
        for number, answer in zip(distinct, answers, strict=True):
            results[number] = answer
        return results

    def scan(self, prefix: str = "") -> Iterator[BlockStat]:
        try:
            driver = self._open.driver
            yield from sorted(driver.scan(prefix), key=lambda row: row.key)
        except RemoteError as error:
            raise self._unreadable(error) from error

    def stats(self) -> StoreStats:
        blocks = size = 0
        try:
            driver = self._open.driver
            for row in driver.scan(""):
                blocks += 1
                size += row.size
            capacity = driver.capacity()
        except RemoteError as error:
            raise self._unreadable(error) from error
        return StoreStats(blocks, size, capacity.bytes, capacity.evicted, self._corrupt)

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None and link.pid == os.getpid():
            link.close()

    @property
    def _open(self) -> _Link:
        link = self._link
        if link is not None and link.pid == os.getpid():
            return link
        with self._lock:
            if self._link is None:
                raise StoreError(f"store {self.name!r}: closed")
            if self._link.pid != os.getpid():  # forked: sockets and threads are the parent's
                self._link = _Link(self._connect)
            return self._link

    def _look_up(
        self, work: Callable[[Driver, list[T]], Sequence[U | None]], items: list[T]
    ) -> list[U | None]:
        limit = min(LOOKUP_SECONDS, self._timeout)
        return self._in_slices(work, items, limit, transfer=False)

    def _transfer(
        self, work: Callable[[Driver, list[T]], Sequence[U | None]], items: list[T]
    ) -> list[U | None]:
        return self._in_slices(work, items, self._timeout, transfer=True)

    def _in_slices(
        self,
        work: Callable[[Driver, list[T]], Sequence[U | None]],
        items: list[T],
        limit: float,
        *,
        transfer: bool,
    ) -> list[U | None]:
        """`work` for all items, shared among the threads; None for what failed or came late.

        Raises StoreError when the engine is not asked at all.
        """
        link = self._open
        if not items:
            return []
        caller = in_force()
        seconds = min(limit, caller.left, threading.TIMEOUT_MAX)
        if seconds <= 0 or not self._breaker.allows():
            caller.give_up()
            why = "no time was left" if seconds <= 0 else "it has failed too often"
            raise RemoteError(f"store {self.name!r}: not asked; {why}")
        deadline = time.monotonic() + seconds
        size = -(-len(items) // link.parallel)
        slices = [items[at : at + size] for at in range(0, len(items), size)]
        try:
            futures = [link.pool.submit(work, link.driver, part) for part in slices]
        except RuntimeError as error:  # the pool was shut down by another thread
            raise StoreError(f"store {self.name!r}: closed") from error
        answers: list[U | None] = []
        failure: Exception | None = None
        for future, part in zip(futures, slices, strict=True):
            found, late = _within(future, deadline)
            answers += [None] * len(part) if found is None else found
            failure = failure or late
        if failure is None:
            self._breaker.succeeded(transfer=transfer)
            return answers
        caller.give_up()
        # An engine that was given the rest of its caller's time only is not to blame.
        if isinstance(failure, RemoteError) or seconds >= min(limit, caller.seconds) / 2:
            self._blame(failure, transfer=transfer)
        return answers

    def _blame(self, failure: Exception, *, transfer: bool) -> None:
        if self._breaker.failed(transfer=transfer):
            reason = str(failure) or "no answer in time"
            _log.warning("store %s: %s; it is left alone for a while", self.name, reason)

    def _deliver(self, request: ReadRequest, fetched: Fetched) -> ReadResult:
        """Verified bytes into the caller's memory.

        An engine may overwrite in place: bytes that fail are read again, and are damage only when
        they have not changed meanwhile.
        """
        for _ in range(_LOOKS):
            try:
                header, runs = open_frame(request.key, fetched.parts)
                break
            except BlockFormatError:
                (again,) = self._fetch([request])
            if again is None:
                return ReadResult(ReadStatus.ERROR)
            if again[0] is None or again[0].version == fetched.version:
                return self._condemn(request.key, fetched)
            fetched = again[0]
        else:
            return ReadResult(ReadStatus.ERROR)
        if request.destination is None:
            return ReadResult(ReadStatus.OK, header, b"".join(runs))
        try:
            target = byte_runs(request.destination)
            if sum(map(len, target)) != header.payload_bytes:
                return ReadResult(ReadStatus.MISMATCH, header)
            copy_runs(runs, target)
        except (BufferError, TypeError, ValueError):
            return ReadResult(ReadStatus.ERROR)
        return ReadResult(ReadStatus.OK, header)

    def _fetch(self, requests: list[ReadRequest]) -> Sequence[tuple[Fetched | None] | None]:
        """For each a one-tuple of what is stored, None where the engine did not answer."""
        try:
            return self._transfer(
                lambda driver, part: [
                    (item,) for item in driver.fetch([request.key for request in part])
                ],
                requests,
            )
        except StoreError:
            return [None] * len(requests)

    def _condemn(self, key: str, fetched: Fetched) -> ReadResult:
        with self._lock:
            self._corrupt += 1

        def remove(driver: Driver, part: list[str]) -> list[bool]:
            driver.remove_version(part[0], fetched.version)
            return [True]

        try:
            self._transfer(remove, [key])
        except StoreError as error:
            _log.warning("store %s: cannot remove a damaged block: %s", self.name, error)
        return ReadResult(ReadStatus.CORRUPT)

    def _unreadable(self, error: RemoteError) -> StoreError:
        return StoreError(f"store {self.name!r}: {error}; check that it runs and can be reached")


def _within(
    future: Future[Sequence[U | None]], deadline: float
) -> tuple[Sequence[U | None] | None, Exception | None]:
    """The result, or why there is none by the deadline."""
    try:
        return future.result(max(0.0, deadline - time.monotonic())), None
    except (RemoteError, FutureTimeoutError) as error:
        future.cancel()
        return None, error


def _expected_bytes(request: ReadRequest) -> int:
    return sum(memoryview(run).nbytes for run in request.destination or ())


def _waves(sized: Sequence[tuple[T, int]], name: Callable[[T], object]) -> Iterator[list[T]]:
    """Runs of items that are in flight together: memory stays bounded, no name occurs twice."""
    wave: list[T] = []
    names: set[object] = set()
    total = 0
    for item, size in sized:
        full = total + size > _WAVE_BYTES or len(wave) == _WAVE_ITEMS
        if wave and (full or name(item) in names):
            yield wave
            wave, names, total = [], set(), 0
        wave.append(item)
        names.add(name(item))
        total += size
    if wave:
        yield wave
