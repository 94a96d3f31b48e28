"""What a local store's block costs by stages: plain file, checksum, header, index, all together.

    python tests/bench/bench_store_stages.py [--folder DIR] [--rounds N]

Prints processor time of all threads, in microseconds a block, page cache warm: unlike wall time it
hardly depends on what else the machine does. Stages are measured in turns; medians of the rounds.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore_xfer.blocks.header import BlockHeader, decode, encode, payload_checksum, seal
from kvstore_xfer.blocks.key import BlockKey
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.local.index import Entry

SHAPES = {"384 KiB": (384 << 10, 128), "10 MiB": (10 << 20, 32)}


class Stages:
    def __init__(self, root, size, count):
        self.root, self.size = root, size
        noise = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
        self.sources = [memoryview(row) for row in noise]
        self.targets = [memoryview(row) for row in np.ones((count, size), np.uint8)]
        self.keys = [
            str(BlockKey("bench", "h0-2.l0-4", "native", f"{n:064x}")) for n in range(count)
        ]
        self.headers = [BlockHeader(key, size) for key in self.keys]
        self.store = LocalStore(root / "store", min_free_bytes=0)
        self.index_only = LocalStore(root / "index-only", min_free_bytes=0)
        (root / "plain").mkdir()
        self.write_store()
        self.files = sorted((root / "store" / "blocks").rglob("*.*"))
        self.heads = [path.open("rb").read(4096) for path in self.files]

    def write_plain(self):
        for number, source in enumerate(self.sources):
            with open(self.root / "plain" / str(number), "wb", buffering=0) as file:
                file.write(source)

    def write_checksum(self):
        for source in self.sources:
            payload_checksum([source])

    def write_header(self):
        for header in self.headers:
            encode(seal(header, [memoryview(b"")]))

    def write_index(self):
        def work(rows):
            for number, key in enumerate(self.keys):
                rows.put(key.encode(), Entry(number, 4096, self.size, 0.0, time.time_ns()))

        self.index_only._folder.update(work)

    def write_store(self):
        requests = [
            WriteRequest(*item)
            for item in zip(self.headers, ([s] for s in self.sources), strict=True)
        ]
        assert set(self.store.write(requests)) == {WriteStatus.STORED}

    def read_plain(self):
        for path, target in zip(self.files, self.targets, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.seek(4096)
                file.readinto(target)

    def read_checksum(self):
        for path, target in zip(self.files, self.targets, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.seek(4096)
                file.readinto(target)
            payload_checksum([target])

    def read_header(self):
        for head in self.heads:
            decode(head)

    def read_index(self):
        self.store._folder.query(lambda index: index.entries(self.keys))

    def read_store(self):
        requests = [
            ReadRequest(key, [target]) for key, target in zip(self.keys, self.targets, strict=True)
        ]
        assert {result.status for result in self.store.read(requests)} == {ReadStatus.OK}

    def clear(self):
        self.store.delete(self.keys)
        self.index_only.delete(self.keys)
        for path in (self.root / "plain").iterdir():
            path.unlink()
        os.sync()


READING = {
    "plain readinto of the same files": Stages.read_plain,
    "and a checksum of each block": Stages.read_checksum,
    "header alone": Stages.read_header,
    "index alone": Stages.read_index,
    "this store": Stages.read_store,
}
WRITING = {
    "plain files": Stages.write_plain,
    "checksum alone": Stages.write_checksum,
    "header alone": Stages.write_header,
    "index alone, with its flush": Stages.write_index,
    "this store": Stages.write_store,
}


def cpu_seconds(work, stages):
    start = time.process_time()
    work(stages)
    return time.process_time() - start


def measure(stages, works, rounds, prepare):
    """Median processor time of each, one entry a stage."""
    taken = {name: [] for name in works}
    for number in range(rounds + 1):
        prepare()
        for name, work in works.items():
            seconds = cpu_seconds(work, stages)
            if number:  # the first round warms up
                taken[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = {}
    for size, count in SHAPES.values():
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            stages = Stages(Path(folder), size, count)
            for what, works, prepare in (
                ("read", READING, lambda: None),
                ("write", WRITING, stages.clear),
            ):
                found = measure(stages, works, args.rounds, prepare)
                for name, seconds in found.items():
                    rows.setdefault((what, name), []).append(1e6 * seconds / count)
            stages.store.close()
            stages.index_only.close()
    print(f"| microseconds a block | {' | '.join(SHAPES)} |\n|---|---|---|")
    for (what, name), figures in rows.items():
        print(f"| {what}: {name} | {' | '.join(f'{figure:.1f}' for figure in figures)} |")


if __name__ == "__main__":
    main()
