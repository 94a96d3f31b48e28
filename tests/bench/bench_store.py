"""How fast is a local store? ``python tests/bench/bench_store.py [FOLDER]``.

Blocks of 64 tokens: the tiny test family (384 KiB) and the 14B shape (10 MiB). Reads are compared
with a plain `readinto` of the same files in the same run, page cache warm in both.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import block_key

REPEATS = 7
SHAPES = {"tiny family": (384 << 10, 512), "14B": (10 << 20, 32)}  # bytes a block, blocks
BATCH = 32


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best(work):
    return min(timed(work) for _ in range(REPEATS))


def expect(found, status):
    if {item if status in WriteStatus else item.status for item in found} != {status}:
        raise SystemExit(f"unexpected result: {found}")


def batches(requests):
    return [requests[at : at + BATCH] for at in range(0, len(requests), BATCH)]


def bench_shape(root, name, size, count):
    noise = np.random.default_rng(0).integers(0, 256, size + count, np.uint8)
    writes = [
        WriteRequest(BlockHeader(block_key(n), size), [memoryview(noise[n : n + size])])
        for n in range(count)
    ]
    memory = np.ones(size * BATCH, np.uint8)
    runs = [memoryview(memory[n * size : (n + 1) * size]) for n in range(BATCH)]
    reads = [ReadRequest(block_key(n), [runs[n % BATCH]]) for n in range(count)]
    with LocalStore(root, min_free_bytes=0) as store:
        seconds = timed(
            lambda: [expect(store.write(batch), WriteStatus.STORED) for batch in batches(writes)]
        )
        read = best(lambda: [expect(store.read(batch), ReadStatus.OK) for batch in batches(reads)])
        one = best(lambda: [expect(store.read([item]), ReadStatus.OK) for item in reads])
        plain = best(lambda: plain_readinto(root, runs))
    plain_seconds = timed(lambda: plain_write(root / "plain", writes))
    total = size * count / 1e9
    print(
        f"{name:12} write {total / seconds:5.2f} GB/s   "
        f"plain write {total / plain_seconds:5.2f} GB/s   read {total / read:5.2f} GB/s   "
        f"one at a time {total / one:5.2f} GB/s   plain readinto {total / plain:5.2f} GB/s"
    )


def plain_write(folder, writes):
    folder.mkdir()
    for number, request in enumerate(writes):
        with (folder / str(number)).open("wb", buffering=0) as file:
            file.write(request.payload[0])


def plain_readinto(root, runs):
    files = sorted(path for path in (root / "blocks").rglob("*.*"))
    for position, path in enumerate(files):
        with path.open("rb", buffering=0) as file:
            file.seek(4096)
            file.readinto(runs[position % BATCH])


def bench_exists(root):
    with LocalStore(root, min_free_bytes=0) as store:
        keys = [block_key(n) for n in range(10_000)]
        for at in range(0, len(keys), 1000):
            store.write(
                [WriteRequest(BlockHeader(k, 1), [memoryview(b"x")]) for k in keys[at : at + 1000]]
            )
        for count in (128, 512):
            asked = keys[1000 : 1000 + count]
            times = [timed(lambda asked=asked: store.exists(asked)) for _ in range(200)]
            print(
                f"exists({count}): median {statistics.median(times) * 1e3:.3f} ms, "
                f"worst {max(times) * 1e3:.3f} ms"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="a folder on the disk to measure")
    folder = Path(tempfile.mkdtemp(dir=parser.parse_args().folder))
    try:
        bench_exists(folder / "exists")
        for number, (name, (size, count)) in enumerate(SHAPES.items()):
            bench_shape(folder / str(number), name, size, count)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
