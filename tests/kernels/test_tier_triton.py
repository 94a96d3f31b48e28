"""The whole way through the Triton path: what the large model is served equals the CPU path's."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from prometheus_client import REGISTRY

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.convert_triton import TritonConverter
from kvxfer_kernels.testing import relative_error

# Two roundings to bf16, the CPU path's product and the result: 2^-8 each at most.
TWO_ROUNDINGS = 2 * 2**-8


def _calls(stage):
    name = "kvxfer_stage_seconds_count"
    families = REGISTRY.collect()
    rows = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(row.value for row in rows if row.labels["stage"] == stage)


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

    before = _calls("map")
    page = stored.served(triton_converter)
    assert used
    assert _calls("map") > before
    assert relative_error(page.keys, expected.keys) < TWO_ROUNDINGS
    assert relative_error(page.values, expected.values) < TWO_ROUNDINGS


def test_a_conversion_through_staging_tells_the_seconds_of_its_stages(family_mapper):
    mapper = family_mapper.artifact.mapper
    source = family_mapper.source.capture(family_mapper.passages[0].tokens[:32])
    target = KvPage.empty(replace(family_mapper.target.capture([1, 2]).shape, tokens=32))
    converter = TritonConverter(mapper, torch.float32, "cpu")
    seen = []
    converter.observe = lambda *stage: seen.append(stage)
    # Pages on the converter's own device are mapped in place; those of a host pool are staged.
    converter._convert_in_place = converter._staging.run
    converter.convert([source], [0], [target])
    read, made = source.shape.payload_bytes, target.shape.payload_bytes
    assert {(name, size) for name, _, size in seen} == {
        ("copy_in", read),
        ("map", made),
        ("copy_out", made),
    }
    assert all(seconds > 0 for _, seconds, _ in seen)
    own = KvPage.empty(target.shape)
    TorchConverter(mapper, torch.float32).convert([source], [0], [own])
    assert relative_error(target.keys, own.keys) < TWO_ROUNDINGS
