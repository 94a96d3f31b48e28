"""What the benchmark compares does the same work; its figures are of that work."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvstore_xfer.cli import bench_map
from kvstore_xfer.cli import main as cli
from kvstore_xfer.cli.bench_map import CpuWork
from kvxfer_kernels import bench, shapes
from kvxfer_kernels.testing import relative_error
from kvxfer_kernels.tuning import INTERPRETER

SMALL = replace(
    shapes.PAIRS["qwen3-14b-32b"],
    source_layers=4,
    source_heads=2,
    source_width=32,
    target_layers=3,
    target_heads=2,
    target_width=64,
    chosen=2,
)


@pytest.mark.parametrize("full", [False, True])
def test_the_torch_methods_compute_what_the_kernels_compute(full):
    work = bench.Workload(SMALL, 40, torch.device("cpu"))
    maps = work.maps(full=full)
    work.kernels(work.pack(maps, INTERPRETER, full=full))()
    ours = work.key_targets.clone(), work.value_targets.clone()
    for target in (work.key_targets, work.value_targets):
        target.fill_(float("nan"))
    work.torch_method(maps, full=full, compiled=False)()
    assert relative_error(work.key_targets, ours[0]) < 2e-2
    assert relative_error(work.value_targets, ours[1]) < 2e-2


def test_the_cpu_work_is_counted():
    work = CpuWork(shapes.PAIRS["qwen3-14b-32b"], 4)
    assert work.operations(4096) == 8 * 2 * 8 * 4096 * 1024 * 128
    # Target layers 30 to 33 read source layers 14 to 23.
    assert work.bytes_moved(1) == 160 * 1024 * 10 / 40 + 256 * 1024 * 4 / 64
    seconds, ceiling, share = CpuWork(SMALL, 2).measure(300)
    assert seconds > 0
    assert ceiling > 0
    assert share > 0


def test_the_layers_around_the_same_depth():
    assert shapes.nearest_layers(0, 64, 40, 8) == tuple(range(8))
    assert shapes.nearest_layers(32, 64, 40, 8) == tuple(range(16, 24))
    assert shapes.nearest_layers(63, 64, 40, 8) == tuple(range(32, 40))


def test_bench_map_prints_a_row_per_length(capsys):
    arguments = ["--pair", "qwen3-14b-32b", "--tokens", "64", "--layers", "1", "--device", "cpu"]
    assert cli.main(["bench", "map", *arguments]) == 0
    assert "64" in capsys.readouterr().out


def test_an_interrupted_bench_prints_what_it_measured(capsys, monkeypatch):
    def rows(*_args):
        yield ("qwen3-14b-32b", 64, 1.5, 2.0, 3.0, 4.0, "60%")
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_map, "_cpu_rows", rows)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        cli.main(["bench", "map", "--device", "cpu"])
    assert "60%" in capsys.readouterr().out
