"""Every check of the wrappers, each with a call that fails it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kvxfer_kernels import launch
from kvxfer_kernels.map_blocks import map_blocks, map_layers, prepare
from kvxfer_kernels.pack import pack_maps
from kvxfer_kernels.paged import Paged
from kvxfer_kernels.rotation import Rotation
from kvxfer_kernels.strip_keys import strip_keys
from kvxfer_kernels.testing import Affine, Side, make_pair
from kvxfer_kernels.tuning import INTERPRETER

SIDE = Side(layers=2, heads=2, key_dim=32, value_dim=48, rotated=32)
PAIR = make_pair(SIDE, SIDE)
TOKENS = 5


def paged(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Paged:
    return Paged.from_views([torch.zeros(shape, dtype=dtype)])


def arguments(**changes: object) -> dict[str, object]:
    keys, values = SIDE.shapes(TOKENS)
    return {
        "maps": PAIR.packed,
        "keys": paged(keys),
        "values": paged(values),
        "positions": torch.arange(TOKENS),
        "key_targets": paged(keys),
        "value_targets": paged(values),
        **changes,
    }


SCALES = torch.ones(2, 2)
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": paged((2, 5, 2, 32), torch.float64)}, "float64 is not bf16"),
        ({"keys": paged((2, 5, 3, 32))}, "heads and width"),
        ({"values": paged((2, 5, 2, 32))}, "heads and width"),
        ({"keys": paged((1, 5, 2, 32))}, "1 layers, maps read 2"),
        ({"values": paged((2, 6, 2, 48))}, "expected int64 of 6 tokens"),
        ({"positions": torch.arange(4)}, "expected int64 of 5 tokens"),
        ({"positions": torch.arange(5, dtype=torch.int32)}, "expected int64"),
        ({"positions": torch.arange(5, device="meta")}, "positions on meta"),
        ({"key_targets": paged((2, 5, 2, 32), FP8)}, "is not bf16, fp16 or fp32"),
        ({"key_targets": paged((2, 4, 2, 32))}, "4 tokens, sources have 5"),
        ({"value_targets": paged((2, 5, 2, 32))}, "maps fill"),
        ({"value_targets": paged((3, 5, 2, 48))}, "maps fill"),
        ({"key_scales": SCALES}, "keys: scales are for fp8"),
        ({"keys": paged((2, 5, 2, 32), FP8)}, "keys: scales are for fp8"),
        (
            {"keys": paged((2, 5, 2, 32), FP8), "key_scales": torch.ones(2)},
            "keys scales: torch.float32",
        ),
        (
            {"keys": paged((2, 5, 2, 32), FP8), "key_scales": SCALES.double()},
            "keys scales: torch.float64",
        ),
        (
            {"keys": paged((2, 5, 2, 32), FP8), "key_scales": torch.ones(2, 2, device="meta")},
            "keys scales: on meta",
        ),
    ],
)
def test_map_blocks_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        map_blocks(**arguments(**changes))


def test_map_layers_refuses_layers_that_do_not_exist():
    call = arguments()
    prepared = prepare(call["maps"], call["keys"], call["values"], call["positions"])
    for layers in (range(1, 3), range(0, 2, 2), range(2, 1)):
        with pytest.raises(ValueError, match="layers: "):
            map_layers(call["maps"], prepared, call["key_targets"], call["value_targets"], layers)


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "interpreted", lambda kernel: False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        map_blocks(**arguments())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": paged((2, 4, 2, 32))}, "out: "),
        ({"out": paged((2, 5, 1, 32))}, "out: "),
        ({"out": paged((2, 5, 2, 32), FP8)}, "out: torch.float8"),
        ({"out": Paged.from_views([torch.zeros(2, 5, 32, 2).transpose(2, 3)])}, "with strides"),
        ({"table": torch.zeros(4, 2, 16)}, "table: "),
        ({"layers": torch.tensor([0])}, "expected int32"),
        ({"keys": paged((2, 5, 2, 64))}, "keys: width 64"),
        ({"keys": paged((2, 5, 2, 32), FP8)}, "scales are for fp8"),
    ],
)
def test_strip_keys_refuses(changes, message):
    call = {
        "keys": paged((2, 5, 2, 32)),
        "out": paged((2, 5, 2, 32)),
        "rotation": SIDE.rotation(),
        "table": torch.zeros(5, 2, 16),
        "layers": torch.tensor([0], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        strip_keys(**{**call, **changes})


def affine(
    rows: int = 32, heads: int = 2, width: int = 32, layers: tuple[int, ...] = (0,)
) -> Affine:
    return Affine(layers, torch.zeros(heads, rows, width), torch.zeros(heads, width))


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ([], {}, "maps: 0 layers"),
        ([affine(), affine()], {}, "maps: 2 layers of keys, 1 of values"),
        ([affine()], {"head_assignment": (0,)}, "head_assignment"),
        ([affine()], {"head_assignment": (0, 2)}, "head_assignment"),
        ([affine(rows=64)], {}, "keys: width 64, rotation for 32"),
        ([affine(width=64)], {}, "keys: target width 64"),
        ([affine(layers=(-1,))], {}, r"source layers \(-1,\)"),
        ([Affine((), torch.zeros(2, 32, 32), torch.zeros(2, 32))], {}, "source layers"),
        ([replace(affine(), weight=torch.zeros(1, 32, 32))], {}, "is not 1 entries of width 32"),
        ([affine()], {"head_assignment": None}, "keys: width 1,"),
        ([affine()], {"values": [affine(rows=30)]}, "head width 30"),
        ([affine()], {"values": [affine(width=258)]}, "head width 258"),
        ([affine()], {"values": [affine(width=33)]}, "head width 33"),
    ],
)
def test_pack_maps_refuses(keys, changes, message):
    call = {
        "values": [affine()],
        "source_heads": 2,
        "source_rotation": SIDE.rotation(),
        "target_rotation": SIDE.rotation(),
        "compute": torch.float32,
        "tuning": INTERPRETER,
        "device": "cpu",
        "head_assignment": (0, 1),
    }
    with pytest.raises(ValueError, match=message):
        pack_maps(keys, **{**call, **changes})
    with pytest.raises(TypeError, match=r"compute: torch\.float64"):
        pack_maps([affine()], **{**call, "compute": torch.float64})


def test_layers_of_one_component_must_agree():
    values = [affine(), affine(width=64)]
    with pytest.raises(ValueError, match="layer 1: bias"):
        pack_maps(
            [affine(), affine()],
            values,
            source_heads=2,
            source_rotation=SIDE.rotation(),
            target_rotation=SIDE.rotation(),
            compute=torch.float32,
            tuning=INTERPRETER,
            device="cpu",
            head_assignment=(0, 1),
        )


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], "at least one"),
        ([torch.zeros(2, 0, 2, 32)], "expected \\[layers, tokens, heads, dim\\]"),
        ([torch.zeros(2, 5, 2)], "expected \\[layers, tokens, heads, dim\\]"),
        ([torch.zeros(2, 5, 2, 32), torch.zeros(2, 4, 2, 32)], "differs from"),
        ([torch.zeros(2, 5, 2, 32), torch.zeros(2, 5, 2, 32).half()], "differs from"),
    ],
)
def test_blocks_that_do_not_belong_together_are_refused(views, message):
    with pytest.raises(ValueError, match=message):
        Paged.from_views(views)


def test_an_address_between_two_numbers_is_refused():
    flat = torch.zeros(4 * 128 + 1, dtype=torch.uint8)
    odd = torch.frombuffer(memoryview(flat.numpy())[1:], dtype=torch.float32, count=128)
    views = [torch.zeros(1, 4, 1, 32), odd.view(1, 4, 1, 32)]
    with pytest.raises(ValueError, match="not a multiple of 4 bytes"):
        Paged.from_views(views)


def test_a_table_that_leaves_its_pool_is_refused():
    pool = torch.zeros(3, 2, 4, 2, 32)
    with pytest.raises(IndexError, match="outside the pool of 3"):
        Paged.from_pool(pool, torch.tensor([0, 3]), 8)
    with pytest.raises(ValueError, match="tokens: 9 are not in 2 blocks of 4"):
        Paged.from_pool(pool, torch.tensor([0, 1]), 9)
    with pytest.raises(ValueError, match="int64"):
        Paged.from_pool(pool, torch.tensor([0, 1], dtype=torch.int32), 8)


def test_only_aligned_blocks_may_be_read_by_sixteen_bytes():
    flat = torch.zeros(4096, dtype=torch.bfloat16)
    assert Paged.from_views([flat[:640].view(2, 5, 2, 32)]).vector == 8
    assert Paged.from_views([flat[4:644].view(2, 5, 2, 32)]).vector == 1
    assert Paged.from_views([torch.zeros(2, 5, 2, 36).bfloat16()[..., :32]]).vector == 1


@pytest.mark.parametrize(
    ("inv_freq", "head_dim", "factor", "error", "message"),
    [
        (torch.ones(16).double(), 32, 1.0, TypeError, "expected float32"),
        (torch.ones(17), 32, 1.0, ValueError, "does not fit head_dim 32"),
        (torch.ones(0), 32, 1.0, ValueError, "does not fit head_dim 32"),
        (torch.ones(2, 2), 32, 1.0, ValueError, "does not fit head_dim 32"),
        (torch.ones(16), 32, 0.0, ValueError, "attention_factor: 0.0"),
    ],
)
def test_a_rotation_refuses(inv_freq, head_dim, factor, error, message):
    with pytest.raises(error, match=message):
        Rotation(inv_freq, head_dim, factor)
