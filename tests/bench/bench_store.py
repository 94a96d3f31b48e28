"""The local store beside plain files and the engines' own disk backends, in one interleaved run.

    python tests/bench/bench_store.py [--folder DIR] [--rounds N]

Five participants, each in a process of its own: this store, plain files, SGLang's `HiCacheFile`,
LMCache's `LocalDiskBackend` as its storage manager calls it, and that backend's two bare functions
for a file. In every round each one writes the same blocks under new names; then all is flushed to
the disk; then each one reads what it wrote, twice, of which the second time counts, and plain
`readinto` reads this store's files. The order rotates. Printed are medians, and the median of the
rounds' ratios of rates. Engine environments are built when missing.

This store hashes every block in both directions and flushes its index once a batch. The others do
neither: of what they were told is stored, a power cut may take any part, and nobody notices.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"tiny family, 384 KiB": (384 << 10, 256), "14B, 10 MiB": (10 << 20, 32)}
NAMES = {
    "ours": "this store",
    "plain": "plain files",
    "hicache": "HiCacheFile",
    "lmcache": "LocalDiskBackend",
    "lmcache-files": "its bare file functions",
}


class Participant:
    def __init__(self, python, name, folder):
        self.name = name
        command = [python, ROOT / "tests" / "bench" / "store_rivals.py", name, folder]
        env = os.environ | {"PYTHONPATH": str(ROOT), "LMCACHE_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("seconds "):  # not what an engine logs
                return float(line.split()[1])
        raise SystemExit(f"{self.name}: it ended with status {self.process.wait()}")

    def ask(self, *words):
        self.tell(*words)
        return self.answer()


def run_shape(everybody, folder, size, count, rounds):
    """Seconds of writing and reading, by participant, one entry a round."""
    (folder / str(size)).mkdir()
    for participant in everybody:
        participant.tell("open", size, count)
    for participant in everybody:
        participant.answer()
    seconds = {name: {"write": [], "read": []} for name in NAMES}
    for number in range(rounds + 1):
        turn = number % len(everybody)
        order = everybody[turn:] + everybody[:turn]
        for what in ("write", "read"):
            for participant in order:
                taken = participant.ask(what, number)
                if number:  # the first round warms up
                    seconds[participant.name][what].append(taken)
            os.sync()
        for participant in order:
            participant.ask("drop", number)
        os.sync()
    return seconds


def print_table(shape, total, seconds):
    print(f"\n| {shape} | write, GB/s | ours to it | read, GB/s | ours to it |")
    print("|---|---|---|---|---|")
    for name, label in NAMES.items():
        cells = []
        for what in ("write", "read"):
            own, its = seconds["ours"][what], seconds[name][what]
            ratio = statistics.median(b / a for a, b in zip(own, its, strict=True))
            cells += [f"{total / 1e9 / statistics.median(its):.2f}", f"{ratio:.2f}"]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def main():
    sys.path.insert(0, str(ROOT / "tests" / "engines"))
    from environments import engine_python

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    sglang, lmcache = engine_python("sglang"), engine_python("lmcache")
    pythons = {
        "ours": sys.executable,
        "plain": sys.executable,
        "hicache": sglang,
        "lmcache": lmcache,
        "lmcache-files": lmcache,
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        folder = Path(work)
        everybody = [Participant(pythons[name], name, folder) for name in NAMES]
        for shape, (size, count) in SHAPES.items():
            print_table(shape, size * count, run_shape(everybody, folder, size, count, args.rounds))
        for participant in everybody:
            participant.process.stdin.close()
        for participant in everybody:
            participant.process.wait(30)


if __name__ == "__main__":
    main()
