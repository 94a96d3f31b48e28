"""Several folders, usually one a disk, as one store: each block has one home among them.

The home is found by rendezvous hashing over the folders' positions: adding a folder at the end
moves only the share of blocks that belong there. A disk that fails costs its own blocks. Large
batches use all disks at once; of small ones the threads would cost more than they gain.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

import xxhash

from kvstore_xfer.store.base import BlockStore, ReadResult, ReadStatus, StoreStats, WriteStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_xfer.store.base import BlockStat, ReadRequest, WriteRequest

_TOGETHER_BYTES = 16 << 20  # of a batch
T = TypeVar("T")
U = TypeVar("U")


class StripedStore(BlockStore):
    """`stores` in the order that decides homes; they are closed with this one."""

    def __init__(self, stores: Sequence[BlockStore]) -> None:
        self._stores = list(stores)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self._each(list(keys), str, lambda store, part: store.exists(part), default=False)

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        missing = ReadResult(ReadStatus.MISSING)
        return self._each(
            list(requests),
            lambda request: request.key,
            lambda store, part: store.read(part),
            default=missing,
            size=lambda request: _bytes(request.destination or ()),
        )

    def write(
        self, requests: Sequence[WriteRequest], *, overwrite: bool = False
    ) -> list[WriteStatus]:
        return self._each(
            list(requests),
            lambda request: request.header.key,
            lambda store, part: store.write(part, overwrite=overwrite),
            default=WriteStatus.ERROR,
            size=lambda request: _bytes(request.payload),
        )

    def delete(self, keys: Sequence[str]) -> list[bool]:
        return self._each(list(keys), str, lambda store, part: store.delete(part), default=False)

    def pin(self, keys: Sequence[str], seconds: float) -> bool:
        pinned = [store.pin(keys, seconds) for store in self._stores]
        return all(pinned)

    def compact(self) -> tuple[int, int]:
        sizes = [part.compact() for part in self._stores]
        return sum(before for before, _ in sizes), sum(after for _, after in sizes)

    def repair(self) -> bool:
        repaired = [part.repair() for part in self._stores]
        return any(repaired)

    def scan(self, prefix: str = "") -> Iterator[BlockStat]:
        rows = [store.scan(prefix) for store in self._stores]
        yield from heapq.merge(*rows, key=lambda row: row.key)

    def stats(self) -> StoreStats:
        parts = [store.stats() for store in self._stores]
        capacities = [part.capacity_bytes for part in parts]
        oldest = [part.oldest_use for part in parts if part.oldest_use is not None]
        return StoreStats(
            blocks=sum(part.blocks for part in parts),
            bytes=sum(part.bytes for part in parts),
            capacity_bytes=sum(c for c in capacities if c is not None) if all(capacities) else None,
            evicted_blocks=sum(part.evicted_blocks for part in parts),
            corrupt_blocks=sum(part.corrupt_blocks for part in parts),
            oldest_use=min(oldest, default=None),
        )

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _home(self, key: str) -> int:
        raw = key.encode("utf-8", "surrogatepass")
        weights = [xxhash.xxh3_64_intdigest(raw, seed) for seed in range(len(self._stores))]
        return weights.index(max(weights))

    def _each(
        self,
        items: list[T],
        key: Callable[[T], str],
        work: Callable[[BlockStore, list[T]], list[U]],
        default: U,
        size: Callable[[T], int] = lambda item: 0,
    ) -> list[U]:
        homes: dict[int, list[int]] = defaultdict(list)
        for number, item in enumerate(items):
            homes[self._home(key(item))].append(number)
        results = [default] * len(items)

        def do(home: int) -> None:
            numbers = homes[home]
            answers = work(self._stores[home], [items[n] for n in numbers])
            for number, answer in zip(numbers, answers, strict=True):
                results[number] = answer

        if len(homes) > 1 and sum(map(size, items)) >= _TOGETHER_BYTES:
            _all_at_once(do, list(homes))
        else:
            for home in homes:
                do(home)
        return results


def _bytes(runs: Sequence[memoryview]) -> int:
    return sum(memoryview(run).nbytes for run in runs)


def _all_at_once(do: Callable[[int], None], homes: list[int]) -> None:
    """One on this thread. Threads are made anew: kept ones would not outlive a fork."""
    others = [threading.Thread(target=do, args=(home,)) for home in homes[1:]]
    for thread in others:
        thread.start()
    try:
        do(homes[0])
    finally:
        for thread in others:
            thread.join()  # none may touch the caller's memory afterwards
