"""The whole way through the Triton path: what the large model is served equals the CPU path's."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.convert_triton import TritonConverter
from kvxfer_kernels.testing import relative_error

# Two roundings to bf16, the CPU path's product and the result: 2^-8 each at most.
TWO_ROUNDINGS = 2 * 2**-8


def _tier_module():
    file = Path(__file__).parents[1] / "gpu" / "tier.py"
    spec = importlib.util.spec_from_file_location("kvxfer_gpu_tier", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tier_serves_the_same_blocks_through_triton(family_mapper, tmp_path):
    stored = _tier_module().StoredPrefix(tmp_path, Path(family_mapper.folder), "cpu")
    expected = stored.served(TorchConverter)
    used = []

    def triton_converter(mapper, dtype):
        used.append(TritonConverter(mapper, dtype, "cpu"))
        return used[-1]

    page = stored.served(triton_converter)
    assert used
    assert relative_error(page.keys, expected.keys) < TWO_ROUNDINGS
    assert relative_error(page.values, expected.values) < TWO_ROUNDINGS
