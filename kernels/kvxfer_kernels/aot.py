"""Compile the kernels for every supported architecture without a device, and check the code.

    python -m kvxfer_kernels.aot [architecture ...]

Prints one row per architecture and case, then the predicted times, and exits 1 when a rule is
broken: it must compile, spill no register, fit the shared memory, access device memory by 16 bytes
and, where it multiplies 16-bit numbers, use the tensor cores (wgmma on 90).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvxfer_kernels import shapes, tuning
from kvxfer_kernels.launch import TRITON_DTYPES
from kvxfer_kernels.map_blocks.kernel import map_blocks_kernel
from kvxfer_kernels.strip_keys import WARPS as STRIP_WARPS
from kvxfer_kernels.strip_keys import block as strip_block
from kvxfer_kernels.strip_keys.kernel import strip_keys_kernel

if TYPE_CHECKING:
    from kvxfer_kernels.tuning import Tuning


@dataclass(frozen=True)
class Chip:
    """One multiprocessor: limits, and the names of its instructions."""

    backend: str
    code: int | str
    warp: int
    shared: int
    shared_block: int
    registers: int
    warps: int
    tensor: str


CHIPS = {
    "sm80": Chip("cuda", 80, 32, 164 << 10, 163 << 10, 65536, 64, r"HMMA"),
    "sm90": Chip("cuda", 90, 32, 228 << 10, 227 << 10, 65536, 64, r"HGMMA"),
    "sm100": Chip("cuda", 100, 32, 228 << 10, 227 << 10, 65536, 64, r"UTC[A-Z]*MMA"),
    "sm120": Chip("cuda", 120, 32, 100 << 10, 99 << 10, 65536, 48, r"HMMA"),
    "gfx942": Chip("hip", "gfx942", 64, 64 << 10, 64 << 10, 512 * 4 * 64, 32, r"v_mfma"),
}


@dataclass(frozen=True)
class Case:
    """A variant worth its own row.

    `kind` is the tuning table, or None for `strip_keys`; `strip` says that `map_blocks` un-rotates
    in registers; heads of source and target have `width` numbers.
    """

    name: str
    kind: str | None
    fp8: bool = False
    strip: bool = False
    interleaved: bool = False
    width: int = 128

    @property
    def maps(self) -> bool:
        return self.kind is not None

    @property
    def compute(self) -> torch.dtype:
        return torch.float32 if self.kind == "fp32" else torch.bfloat16

    @property
    def tensor(self) -> bool:
        """Whether it must use the tensor cores, which round float32."""
        return self.maps and self.compute is not torch.float32

    def tuning(self, architecture: str) -> Tuning:
        """The table as a call of this case uses it."""
        table = tuning.load(architecture, self.kind or "local")
        if self.maps:
            return table.for_columns(self.width)
        return replace(table, block=strip_block(self.width // 2), warps=STRIP_WARPS, stages=1)


CASES = (
    Case("bf16, un-rotated in memory", "local"),
    Case("bf16, un-rotated in registers", "local", strip=True),
    Case("bf16, interleaved, in memory", "local", interleaved=True),
    Case("fp8, un-rotated in memory", "fp8", fp8=True),
    Case("fp8, un-rotated in registers", "fp8", fp8=True, strip=True),
    Case("full-head", "full"),
    Case("fp32, un-rotated in memory", "fp32"),
    Case("fp32, un-rotated in registers", "fp32", strip=True),
    Case("width 32, in registers", "local", strip=True, width=32),
    Case("width 64, in memory", "local", width=64),
    Case("width 256, in memory", "local", width=256),
    Case("strip_keys", None),
    Case("strip_keys, interleaved", None, interleaved=True),
    Case("strip_keys, fp8", None, fp8=True),
    Case("strip_keys, width 32", None, width=32),
    Case("strip_keys, width 64", None, width=64),
    Case("strip_keys, width 256", None, width=256),
)


@dataclass(frozen=True)
class Report:
    """What one compilation gave."""

    registers: int
    spilled: int
    shared: int
    tensor: int
    wide: int
    narrow: int
    programs: int

    def broken(self, chip: Chip, *, tensor: bool = True) -> list[str]:
        """The rules that this code breaks; without `tensor` it needs no tensor cores."""
        rules = {
            f"{self.spilled} spilled": self.spilled == 0,
            f"{self.shared} bytes of shared memory": self.shared <= chip.shared_block,
            "no tensor-core instruction": self.tensor > 0 or not tensor,
            "no 16-byte access": self.wide > 0,
            f"{self.narrow} narrow tile accesses": self.narrow == 0,
        }
        return [name for name, kept in rules.items() if not kept]


def main(names: list[str]) -> int:
    _say(f"Triton {triton.__version__}")
    _row("arch", "case", "block", "regs", "spill", "shared", "tensor", "16B", "per SM", "rules")
    failed = False
    for name in names or list(CHIPS):
        for case in CASES:
            table = case.tuning(name)
            report = compile_case(name, case, table)
            broken = report.broken(CHIPS[name], tensor=case.tensor)
            failed |= bool(broken)
            cells = (report.registers, report.spilled, report.shared, report.tensor, report.wide)
            verdict = "; ".join(broken) or "kept"
            _row(name, case.name, table.block, *cells, report.programs, verdict)
    for name in names or list(CHIPS):
        _predictions(name)
    return int(failed)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _row(*cells: object) -> None:
    widths = (7, 30, 6, 5, 6, 7, 7, 5, 7, 0)
    _say(" ".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)))


def _predictions(name: str) -> None:
    device = shapes.DEVICES[name]
    _say(f"\npredicted milliseconds on {device.name} ({name}), 32,768 tokens")
    for shape in shapes.PAIRS.values():
        for full in (False, True):
            table = tuning.load(name, "full" if full else "local")
            p = shapes.predict(shape, 32768, table, device, full=full)
            method = "full-head" if full else "head-local"
            terms = {"matrix": p.matrix, "memory": p.memory, "L2": p.l2, "tiles": p.tiles}
            parts = ", ".join(f"{k} {v * 1e3:.1f}" for k, v in {**terms, "strip": p.strip}.items())
            _say(f"  {shape.name:18} {method:10} {p.total * 1e3:7.1f}   ({parts})")


def compile_case(name: str, case: Case, table: Tuning) -> Report:
    """Compile for aligned strides."""
    chip = CHIPS[name]
    kernel = map_blocks_kernel if case.maps else strip_keys_kernel
    constants = _map_constants(case, table) if case.maps else _strip_constants(case)
    source = ASTSource(kernel, *_signature(kernel, constants, case))
    target = GPUTarget(chip.backend, chip.code, chip.warp)
    options = {"num_warps": table.warps, "num_stages": table.stages}
    compiled = triton.compile(source, target=target, options=options)
    read = _read_amd if chip.backend == "hip" else _read_nvidia
    return read(compiled, chip, table)


def _signature(
    kernel: Any, constants: dict[str, Any], case: Case
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types, constants and divisibility as a launch over aligned pages gives them."""
    number = "*fp32" if case.compute is torch.float32 else "*bf16"
    pointers = {
        "source": "*u8" if case.fp8 else number,
        "target": number,
        "weights": number,
        "source_rows": "*i64",
        "target_rows": "*i64",
        "entries": "*i32",
        "first_entry": "*i32",
        "head_shift": "*i32",
        **dict.fromkeys(("bias", "scales", "table", "strip_table", "apply_table"), "*fp32"),
    }
    if not case.maps:
        pointers["layers"] = "*i32"
    types: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        plain = re.sub("^(key|value)_", "", name)
        types[name] = "constexpr" if name in constants else pointers.get(plain, "i32")
        strides = plain.endswith(("_layer", "_head")) and plain != "first_layer"
        if types[name].startswith("*") or strides:
            attributes[(index,)] = [["tt.divisibility", 16]]
    order = [parameter.name for parameter in kernel.params]
    return types, {(order.index(k),): v for k, v in constants.items()}, attributes


def _map_constants(case: Case, table: Tuning) -> dict[str, Any]:
    width, fp8 = case.width, case.fp8
    compute = TRITON_DTYPES[case.compute]
    shared = {"COMPUTE": compute, "DOT": compute, "BLOCK": table.block}
    vector = 16 // case.compute.itemsize
    sizes = {
        f"{component}_{name}": value
        for component in ("KEY", "VALUE")
        for name, value in (
            ("SOURCE_WIDTH", width),
            ("TARGET_WIDTH", width),
            ("COLUMNS", width),
            ("FP8", fp8),
        )
    }
    unit = {f"{c}_{side}_dim": 1 for c in ("key", "value") for side in ("source", "target")}
    return {
        **shared,
        **sizes,
        **unit,
        "KEY_FP8": fp8 and case.strip,  # un-rotating into memory decodes, too
        "KEY_STEP": min(table.strip_step if case.strip else table.step, width),
        "KEY_PARTS": table.parts(width),
        "VALUE_STEP": min(table.step, width),
        "STRIP": case.strip,
        "SOURCE_HALF": width // 2,
        "TARGET_INTERLEAVED": case.interleaved,
        "TARGET_HALF": width // 2,
        "SOURCE_VECTOR": 16 if fp8 else vector,
        "TARGET_VECTOR": vector,
    }


def _strip_constants(case: Case) -> dict[str, Any]:
    pairs = case.width // 2
    return {
        "source_dim": 1,
        "INTERLEAVED": case.interleaved,
        "HALF": pairs,
        "PAIRS": pairs,
        "WIDTH": pairs,
        "BLOCK": strip_block(pairs),
        "FP8": case.fp8,
        "SOURCE_VECTOR": 16 if case.fp8 else 8,
        "TARGET_VECTOR": 8,
    }


def _read_nvidia(compiled: Any, chip: Chip, table: Tuning) -> Report:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _output(tool, "-res-usage", cubin)
        sass = _output(tool, "-sass", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump: no resource usage in {usage!r}")
    registers = int(found[1])
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", sass, re.M)
    return Report(
        registers=registers,
        spilled=_count(names, r"(STL|LDL)\b"),
        shared=compiled.metadata.shared,
        tensor=_count(names, chip.tensor),
        wide=_count(names, r"(LDGSTS|LDG|STG)\.E.*\.128"),
        narrow=_narrow(names, table),
        programs=_programs(chip, table, registers * 32, compiled.metadata.shared),
    )


def _narrow(names: list[str], table: Tuning) -> int:
    stores = _count(names, r"STG\.E(?!.*\.128)")
    # Entry numbers and scales are prefetched by 4 bytes: one a stage, in and before each loop.
    copies = _count(names, r"LDGSTS\.E(?!.*\.128)")
    return stores + max(copies - 8 * table.stages, 0)


def _read_amd(compiled: Any, chip: Chip, table: Tuning) -> Report:
    assembly = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    names = re.findall(r"^\s+([a-z]\w+)", assembly, re.M)
    registers = field("vgpr_count") + field("agpr_count")
    return Report(
        registers=registers,
        spilled=field("vgpr_spill_count"),  # scalar registers spill into vector lanes, not memory
        shared=compiled.metadata.shared,
        tensor=_count(names, chip.tensor),
        wide=_count(names, r"(global|buffer)_(load|store)_(dwordx4|b128)"),
        narrow=_count(names, r"(global|buffer)_store_(short|byte)"),
        programs=_programs(chip, table, registers * 64, compiled.metadata.shared),
    )


def _programs(chip: Chip, table: Tuning, warp_registers: int, shared: int) -> int:
    """Programs that a multiprocessor holds at a time."""
    return min(
        chip.warps // table.warps,
        chip.registers // max(warp_registers * table.warps, 1),
        chip.shared // max(shared + (1024 if chip.backend == "cuda" else 0), 1),
    )


def _count(names: list[str], pattern: str) -> int:
    counts = Counter(names)
    return sum(number for name, number in counts.items() if re.match(pattern, name))


def _output(tool: Path, option: str, file: Path) -> str:
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    # Fused multiply-add is what the predictions count; Triton 3.10 turns it off by default.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    sys.exit(main(sys.argv[1:]))
