"""Everything that needs a GPU, in one command and within ten minutes on one H200.

    tests/gpu/check.sh

Runs each kernel against its float64 definition over shapes, dtypes, layouts and scales, with
poisoned outputs and guard bands, twice for equality of bits; staging from pinned and from pageable
memory; the tier end to end on the device against its CPU path; then the benchmark of the published
Qwen3 pair. One table comes last. Exits 1 when a check fails. Needs this checkout, torch, triton,
transformers, safetensors and the dependencies of this package: a step that one of them is missing
for fails, and the last lines say which.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton

from kvxfer_kernels import bench, shapes
from kvxfer_kernels.launch import architecture, tuning_for
from kvxfer_kernels.map_blocks import map_blocks
from kvxfer_kernels.paged import Paged
from kvxfer_kernels.staging import Block, Staging
from kvxfer_kernels.testing import (
    TOLERANCE,
    Guarded,
    Layout,
    Pair,
    Side,
    make_pair,
    relative_error,
    scatter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIDES = (
    (Side(4, 8, 128, 128, 128), Side(3, 8, 128, 128, 128)),
    (Side(3, 2, 64, 64, 32, factor=1.2), Side(2, 4, 96, 80, 96, interleaved=True)),
    (Side(3, 2, 256, 32, 256, interleaved=True), Side(2, 2, 256, 256, 64, factor=1.1)),
)


NOT_RUN = "NOT RUN"
TIER = "the tier end to end, small model stored, large model served"


def main() -> int:
    device = torch.device("cuda")
    start = time.monotonic()
    _say(
        f"{torch.cuda.get_device_name()} ({architecture(device)}), torch {torch.__version__}, "
        f"Triton {triton.__version__}"
    )
    results = [*_kernel_checks(), *_fp8_checks(), *_staging_checks(), (TIER, _outcome(_tier_check))]
    pairs = [shapes.PAIRS["qwen3-14b-32b"]]
    rows = [*bench.rows(pairs, [64, 4096, 32768], device)]
    _say("\ncheck                                                            result")
    for name, outcome in results:
        _say(f"{name:64} {outcome}")
    _say("\n" + " | ".join(bench.COLUMNS))
    for row in rows:
        _say(" | ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    return _summary(results, time.monotonic() - start)


def _summary(results: list[tuple[str, str]], seconds: float) -> int:
    """The last lines, with every step that did not run, and the exit code."""
    failed = [name for name, outcome in results if not outcome.startswith("ok")]
    _say(f"\n{len(results)} checks, {len(failed)} failed, {seconds:.0f} s")
    for name, outcome in results:
        if outcome.startswith(NOT_RUN):
            _say(f"{name}: {outcome}")
    return int(bool(failed))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _outcome(check: Callable[..., str], *arguments: object) -> str:
    """What a check says or raises: one that fails must not cost the table of the others."""
    try:
        return check(*arguments)
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"


def _kernel_checks() -> Iterator[tuple[str, str]]:
    layouts = (
        Layout((0, 1, 2, 3), 0, 64),
        Layout((1, 0, 2, 3), 8, 64),
        Layout((3, 2, 1, 0), 1, 65),
    )
    for index, (source, target) in enumerate(SIDES):
        for dtype in TOLERANCE:
            for full in (False, True):
                for strip_first in (False, True):
                    pair = _pair(source, target, dtype, full=full, strip_first=strip_first)
                    layout = layouts[index]
                    name = f"shape {index}, {dtype}, {'full' if full else 'local'}, "
                    name += "memory" if pair.packed.strip_first else "registers"
                    yield name, _outcome(_check, pair, layout, dtype)


def _fp8_checks() -> Iterator[tuple[str, str]]:
    for index, (source, target) in enumerate(SIDES):
        for strip_first in (False, True):
            pair = _pair(source, target, torch.bfloat16, full=False, strip_first=strip_first)
            yield f"shape {index}, fp8, strip_first {strip_first}", _outcome(_check_fp8, pair)


def _pair(source: Side, target: Side, dtype: torch.dtype, *, full: bool, strip_first: bool) -> Pair:
    tuning = tuning_for(torch.device("cuda"), full=full, compute=dtype)
    return make_pair(
        source,
        target,
        full=full,
        compute=dtype,
        strip_first=strip_first,
        tuning=tuning,
        device="cuda",
    )


def _check(pair: Pair, layout: Layout, dtype: torch.dtype) -> str:
    counts = [64, 64, 300, 7]
    tokens = sum(counts)
    dense = [torch.randn(shape).to(dtype) for shape in pair.source.shapes(tokens)]
    positions = 130_000 + torch.arange(tokens)
    sources = [Paged.from_views(scatter(d.cuda(), counts, layout)) for d in dense]
    runs = []
    for _ in range(2):
        outputs = [
            Guarded.make(shape, counts, layout, dtype, "cuda")
            for shape in pair.target.shapes(tokens)
        ]
        targets = [Paged.from_views(output.views) for output in outputs]
        map_blocks(pair.packed, sources[0], sources[1], positions.cuda(), targets[0], targets[1])
        runs.append([output.result() for output in outputs])
        if stray := sum(output.stray_writes() for output in outputs):
            return f"{stray} numbers written outside"
    if not all(torch.equal(a, b) for a, b in zip(*runs, strict=True)):
        return "two runs differ"
    expected = pair.expected(dense[0], dense[1], positions)
    return _verdict(runs[0], expected, TOLERANCE[dtype])


def _check_fp8(pair: Pair) -> str:
    tokens = 333
    codes = [torch.randn(s).mul(30).to(torch.float8_e4m3fn) for s in pair.source.shapes(tokens)]
    scales = [torch.rand(pair.source.layers, pair.source.heads) * 0.1 + 0.01 for _ in codes]
    outputs = [
        Guarded.make(shape, [tokens], Layout(), torch.bfloat16, "cuda")
        for shape in pair.target.shapes(tokens)
    ]
    positions = torch.arange(tokens)
    map_blocks(
        pair.packed,
        Paged.from_views([codes[0].cuda()]),
        Paged.from_views([codes[1].cuda()]),
        positions.cuda(),
        Paged.from_views(outputs[0].views),
        Paged.from_views(outputs[1].views),
        key_scales=scales[0].cuda(),
        value_scales=scales[1].cuda(),
    )
    dense = [c.float() * s[:, None, :, None] for c, s in zip(codes, scales, strict=True)]
    expected = pair.expected(dense[0], dense[1], positions)
    return _verdict([output.result() for output in outputs], expected, 1e-2)


def _verdict(
    results: list[torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], tolerance: float
) -> str:
    error = max(relative_error(r, e) for r, e in zip(results, expected, strict=True))
    return f"ok {error:.1e}" if error < tolerance else f"error {error:.1e}"


def _staging_checks() -> Iterator[tuple[str, str]]:
    source, target = SIDES[0]
    pair = _pair(source, target, torch.bfloat16, full=False, strip_first=True)
    for pinned in (False, True):
        yield (
            f"staging, {'pinned' if pinned else 'pageable'} memory",
            _outcome(_check_staging, pair, pinned),
        )


def _check_staging(pair: Pair, pinned: bool) -> str:
    def pages(shapes_: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.randn(shape).bfloat16() for shape in shapes_)
        return (keys.pin_memory(), values.pin_memory()) if pinned else (keys, values)

    counts = [64] * 40 + [17]
    blocks = [
        Block(pages(pair.source.shapes(count)), 64 * index, pages(pair.target.shapes(count)))
        for index, count in enumerate(counts)
    ]
    # Far less than the blocks need, so that slots are used again and again.
    staging = Staging(pair.packed, torch.bfloat16, pair.source.layers, budget=8 << 20)
    staging.run(blocks)
    joined = [torch.cat([b.sources[i] for b in blocks], dim=1) for i in range(2)]
    results = [torch.cat([b.targets[i] for b in blocks], dim=1) for i in range(2)]
    positions = torch.arange(sum(counts))
    return _verdict(results, pair.expected(joined[0], joined[1], positions), 1e-2)


def _tier_check() -> str:
    try:
        from tier import StoredPrefix, fit_mapper

        from kvstore_xfer.mapper.convert import TorchConverter
        from kvstore_xfer.mapper.convert_triton import TritonConverter
    except ImportError as error:
        return f"{NOT_RUN}: {error}; install it (pip install -e . in this checkout) and run again"
    with tempfile.TemporaryDirectory() as folder:
        mapper = fit_mapper(Path(folder) / "fitted", "cuda")
        stored = StoredPrefix(Path(folder), mapper, "cuda")
        expected = stored.served(TorchConverter)
        page = stored.served(lambda maps, dtype: TritonConverter(maps, dtype, "cuda"))
    return _verdict(
        [page.keys.cpu(), page.values.cpu()],
        (expected.keys.cpu(), expected.values.cpu()),
        2 * 2**-8,
    )


if __name__ == "__main__":
    sys.exit(main())
