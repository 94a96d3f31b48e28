"""Time to first token of the large model on a real SGLang engine, by where the prompt comes from.

    kvxfer fit ... --out MAPPER ... ; kvxfer check MAPPER ... --dtype float32
    python tests/bench/bench_sglang.py --mapper MAPPER

One run: computed natively, from the model's own blocks, converted from the small model's, from the
blocks that conversion left behind, and the model's own through SGLang's file backend. Engines run
on the CPU, one thread each, so compare the columns with each other and with nothing else. The last
column is the median of the repeats' own ratios of native blocks to file backend, read in turns one
right after the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from environments import REPOSITORY, PackageLinks, engine_python
from sglang_cpu.engine import TierEngine, extra_config, write_manifest
from sglang_cpu.server import Launch, SglangServer

FAMILY = REPOSITORY / "tests" / "data" / "family"
PAGE = 64
RESERVED = 8  # of the context, for the answer and what SGLang itself keeps back
STORED_UNDER = {"large": "native", "file": None}  # the tenants whose blocks are the model's own
COLUMNS = ("native", "native blocks", "converted", "derived", "file backend")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mapper", type=Path, required=True, help="accepted in float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(stack, work, options.mapper.resolve())
        print(f"seconds to the first token, median of {options.repeats} (least to most)")
        print(f"{'tokens':>6}" + "".join(f"{name:>22}" for name in COLUMNS) + "   ours/file")
        bench.measure(512, 1)  # the first requests of an engine are slow
        for length in options.lengths:
            rows = bench.measure(length, options.repeats)
            ratio = statistics.median(
                ours / file for ours, file in zip(rows[1], rows[4], strict=True)
            )
            line = f"{length:>6}" + "".join(f"{summary(row):>22}" for row in rows)
            print(f"{line}{ratio:>12.2f}", flush=True)


def summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


class Bench:
    """Three engines: both models over one store, the large one over SGLang's file backend."""

    def __init__(self, stack: ExitStack, work: Path, mapper: Path) -> None:
        self._serial = 0
        models = {name: FAMILY / name for name in ("small", "large")}
        pair = {"source": "small", "target": "large", "mapper": str(mapper)}
        # A sampled prompt would not be converted, and these models read 256 tokens: time only.
        pair["policy"] = {"sampled_share": 0.0, "max_beyond_checked": 32.0}
        manifest = write_manifest(work / "family.yaml", f"local://{work}/store", models, [pair])
        links = PackageLinks(work / "path")
        plugins = {"sglang.srt.plugins": {"sglang_on_cpu": "sglang_on_cpu:activate"}}
        links.add_distribution("sglang-on-cpu", "1", plugins)
        ours = {"storage": extra_config(manifest, prefetch_threshold=PAGE)}
        theirs = {
            "hierarchical_options": ["--hicache-storage-backend", "file"],
            "environment": {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(work / "file")},
        }
        (work / "file").mkdir()
        self._engines = {}
        for name, model, settings in (
            ("small", "small", ours),
            ("large", "large", ours),
            ("file", "large", theirs),
        ):
            options = dict(settings)
            arguments = ["--enable-metrics", *options.pop("hierarchical_options", [])]
            launch = Launch(
                python=engine_python("sglang"),
                model=models[model],
                work=work / name,
                paths=[links.folder],
                page_size=PAGE,
                dtype="float32",
                max_total_tokens=16384,
                arguments=arguments,
                **options,
            )
            self._engines[name] = TierEngine(stack.enter_context(SglangServer(launch)), PAGE)

    def measure(self, length: int, repeats: int) -> list[list[float]]:
        """Seconds per column of `COLUMNS`, one per repeat."""
        runs = [self._one(length) for _ in range(repeats)]
        return [list(column) for column in zip(*runs, strict=True)]

    def _one(self, length: int) -> list[float]:
        self._serial += 1
        room = length - RESERVED
        prompt = [3 + (7 * i + 131 * self._serial) % 2000 for i in range(room)]
        pages = len(prompt) // PAGE
        native = self._time("large", prompt, 0, extra_key="native")
        self._time("file", prompt, 0)
        self._engines["small"].ask_and_store(prompt)
        self._settle()
        again = {}
        for name in ("large", "file") if self._serial % 2 else ("file", "large"):
            again[name] = self._time(name, prompt, pages, extra_key=STORED_UNDER[name])
        converted = self._time("large", prompt, pages)
        self._settle()
        derived = self._time("large", prompt, pages)
        return [native, again["large"], converted, derived, again["file"]]

    def _settle(self) -> None:
        """Nothing is being written any more, and nothing left in the engines' own tiers."""
        time.sleep(1)
        for engine in self._engines.values():
            engine.server.flush_cache()

    def _time(
        self, name: str, prompt: list[int], pages: int, extra_key: str | None = None
    ) -> float:
        server = self._engines[name].server
        started = time.perf_counter()
        reply = server.generate(prompt, max_new_tokens=1, extra_key=extra_key)
        seconds = time.perf_counter() - started
        if reply.from_storage != pages * PAGE:
            raise RuntimeError(f"{name}: {reply.from_storage} tokens of {pages} pages from storage")
        return seconds


if __name__ == "__main__":
    main()
