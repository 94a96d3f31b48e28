"""The CPU converter, the in-place and the staged Triton path against one definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper import convert
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.mapper.convert_triton import TritonConverter
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method
from kvstore_xfer.rope.spec import RopeSpec
from kvxfer_kernels.staging import Block, Staging
from kvxfer_kernels.testing import TOLERANCE, Pair, Side, make_pair, relative_error

if TYPE_CHECKING:
    from kvstore_xfer.mapper.convert import Converter

SOURCE = Side(layers=3, heads=2, key_dim=64, value_dim=48, rotated=64, factor=1.1)
TARGET = Side(layers=9, heads=2, key_dim=48, value_dim=32, rotated=32, interleaved=True, factor=1.2)
SMALL_BUDGET = 300_000  # some 40 tokens a slot


def describe(side: Side) -> SimpleNamespace:
    rotation = side.rotation()
    rope = RopeSpec(
        "yarn",
        side.key_dim,
        side.rotated,
        tuple(rotation.inv_freq.tolist()),
        side.factor,
        side.interleaved,
    )
    return SimpleNamespace(
        rope=rope,
        layers=side.layers,
        kv_heads=side.heads,
        key_dim=side.key_dim,
        value_dim=side.value_dim,
    )


def mapper_of(pair: Pair) -> Mapper:
    return Mapper(
        method=Method.FULL_HEAD if pair.assignment is None else Method.HEAD_LOCAL,
        source=describe(pair.source),
        target=describe(pair.target),
        head_assignment=pair.assignment or tuple(range(pair.target.heads)),
        keys=tuple(LayerMap(m.source_layers, m.weight, m.bias) for m in pair.keys),
        values=tuple(LayerMap(m.source_layers, m.weight, m.bias) for m in pair.values),
    )


def cut(components: list[torch.Tensor], counts: list[int]) -> list[KvPage]:
    keys, values = (component.split(counts, 1) for component in components)
    return [KvPage(k, v) for k, v in zip(keys, values, strict=True)]


class Conversation:
    """Random pages of given lengths at random positions, and what they must become."""

    def __init__(self, pair: Pair, counts: list[int], dtype: torch.dtype) -> None:
        tokens = sum(counts)
        dense = [torch.randn(shape).to(dtype) for shape in pair.source.shapes(tokens)]
        self.first = torch.randint(0, 131_000, (len(counts),)).tolist()
        self.sources = [
            KvPage(*parts) for parts in zip(*(d.split(counts, 1) for d in dense), strict=True)
        ]
        self.out = [
            torch.full(shape, float("nan"), dtype=dtype) for shape in pair.target.shapes(tokens)
        ]
        self.targets = [
            KvPage(*parts) for parts in zip(*(o.split(counts, 1) for o in self.out), strict=True)
        ]
        positions = torch.cat(
            [torch.arange(f, f + c) for f, c in zip(self.first, counts, strict=True)]
        )
        self.expected = pair.expected(*dense, positions)
        self.before = [d.clone() for d in dense]
        self.dense = dense

    def blocks(self) -> list[Block]:
        return [
            Block((s.keys, s.values), f, (t.keys, t.values))
            for s, f, t in zip(self.sources, self.first, self.targets, strict=True)
        ]

    def check(self, tolerance: float) -> None:
        for out, expected in zip(self.out, self.expected, strict=True):
            assert relative_error(out, expected) < tolerance
        assert all(torch.equal(a, b) for a, b in zip(self.dense, self.before, strict=True))


COUNTS = st.lists(st.sampled_from((1, 7, 16, 16, 16, 50)), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None)
@given(
    counts=COUNTS,
    full=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    tile=st.sampled_from((1, 2048, 1 << 20)),
    input_bytes=st.sampled_from((1, 128 << 20)),
)
def test_the_cpu_converter_equals_the_reference(counts, full, dtype, tile, input_bytes):
    compute = torch.float32 if dtype is torch.float32 else torch.bfloat16
    pair = make_pair(SOURCE, TARGET, full=full, compute=compute)
    conversation = Conversation(pair, counts, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_TILE", tile)
        patch.setattr(convert, "_INPUT_BYTES", input_bytes)
        TorchConverter(mapper_of(pair), dtype).convert(
            conversation.sources, conversation.first, conversation.targets
        )
    conversation.check(TOLERANCE[dtype])


@settings(max_examples=4, deadline=None)
@given(counts=COUNTS, full=st.booleans(), dtype=st.sampled_from(list(TOLERANCE)))
def test_the_triton_converter_equals_the_reference(counts, full, dtype):
    pair = make_pair(SOURCE, TARGET, full=full, compute=dtype)
    conversation = Conversation(pair, counts, dtype)
    converter = TritonConverter(mapper_of(pair), dtype, "cpu", budget=SMALL_BUDGET)
    converter.convert(conversation.sources, conversation.first, conversation.targets)
    conversation.check(TOLERANCE[dtype])


@settings(max_examples=4, deadline=None)
@given(counts=COUNTS, full=st.booleans(), strip_first=st.booleans())
def test_staging_equals_the_reference_and_leaves_the_sources_alone(counts, full, strip_first):
    pair = make_pair(SOURCE, TARGET, full=full, strip_first=strip_first, compute=torch.float32)
    conversation = Conversation(pair, counts, torch.float32)
    staging = Staging(pair.packed, torch.float32, SOURCE.layers, SMALL_BUDGET)
    staging.run(conversation.blocks())
    conversation.check(TOLERANCE[torch.float32])


def test_staging_serves_again_after_a_failure():
    pair = make_pair(SOURCE, TARGET, compute=torch.float32)
    staging = Staging(pair.packed, torch.float32, SOURCE.layers, SMALL_BUDGET)
    conversation = Conversation(pair, [16, 16], torch.float32)
    broken = Block(conversation.blocks()[0].sources, 0, (torch.empty(1), torch.empty(1)))
    with pytest.raises(IndexError):
        staging.run([broken])
    staging.run(conversation.blocks())
    conversation.check(TOLERANCE[torch.float32])


def test_a_budget_below_one_token_is_refused():
    pair = make_pair(SOURCE, TARGET)
    with pytest.raises(ValueError, match="budget: 100 bytes"):
        Staging(pair.packed, torch.bfloat16, SOURCE.layers, 100)


@pytest.mark.parametrize("shard", [(0, 1), (1, 2)])
def test_a_shard_of_heads_equals_its_part_of_the_whole(shard):
    pair = make_pair(SOURCE, TARGET, compute=torch.float32)
    conversation = Conversation(pair, [16, 9], torch.float32)
    converters: list[Converter] = [
        TorchConverter(mapper_of(pair).shard(*shard), torch.float32),
        TritonConverter(mapper_of(pair).shard(*shard), torch.float32, "cpu"),
    ]
    for converter in converters:
        targets = [
            KvPage(
                torch.empty_like(page.keys[:, :, slice(*shard)]),
                torch.empty_like(page.values[:, :, slice(*shard)]),
            )
            for page in conversation.targets
        ]
        converter.convert(conversation.sources, conversation.first, targets)
        keys = torch.cat([page.keys for page in targets], dim=1)
        assert relative_error(keys, conversation.expected[0][:, :, slice(*shard)]) < 1e-5


def test_the_cpu_converter_is_chosen_without_a_device():
    pair = make_pair(SOURCE, TARGET)
    assert isinstance(make_converter(mapper_of(pair), torch.bfloat16), TorchConverter)
    assert isinstance(make_converter(mapper_of(pair), torch.bfloat16, "cpu"), TorchConverter)


def test_the_cpu_converter_is_chosen_when_the_kernels_cannot(monkeypatch, caplog):
    narrow = Side(layers=2, heads=1, key_dim=48, value_dim=48, rotated=48)
    mapper = mapper_of(make_pair(narrow, narrow))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for failure in (ValueError("width"), ImportError("triton"), TypeError("dtype")):

        def refuse(*_args, error=failure):
            raise error

        monkeypatch.setattr("kvstore_xfer.mapper.convert_select._triton", refuse)
        assert isinstance(make_converter(mapper, torch.bfloat16), TorchConverter)
        assert str(failure) in caplog.text
    with pytest.raises(TypeError):
        make_converter(mapper, torch.bfloat16, "cuda:0")


def test_the_cpu_converter_is_chosen_when_the_kernels_do_not_compile(monkeypatch, caplog):
    mapper = mapper_of(make_pair(SOURCE, TARGET))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    interpreted = TritonConverter(mapper, torch.bfloat16, "cpu")
    monkeypatch.setattr(
        "kvstore_xfer.mapper.convert_select._triton", lambda *_arguments: interpreted
    )
    assert make_converter(mapper, torch.bfloat16) is interpreted

    def broken(*_arguments):
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr(interpreted, "convert", broken)
    assert isinstance(make_converter(mapper, torch.bfloat16), TorchConverter)
    assert "RuntimeError: ptxas failed" in caplog.text
