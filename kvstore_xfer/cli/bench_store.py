"""``kvxfer bench store``: how fast is a local store on this disk?

Blocks of 64 tokens: a small model's (384 KiB) and the 14B shape's (10 MiB), written and read
through the store, beside plain writes and a plain `readinto` of the same files, page cache warm in
both. Then an index of many blocks: opening it, also as a crash leaves it, and asking for 512 keys.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.blocks.key import BlockKey
from kvstore_xfer.errors import ConfigError, StoreError
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.local.index import Entry

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvstore_xfer.store.local.index import Rows

SHAPES = {"small": (384 << 10, 512), "14B": (10 << 20, 32)}  # bytes a block, blocks
_REPEATS = 7
_BATCH = 32
_ROWS = 20_000


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench store``."""
    parser = subparsers.add_parser("store", help="a local store on this disk, beside plain files")
    parser.add_argument("folder", nargs="?", help="an existing folder on the disk to measure")
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="size of the index (default 1,000,000)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a folder or a number that makes no sense."""
    if args.blocks < 1024:
        raise ConfigError(f"--blocks {args.blocks}: give at least 1024")
    if args.folder is not None and not Path(args.folder).is_dir():
        raise ConfigError(f"{args.folder}: no such folder; name one on the disk to measure")
    root = Path(tempfile.mkdtemp(dir=args.folder, prefix="kvxfer-bench-"))
    try:
        for name, (size, count) in SHAPES.items():
            figures = bench_shape(root / name, size, count)
            text = "   ".join(f"{what} {rate:5.2f} GB/s" for what, rate in figures.items())
            sys.stdout.write(f"{name:6} {text}\n")
        opening, crashed, asking = bench_index(root / "index-only", args.blocks)
        sys.stdout.write(
            f"{args.blocks} blocks indexed: opened in {opening:.2f} s, after a crash in "
            f"{crashed:.2f} s, exists(512) median {1e3 * asking:.3f} ms\n"
        )
    finally:
        shutil.rmtree(root)
    return 0


def bench_shape(root: Path, size: int, count: int) -> dict[str, float]:
    """GB/s of writing, reading in batches, reading one by one, and of plain files."""
    noise = np.random.default_rng(0).integers(0, 256, size + count, np.uint8)
    noise_bytes = memoryview(noise.tobytes())
    writes = [
        WriteRequest(BlockHeader(_key(n), size), [noise_bytes[n : n + size]]) for n in range(count)
    ]
    memory = memoryview(bytearray(size * _BATCH))
    runs = [memory[n * size : (n + 1) * size] for n in range(_BATCH)]
    reads = [ReadRequest(_key(n), [runs[n % _BATCH]]) for n in range(count)]

    def read_all(step: int) -> None:
        for at in range(0, count, step):
            if any(r.status is not ReadStatus.OK for r in store.read(reads[at : at + step])):
                raise StoreError(f"store {root}: a block just written could not be read")

    def write_all() -> None:
        for at in range(0, count, _BATCH):
            if set(store.write(writes[at : at + _BATCH])) != {WriteStatus.STORED}:
                raise StoreError(f"store {root}: a block could not be written; check free space")

    with LocalStore(root, min_free_bytes=0) as store:
        seconds = {"write": _timed(write_all)}
        files = sorted((root / "blocks").rglob("*.*"))
        seconds["plain write"] = _timed(lambda: _plain_write(root / "plain", writes))
        seconds["read"] = _best(lambda: read_all(_BATCH))
        seconds["read one by one"] = _best(lambda: read_all(1))
        seconds["plain readinto"] = _best(lambda: _plain_readinto(files, runs))
    return {what: size * count / 1e9 / taken for what, taken in seconds.items()}


def bench_index(root: Path, blocks: int) -> tuple[float, float, float]:
    """Seconds to open an index of so many blocks, to open one that nobody has closed, and of an
    `exists` of 512 keys (median)."""
    with LocalStore(root, min_free_bytes=0) as store:
        for start in range(0, blocks, _ROWS):
            _fill(store, range(start, min(blocks, start + _ROWS)))
    opening = _timed_opening(root)
    (root / "index" / "digest").unlink()  # written by the last user when it closes
    crashed = _timed_opening(root)
    with LocalStore(root, min_free_bytes=0) as store:
        asked = [_key(n * (blocks // 1024)) for n in range(512)]
        if not all(store.exists(asked)):
            raise StoreError(f"store {root}: the index lost blocks")
        asking = statistics.median(_timed(lambda: store.exists(asked)) for _ in range(50))
    return opening, crashed, asking


def _timed_opening(root: Path) -> float:
    started = time.perf_counter()
    with LocalStore(root, min_free_bytes=0):
        return time.perf_counter() - started


def _fill(store: LocalStore, numbers: range) -> None:
    """Rows without files: files take hours, and a lookup does not look at them."""

    def work(rows: Rows) -> None:
        for n in numbers:
            rows.put(_key(n).encode(), Entry(n, 4096, 10 << 20, 0.0, time.time_ns()))

    store._folder.update(work)


def _key(number: int) -> str:
    return str(BlockKey("bench", "h0-2.l0-4", "native", f"{number:064x}"))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _best(work: Callable[[], object]) -> float:
    return min(_timed(work) for _ in range(_REPEATS))


def _plain_write(folder: Path, writes: list[WriteRequest]) -> None:
    folder.mkdir()
    for number, request in enumerate(writes):
        with (folder / str(number)).open("wb", buffering=0) as file:
            file.write(request.payload[0])


def _plain_readinto(files: list[Path], runs: list[memoryview]) -> None:
    for position, path in enumerate(files):
        with path.open("rb", buffering=0) as file:
            file.seek(4096)
            file.readinto(runs[position % _BATCH])
