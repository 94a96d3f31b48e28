"""Hostile bytes for the block decoder, the manifest, the store URL and the index.

    python tests/store/fuzz.py --seconds 600    # make fuzz

Inputs are valid ones with bytes changed, cut, doubled and swapped. What may come back is a value,
or one of our own errors in one line; nothing may be allocated beyond `MEMORY_BYTES`, and nothing
may appear outside the store's folder.
"""

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import yaml

from kvstore_xfer.blocks.header import BlockHeader, Provenance, decode, encode, header_bytes, seal
from kvstore_xfer.errors import KvxferError
from kvstore_xfer.family import load_family
from kvstore_xfer.store.base import ReadRequest, ReadStatus
from kvstore_xfer.store.frame import open_frame
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import block_bytes, block_key, put
from kvstore_xfer.store.url import check_url

MEMORY_BYTES = 512 << 20  # beyond what the process takes at the start
URLS = [
    "local:///var/lib/kvxfer?max_size=50GiB&min_free=1GiB&more=/mnt/b:/mnt/c",
    "valkeys://user@host:6379,other:6380/0?prefix=p&ttl=24h&timeout=2s&cluster=yes&ca=/x",
    "s3://bucket/prefix?endpoint=https://host&region=r&timeout=5s&part_size=64MiB",
    "mooncake://master:50051?segment=1GiB&protocol=tcp&metadata=http://h/m",
    "memory:?max_size=1GiB&name=a|local:///x|valkey://h",
]
MANIFEST = """family: qwen3
store: [memory:, 'local:///var/lib/kvxfer?max_size=200GiB']
models: {small: {path: a}, large: {path: b, revision: c}}
pairs:
  - {source: small, target: large, mapper: m, policy: {min_tokens: 256, budget_seconds: 2.0}}
metrics: {port: 9000}
"""


def mutate(chance, raw):
    raw = bytearray(raw)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        at = chance.randrange(len(raw) + 1)
        kind = chance.randrange(6)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            raw[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
        elif kind == 2:
            del raw[at : at + chance.randrange(64)]
        elif kind == 3:
            raw[at:at] = raw[: chance.randrange(64)]
        elif kind == 4:
            raw[at : at + 8] = chance.choice([b"\xff" * 8, bytes(8), b"../../..", b"9" * 20])
        elif kind == 5 and at < len(raw):
            raw = raw[:at]
        raw = raw or bytearray(b"\0")
    return bytes(raw)


def guarded(call, *arguments):
    """The result, or None after one of our errors."""
    try:
        return call(*arguments)
    except KvxferError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than one line: {error}") from error
        return None


class Fuzzer:
    """One target; each `step` feeds it something else."""

    def close(self):
        """Let go of what the target has open."""


class BlockFuzzer(Fuzzer):
    """Frames, and the text of headers under a checksum that is right."""

    def __init__(self, chance, work):
        del work
        self.chance = chance
        payload = memoryview(block_bytes(1, 500))
        provenance = Provenance("source", "mapper")
        header = BlockHeader(block_key(1), 500, 1, 2, 3, 4, 5, "bfloat16", 64, provenance, 5.0)
        self.frame = encode(seal(header, [payload])) + bytes(payload)
        self.fields = vars(header) | {"provenance": vars(provenance)}
        self.header = header

    def step(self):
        raw = mutate(self.chance, self.frame)
        found = guarded(open_frame, block_key(1), [memoryview(raw)])
        if found is not None and b"".join(found[1]) != block_bytes(1, 500):
            raise AssertionError("wrong bytes were believed")
        guarded(header_bytes, raw)
        self._sealed_text()

    def _sealed_text(self):
        import xxhash

        text = mutate(self.chance, json.dumps(self.fields).encode())
        start = b"KVXBLK01" + len(text).to_bytes(4, "little")
        raw = start + xxhash.xxh3_64_intdigest(text).to_bytes(8, "little") + text
        header = guarded(decode, raw)
        if header is not None:
            guarded(encode, header)


class ManifestFuzzer(Fuzzer):
    def __init__(self, chance, work):
        self.chance, self.path = chance, work / "family.yaml"
        yaml.safe_load(MANIFEST)

    def step(self):
        self.path.write_bytes(mutate(self.chance, MANIFEST.encode()))
        family = guarded(load_family, self.path)
        if family is not None:
            guarded(check_url, family.store)


class UrlFuzzer(Fuzzer):
    def __init__(self, chance, work):
        del work
        self.chance = chance

    def step(self):
        text = mutate(self.chance, self.chance.choice(URLS).encode()).decode(errors="replace")
        guarded(check_url, text)


class FolderFuzzer(Fuzzer):
    """Payload files of an open store, each read in a batch with an intact one."""

    def __init__(self, chance, work):
        self.chance, self.root = chance, work / "outer" / "store"
        self.store = LocalStore(self.root, min_free_bytes=0)
        put(self.store, block_key(0), block_bytes(0))

    def close(self):
        self.store.close()

    def step(self):
        put(self.store, block_key(1), block_bytes(1))
        (path,) = (p for p in self.root.glob("blocks/*/*") if self._digest() in p.name)
        path.write_bytes(mutate(self.chance, path.read_bytes()))
        damaged, intact = self.store.read([ReadRequest(block_key(n)) for n in (1, 0)])
        if intact.payload != block_bytes(0):
            raise AssertionError("an intact block was lost")
        if damaged.status is ReadStatus.OK and damaged.payload != block_bytes(1):
            raise AssertionError("wrong bytes were served")
        if [p.name for p in self.root.parent.iterdir()] != ["store"]:
            raise AssertionError("a path outside the store")

    @staticmethod
    def _digest():
        import hashlib

        return hashlib.sha256(block_key(1).encode()).hexdigest()


class IndexFuzzer(Fuzzer):
    """The index file, closed in order or not, opened again in a process of its own."""

    SCRIPT = (
        "import sys, time; from kvstore_xfer.store.local import LocalStore\n"
        "from kvstore_xfer.store.testing import *\n"
        "expected = [block_bytes(n, 9) for n in range(20)]\n"
        "with LocalStore(sys.argv[1], min_free_bytes=0) as store:\n"
        "    patience = 300 if unsealed else 0\n"  # rows are checked in use
        "    while True:\n"
        "        found = [get(store, block_key(n)).payload for n in range(20)]\n"
        "        if found == expected: break\n"
        "        assert all(f in (None, e) for f, e in zip(found, expected)), found\n"
        "        assert patience, found\n"
        "        patience -= 1; time.sleep(0.1)\n"
    )

    def __init__(self, chance, work):
        self.chance, self.kept, self.root = chance, work / "kept", work / "opened"
        with LocalStore(self.kept, min_free_bytes=0) as store:
            for n in range(20):
                put(store, block_key(n), block_bytes(n, 9))

    def step(self):
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.kept, self.root)
        data = self.root / "index" / "data.mdb"
        data.write_bytes(mutate(self.chance, data.read_bytes()))
        unsealed = self.chance.random() < 0.5
        if unsealed:
            (self.root / "index" / "digest").unlink()
        command = [sys.executable, "-c", f"unsealed = {unsealed}\n{self.SCRIPT}", self.root]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise AssertionError(f"status {done.returncode}: {done.stderr[-500:]}")


FUZZERS = [BlockFuzzer, ManifestFuzzer, UrlFuzzer, FolderFuzzer, IndexFuzzer]


def _run(fuzzer, seconds, seed):
    """Steps that fit into the time."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try:
            fuzzer.step()
        except Exception as error:
            name = type(fuzzer).__name__
            raise AssertionError(f"{name}, seed {seed}, step {count}") from error
        count += 1
    return count


def fuzz(seconds, seed):
    """Steps by target. Raises what a step raises, with the seed to repeat it."""
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    steps = {}
    with tempfile.TemporaryDirectory() as work:
        for kind in FUZZERS:
            folder = Path(work, kind.__name__)
            folder.mkdir()
            with closing(kind(random.Random(seed), folder)) as fuzzer:
                steps[kind.__name__] = _run(fuzzer, seconds / len(FUZZERS), seed)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - taken
    if grown > MEMORY_BYTES:
        raise AssertionError(f"{grown >> 20} MiB were allocated")
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    arguments = parser.parse_args()
    steps = fuzz(arguments.seconds, arguments.seed)
    print(f"seed {arguments.seed}: " + ", ".join(f"{n} {count}" for n, count in steps.items()))


if __name__ == "__main__":
    main()
