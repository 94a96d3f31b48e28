"""Time to first token of the large model on a real SGLang engine, by where the prompt comes from.

    kvxfer fit ... --out MAPPER ... ; kvxfer check MAPPER ... --dtype float32
    python tests/bench/bench_sglang.py --mapper MAPPER

One run: computed natively, from the model's own blocks, converted from the small model's, from the
blocks that conversion left behind, and the model's own through SGLang's file backend. Engines run
on the CPU, one thread each, so compare the columns with each other and with nothing else.

The file backend lies in the same process of the large model (`sglang_both.py`): two processes of
one model differ by more than two backends do. Each prompt is asked of both, one right after the
other and in changing order; the last columns are the median of the ratios of these pairs, own
blocks to file backend, and its 95 % interval.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from environments import REPOSITORY, PackageLinks, engine_python
from sglang_cpu.engine import TierEngine, extra_config, write_manifest
from sglang_cpu.server import Launch, SglangServer, eventually

FAMILY = REPOSITORY / "tests" / "data" / "family"
PAGE = 64
RESERVED = 8  # of the context, for the answer and what SGLang itself keeps back
OWN, FILE = "own", "file"  # tenants: of the large model's own blocks, by where they are stored
COLUMNS = ("computed", "own blocks", "converted", "derived", "file backend")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mapper", type=Path, required=True, help="accepted in float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--turns", type=int, default=4, help="of comparing the two backends")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the servers would live on
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(stack, work, options.mapper.resolve())
        print(f"seconds to the first token of {options.prompts} prompts, median (least to most)")
        print(f"{'tokens':>6}" + "".join(f"{name:>22}" for name in COLUMNS) + "      own/file")
        for length in options.lengths:
            times = bench.measure(length, options.prompts, options.turns)
            cells = "".join(f"{summary(times.seconds[name]):>22}" for name in COLUMNS)
            print(f"{length:>6}{cells}   {times.ratio()}", flush=True)


def summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


@dataclass
class Times:
    """Seconds of one length; those of the two backends are in the same order."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def ratio(self) -> str:
        """Median and its distribution-free 95 % interval (order statistics of the sign test)."""
        pairs = zip(self.seconds["own blocks"], self.seconds["file backend"], strict=True)
        ratios = sorted(ours / file for ours, file in pairs)
        reach = 0.98 * math.sqrt(len(ratios))
        low = ratios[max(0, math.floor((len(ratios) - 1) / 2 - reach))]
        high = ratios[min(len(ratios) - 1, math.ceil((len(ratios) - 1) / 2 + reach))]
        return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}] of {len(ratios)}"


class Bench:
    """Two engines over one store, the large one with SGLang's file backend beside the tier."""

    def __init__(self, stack: ExitStack, work: Path, mapper: Path) -> None:
        self._serial = 0
        models = {name: FAMILY / name for name in ("small", "large")}
        pair = {"source": "small", "target": "large", "mapper": str(mapper)}
        # A sampled prompt would not be converted, and these models read 256 tokens: time only.
        pair["policy"] = {"sampled_share": 0.0, "max_beyond_checked": 32.0}
        store = f"local://{work}/store?min_free=0"
        manifest = write_manifest(work / "family.yaml", store, models, [pair])
        links = PackageLinks(work / "path")
        links.add("sglang_both.py", Path(__file__).with_name("sglang_both.py"))
        plugins = {"sglang.srt.plugins": {"sglang_on_cpu": "sglang_on_cpu:activate"}}
        links.add_distribution("sglang-on-cpu", "1", plugins)
        self._switch, self._files = work / "switch", work / "file"
        self._files.mkdir()
        self._switch.write_bytes(b"t")
        self._paths, self._storage = [links.folder], extra_config(manifest, prefetch_threshold=PAGE)
        both = {"module_path": "sglang_both", "class_name": "BothBackends"}
        servers = [self._server("small", work), self._server("large", work, **both)]
        self._small, self._large = (TierEngine(stack.enter_context(s), PAGE) for s in servers)

    def _server(self, model: str, work: Path, **storage: str) -> SglangServer:
        launch = Launch(
            python=engine_python("sglang"),
            model=FAMILY / model,
            work=work / model,
            paths=self._paths,
            page_size=PAGE,
            dtype="float32",
            max_total_tokens=65536,  # enough for all prompts of a pass: nothing is evicted
            arguments=["--enable-metrics"],
            storage={**self._storage, **storage},
            environment={
                "KVXFER_BENCH_SWITCH": str(self._switch),
                "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self._files),
            },
        )
        return SglangServer(launch)

    def measure(self, length: int, prompts: int, turns: int) -> Times:
        asked = [self._prompt(length - RESERVED) for _ in range(prompts)]
        pages = (length - RESERVED) // PAGE
        self._time(self._prompt(length - RESERVED), 0)  # what is asked first is slow
        self._settle()
        times = Times()
        before = self._large.written()
        times.seconds["computed"] = [self._time(prompt, 0, OWN) for prompt in asked]
        # The switch must not turn while pages are on their way.
        eventually(lambda: self._large.written() - before >= pages * prompts, 60)
        self._settle()
        before = self._in_files()
        for prompt in asked:
            self._time(prompt, 0, FILE)
        eventually(lambda: self._in_files() - before >= pages * prompts, 60)
        self._small.store_all(asked)
        for name in ("converted", "derived"):
            self._settle()
            times.seconds[name] = [self._time(prompt, pages) for prompt in asked]
        for turn in range(turns):
            self._settle()
            for number, prompt in enumerate(asked):
                tenants = (OWN, FILE) if (turn + number) % 2 else (FILE, OWN)
                for tenant in tenants:
                    name = "own blocks" if tenant == OWN else "file backend"
                    times.seconds[name].append(self._time(prompt, pages, tenant))
        return times

    def _settle(self) -> None:
        """Nothing is being written any more, and nothing left in the engines' own tiers."""
        time.sleep(1)
        for engine in (self._small, self._large):
            engine.server.flush_cache()

    def _in_files(self) -> int:
        return len(list(self._files.glob("*.bin")))

    def _prompt(self, tokens: int) -> list[int]:
        self._serial += 1
        return [3 + (7 * i + 131 * self._serial) % 2000 for i in range(tokens)]

    def _time(self, prompt: list[int], pages: int, tenant: str | None = None) -> float:
        """Seconds to the first token, when `pages` of the prompt come from the storage."""
        with self._switch.open("r+b") as file:  # the engine has it in its memory
            file.write(b"f" if tenant == FILE else b"t")
        started = time.perf_counter()
        reply = self._large.server.generate(prompt, max_new_tokens=1, extra_key=tenant)
        seconds = time.perf_counter() - started
        if reply.from_storage != pages * PAGE:
            raise RuntimeError(f"{reply.from_storage} tokens of {pages} pages from storage")
        return seconds


if __name__ == "__main__":
    main()
