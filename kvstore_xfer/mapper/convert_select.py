"""Which converter a process uses: the GPU's when Triton and a device are there, else the CPU's."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.convert_dense import DenseConverter

if TYPE_CHECKING:
    from kvstore_xfer.mapper.convert import Converter
    from kvstore_xfer.mapper.maps import Mapper

_LOG = logging.getLogger(__name__)


def make_converter(
    mapper: Mapper, dtype: torch.dtype, device: torch.device | str | None = None
) -> Converter:
    """A converter for blocks of `dtype`.

    Maps that are not affine are dense torch products on the same device.

    `device` None means the current GPU if there is one. A named device is an explicit choice: it
    raises what `TritonConverter` raises, and ImportError without Triton. By default, what the
    kernels cannot do is done on the CPU, and said once in the log; one token is converted first, to
    find out whether they compile and run.
    """
    if not mapper.method.affine:
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
        return DenseConverter(mapper, device or chosen)
    if device is not None and torch.device(device).type == "cpu":
        return TorchConverter(mapper, dtype)
    if device is not None:
        return _triton(mapper, dtype, torch.device(device))
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return TorchConverter(mapper, dtype)
    try:
        converter = _triton(mapper, dtype, torch.device("cuda", torch.cuda.current_device()))
        _convert_one_token(converter, mapper, dtype)
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything
        _LOG.warning("converting on the CPU: %s: %s", type(error).__name__, error)
        return TorchConverter(mapper, dtype)
    return converter


def _triton(mapper: Mapper, dtype: torch.dtype, device: torch.device) -> Converter:
    from kvstore_xfer.mapper.convert_triton import TritonConverter

    return TritonConverter(mapper, dtype, device)


def _convert_one_token(converter: Converter, mapper: Mapper, dtype: torch.dtype) -> None:
    pages = [
        KvPage(
            torch.zeros((model.layers, 1, heads, model.key_dim), dtype=dtype),
            torch.zeros((model.layers, 1, heads, model.value_dim), dtype=dtype),
        )
        for model, heads in (
            (mapper.source, mapper.source.kv_heads),
            (mapper.target, len(mapper.head_assignment)),
        )
    ]
    converter.convert(pages[:1], [0], pages[1:])
