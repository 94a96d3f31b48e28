"""What the wrappers ask about the device: interpreted or compiled, which one, how many programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from kvxfer_kernels import tuning

if TYPE_CHECKING:
    from kvxfer_kernels.tuning import Tuning

TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
FP8 = torch.float8_e4m3fn


def interpreted(kernel: Any) -> bool:
    """Whether `kernel` was decorated under TRITON_INTERPRET=1."""
    return not isinstance(kernel, triton.JITFunction)


def dot_dtype(kernel: Any, compute: torch.dtype) -> tl.dtype:
    """Operands of ``tl.dot``: fp32 when interpreting, where its bf16 product is wrong."""
    return tl.float32 if interpreted(kernel) else TRITON_DTYPES[compute]


def architecture(device: torch.device) -> str:
    """``sm90`` and the like, or AMD's ``gfx942``."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def tuning_for(device: torch.device, *, full: bool, compute: torch.dtype) -> Tuning:
    """The tile sizes for maps on `device`; on the CPU those of the interpreter."""
    if device.type != "cuda":
        return tuning.INTERPRETER
    kind = "fp32" if compute is torch.float32 else "full" if full else "local"
    return tuning.load(architecture(device), kind)


def programs(device: torch.device, per_multiprocessor: int, tiles: int) -> int:
    """Size of a persistent grid."""
    if device.type != "cuda":
        return min(per_multiprocessor, tiles)
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return min(count * per_multiprocessor, tiles)


def check_runnable(kernel: Any, device: torch.device) -> None:
    """Raises ValueError for CPU tensors without the interpreter."""
    if device.type != "cuda" and not interpreted(kernel):
        raise ValueError(f"device {device}: set TRITON_INTERPRET=1 before import to run on the CPU")


def as_codes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as uint8; the kernels decode it themselves."""
    return tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor


def check_scales(
    name: str, source: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor | None:
    """fp8 sources need float32 scales ``[layers, heads]`` (per layer: repeat them), others none.

    Raises ValueError when they are missing, superfluous or of another shape or kind.
    """
    if (source.dtype is FP8) != (scales is not None):
        raise ValueError(f"{name}: scales are for fp8 sources, and those need them")
    if scales is None:
        return None
    expected = (source.shape[0], source.shape[2])
    if scales.shape != expected or scales.dtype is not torch.float32:
        raise ValueError(
            f"{name} scales: {scales.dtype} {tuple(scales.shape)}, expected float32 {expected}"
        )
    if scales.device != source.device:
        raise ValueError(f"{name} scales: on {scales.device}, the source is on {source.device}")
    return scales.contiguous()
