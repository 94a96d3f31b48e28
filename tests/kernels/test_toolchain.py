"""What Triton itself does: the interpreter's known fault, and the code for real devices."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvxfer_kernels import aot, shapes, tuning

KERNELS = Path(aot.__file__).parent
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@triton.jit
def _dot(a, b, c):
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c + place, tl.dot(tl.load(a + place), tl.load(b + place)))


def test_the_interpreter_still_multiplies_bf16_wrongly():
    """When this fails, `kvxfer_kernels.launch.dot_dtype` needs no exception any more."""
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    c = torch.empty(16, 16)
    _dot[(1,)](a, b, c)
    assert not torch.allclose(c, a.float() @ b.float(), rtol=1e-2, atol=1e-2)
    _dot[(1,)](a.float(), b.float(), c)
    np.testing.assert_allclose(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not (NVIDIA_TOOLS / "cuobjdump").exists(), reason="no cuobjdump in Triton")
def test_the_code_for_every_architecture_keeps_the_rules():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(KERNELS.parent), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer_kernels.aot"],
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" kept") == len(aot.CHIPS) * len(aot.CASES)


def test_a_broken_rule_is_named():
    good = aot.Report(255, 0, 1000, 8, 8, 0, 1)
    chip = aot.CHIPS["sm120"]
    assert good.broken(chip) == []
    bad = aot.Report(255, 4, 200_000, 0, 0, 3, 0)
    assert len(bad.broken(chip)) == 5
    assert len(bad.broken(chip, tensor=False)) == 4


def test_wide_heads_get_smaller_tiles_and_no_rotation_in_registers():
    table = tuning.load("sm90", "local")
    assert table.for_columns(128) == table
    wide = table.for_columns(256)
    assert (wide.block, wide.step, wide.strip_reuse) == (64, 64, 0.0)


def test_kernel_files_import_nothing_but_triton():
    for file in (*KERNELS.rglob("kernel.py"), KERNELS / "tiles.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            allowed = {"triton", "triton.language", "kvxfer_kernels.tiles"}
            assert set(names) <= allowed, f"{file}: {names}"


def test_the_kernels_know_nothing_of_the_rest():
    for file in KERNELS.rglob("*.py"):
        assert "kvstore_xfer" not in file.read_text(encoding="utf-8"), file


def test_every_tuning_table_is_complete():
    for name in aot.CHIPS:
        for kind in ("local", "full", "fp8", "fp32"):
            assert tuning.load(name, kind).block >= 16
    assert tuning.load("sm999", "local") == tuning.load("sm120", "local")


def test_counted_operations_and_bytes_of_the_published_pair():
    pair = shapes.PAIRS["qwen3-14b-32b"]
    assert pair.operations(1, full=False) == 268_435_456  # 0.27 GFLOP a token
    assert pair.operations(1, full=True) == 8 * 268_435_456
    assert pair.source_bytes(1) == 160 * 1024
    assert pair.target_bytes(1) == 256 * 1024
    assert pair.map_bytes(full=False) == 268_435_456  # 134 million bf16 weights
    table, device = tuning.load("sm90", "local"), shapes.DEVICES["sm90"]
    assert shapes.predict(pair, 32768, table, device, full=False).total < 25e-3
    table = tuning.load("sm90", "full")
    assert shapes.predict(pair, 32768, table, device, full=True).total < 150e-3
