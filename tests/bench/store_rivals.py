"""One participant of the store benchmark, in a process and an environment of its own.

    python store_rivals.py NAME FOLDER

Reads commands, one a line, and answers each with the seconds that it took: ``open SIZE COUNT``
opens a store for blocks of that size, ``write N`` writes COUNT blocks under names of round N,
``read N`` reads them, ``drop N`` removes them. Everybody writes from and reads into as many buffers
and gets its blocks in batches of at most 128, as from SGLang's cache controller.
"""

import asyncio
import os
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

BATCH = 128


class Plain:
    """Files written in one go, and a `readinto` of the files of our own store."""

    def __init__(self, folder, size):
        self.folder, self.size = folder, size
        folder.mkdir()

    def write(self, names, sources):
        for name, source in zip(names, sources, strict=True):
            with open(self.folder / name, "wb", buffering=0) as file:
                file.write(source)

    def prepare(self, names):
        found = (self.folder.parent / "ours" / "blocks").rglob("*.*")
        self.files = dict(zip(names, sorted(found), strict=True))

    def read(self, names, targets):
        for name, target in zip(names, targets, strict=True):
            with open(self.files[name], "rb", buffering=0) as file:
                file.seek(-self.size, os.SEEK_END)
                assert file.readinto(target) == self.size

    def drop(self, names):
        for name in names:
            (self.folder / name).unlink()


class Ours:
    def __init__(self, folder, size):
        from kvstore_xfer.blocks.header import BlockHeader
        from kvstore_xfer.blocks.key import BlockKey
        from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
        from kvstore_xfer.store.local import LocalStore

        self.store = LocalStore(folder, min_free_bytes=0)

        @cache
        def key(name):
            return str(BlockKey("bench", "h0-2.l0-4", "native", f"{int(name):064x}"))

        def write(names, sources):
            requests = [
                WriteRequest(BlockHeader(key(name), size), [memoryview(source)])
                for name, source in zip(names, sources, strict=True)
            ]
            assert set(self.store.write(requests)) == {WriteStatus.STORED}

        def read(names, targets):
            requests = [
                ReadRequest(key(name), [memoryview(target)])
                for name, target in zip(names, targets, strict=True)
            ]
            assert {result.status for result in self.store.read(requests)} == {ReadStatus.OK}

        self.write, self.read, self.name = write, read, key

    def drop(self, names):
        self.store.delete([self.name(name) for name in names])


class HiCacheFile:
    """SGLang's storage backend for files."""

    def __init__(self, folder, size):
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "bench")
        self.folder, self.store = folder, HiCacheFile(config, str(folder))
        self.tensor = torch.from_numpy

    def write(self, names, sources):
        assert self.store.batch_set(names, [self.tensor(source) for source in sources])

    def read(self, names, targets):
        found = self.store.batch_get(names, [self.tensor(target) for target in targets])
        assert all(tensor is not None for tensor in found)

    def drop(self, names):
        del names
        for path in self.folder.iterdir():
            path.unlink()


class LMCache:
    """LMCache's backend for a local disk as its storage manager calls it: batches, four threads.

    It moves its own memory only, so blocks are copied into it before and out of it after the time.
    """

    def __init__(self, folder, size):
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False, local_disk=str(folder), max_local_disk_size=50.0
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        buffers = min(BATCH, 1 + (640 << 20) // size)
        allocator = HostMemoryAllocator(2 * buffers * size)
        self.memory = LocalCPUBackend(config, dst_device="cpu", memory_allocator=allocator)
        self.disk = LocalDiskBackend(config, loop, self.memory, dst_device="cpu")
        self.found = []
        self.name = cache(lambda name: CacheEngineKey("bench", 1, 0, int(name), torch.uint8))

    def load(self, sources):
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        shape, form = torch.Size([sources[0].size]), MemoryFormat.BINARY_BUFFER
        self.blocks = [self.memory.allocate(shape, torch.uint8, form) for _ in sources]
        for block, source in zip(self.blocks, sources, strict=True):
            as_bytes(block)[:] = source

    def write(self, names, sources):
        del sources
        left, done = iter(range(len(names) - 1, -1, -1)), threading.Event()

        def one_done(_):
            if next(left) == 0:
                done.set()

        keys = [self.name(name) for name in names]
        self.disk.batched_submit_put_task(keys, self.blocks, None, one_done)
        assert done.wait(60)

    def read(self, names, targets):
        del targets
        for block in self.found:
            block.ref_count_down()
        self.found = self.disk.batched_get_blocking([self.name(name) for name in names])

    def deliver(self, targets):
        for target, block in zip(targets, self.found, strict=True):
            target[:] = as_bytes(block)

    def drop(self, names):
        for name in names:
            self.disk.remove(self.name(name))

    def close(self):
        self.disk.close()


class LMCacheFiles:
    """Only the two functions of that backend that write and read a file: no lookup, no keys."""

    def __init__(self, folder, size):
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        folder.mkdir()
        self.folder, self.backend = folder, LocalDiskBackend
        self.bare = SimpleNamespace(os_disk_bs=4096, use_odirect=False, dict={})

    def write(self, names, sources):
        for name, source in zip(names, sources, strict=True):
            self.backend.write_file(self.bare, memoryview(source), self.folder / name)

    def read(self, names, targets):
        for name, target in zip(names, targets, strict=True):
            self.backend.read_file(self.bare, name, memoryview(target), self.folder / name)

    def drop(self, names):
        for name in names:
            (self.folder / name).unlink()


RIVALS = {
    "ours": Ours,
    "plain": Plain,
    "hicache": HiCacheFile,
    "lmcache": LMCache,
    "lmcache-files": LMCacheFiles,
}


def as_bytes(block):
    return np.frombuffer(block.byte_array, np.uint8)


def serve(name, folder):
    """One shape after the other, each opened by a line ``open SIZE COUNT``."""
    store = None
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "open":
            size, count = map(int, numbers)
            close(store)
            store = RIVALS[name](folder / str(size) / name, size)
            shape = (min(BATCH, count), size)
            sources = list(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
            targets = list(np.ones(shape, np.uint8))
            if hasattr(store, "load"):
                store.load(sources)
            print("seconds 0", flush=True)
            continue
        names = [f"{int(numbers[0]) * count + n}" for n in range(count)]
        print("seconds", do(store, what, names, sources, targets), flush=True)
    close(store)


def close(store):
    if hasattr(store, "close"):
        store.close()


def do(store, what, names, sources, targets):
    if what == "drop":
        store.drop(names)
        return 0.0
    if what == "read" and hasattr(store, "prepare"):
        store.prepare(names)
    if hasattr(store, "name"):  # an engine has the names before it asks
        for name in names:
            store.name(name)
    if what == "write":
        return timed(store.write, names, sources)
    timed(store.read, names, targets)  # warms the caches of everybody alike
    seconds = timed(store.read, names, targets)
    verify(store, sources, targets)
    return seconds


def timed(work, names, buffers):
    start = time.perf_counter()
    for at in range(0, len(names), len(buffers)):
        work(names[at : at + len(buffers)], buffers)
    return time.perf_counter() - start


def verify(store, sources, targets):
    if hasattr(store, "deliver"):
        store.deliver(targets)
    # `Plain` reads the files of our store in the order of their names, not of the blocks.
    if not isinstance(store, Plain):
        assert all(np.array_equal(*pair) for pair in zip(sources, targets, strict=True))
    for target in targets:
        target[:] = 1


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
