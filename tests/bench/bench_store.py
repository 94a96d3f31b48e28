"""The local store beside the engines' own disk backends, in one run each.

    python tests/bench/bench_store.py            # in the engines' environments, built when missing

SGLang's `HiCacheFile` is used through its `set` and `get`; of LMCache's `LocalDiskBackend` its
`write_file` and `read_file`, without its bookkeeping. Neither has a checksum. Page cache warm.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 5


def rate(total, work):
    start = time.perf_counter()
    work()
    return total / 1e9 / (time.perf_counter() - start)


def hicache(folder, values, targets):
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "bench")
    store = HiCacheFile(config, str(folder))

    def write():
        for n, value in enumerate(values):
            assert store.set(f"k{n}", value)

    def read():
        for n in range(len(values)):
            assert store.get(f"k{n}", targets[n % len(targets)]) is not None

    return write, read


def lmcache(folder, values, targets):
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    folder.mkdir()
    backend = SimpleNamespace(os_disk_bs=4096, use_odirect=False, dict={})

    def write():
        for n, value in enumerate(values):
            LocalDiskBackend.write_file(backend, memoryview(value.numpy()), folder / str(n))

    def read():
        for n in range(len(values)):
            target = memoryview(targets[n % len(targets)].numpy())
            LocalDiskBackend.read_file(backend, n, target, folder / str(n))

    return write, read


def inside(engine):
    import torch

    from kvstore_xfer.cli.bench_store import SHAPES, bench_shape

    rival = {"sglang": hicache, "lmcache": lmcache}[engine]
    for name, (size, count) in SHAPES.items():
        with tempfile.TemporaryDirectory() as work:
            ours = bench_shape(Path(work, "ours"), size, count)
            values = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(count)]
            targets = [torch.ones(size, dtype=torch.uint8) for _ in range(32)]
            write, read = rival(Path(work, "theirs"), values, targets)
            written = rate(size * count, write)
            fastest = max(rate(size * count, read) for _ in range(REPEATS))
        print(
            f"{name:6} {engine:8} write {written:5.2f} GB/s  read {fastest:5.2f} GB/s   "
            f"ours: write {ours['write']:5.2f} GB/s  read {ours['read']:5.2f} GB/s   "
            f"plain readinto {ours['plain readinto']:5.2f} GB/s",
            flush=True,
        )


def main():
    sys.path.insert(0, str(ROOT / "tests" / "engines"))
    from environments import engine_python

    for engine in ("sglang", "lmcache"):
        env = os.environ | {"PYTHONPATH": str(ROOT), "LMCACHE_LOG_LEVEL": "WARNING"}
        subprocess.run([engine_python(engine), __file__, engine], env=env, check=True)


if __name__ == "__main__":
    inside(sys.argv[1]) if len(sys.argv) > 1 else main()
