"""`map_blocks` against its float64 definition, over everything that a caller may vary."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvxfer_kernels.map_blocks import map_blocks, map_layers, prepare
from kvxfer_kernels.paged import Paged
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

WIDTHS = (32, 34, 48, 64, 80, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SOURCE = Side(layers=3, heads=2, key_dim=64, value_dim=48, rotated=64, factor=1.1)
TARGET = Side(layers=2, heads=3, key_dim=48, value_dim=64, rotated=32, interleaved=True)


@st.composite
def sides(draw: st.DrawFn) -> Side:
    key_dim = draw(st.sampled_from(WIDTHS))
    return Side(
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        key_dim=key_dim,
        value_dim=draw(st.sampled_from(WIDTHS)),
        rotated=2 * draw(st.integers(1, key_dim // 2)) if draw(st.booleans()) else key_dim,
        interleaved=draw(st.booleans()),
        factor=draw(st.sampled_from((1.0, 1.2079441541679836))),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(
        order=tuple(draw(st.permutations(range(4)))),
        padding=draw(st.sampled_from((0, 0, 1, 8))),
        offset=draw(st.sampled_from((64, 65, 72))),
    )


def convert(
    pair: Pair,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    positions: torch.Tensor,
    outputs: tuple[Guarded, Guarded],
    **scales: torch.Tensor,
) -> None:
    map_blocks(
        pair.packed,
        Paged.from_views(keys),
        Paged.from_views(values),
        positions,
        Paged.from_views(outputs[0].views),
        Paged.from_views(outputs[1].views),
        **scales,
    )


def check_outputs(
    outputs: tuple[Guarded, Guarded],
    expected: tuple[torch.Tensor, torch.Tensor],
    tolerance: float,
) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        assert relative_error(output.result(), wanted) < tolerance
        assert output.stray_writes() == 0


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    source=sides(),
    target=sides(),
    full=st.booleans(),
    strip_first=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    first=st.sampled_from((0, 17, 131_000)),
    source_layout=layouts(),
    target_layout=layouts(),
    seed=st.integers(0, 1000),
)
def test_any_shape_layout_and_dtype_equals_the_reference(
    source, target, full, strip_first, dtype, counts, first, source_layout, target_layout, seed
):
    pair = make_pair(source, target, full=full, compute=dtype, strip_first=strip_first, seed=seed)
    tokens = sum(counts)
    dense = [torch.randn(shape).to(dtype) for shape in source.shapes(tokens)]
    positions = first + torch.arange(tokens)
    outputs = tuple(
        Guarded.make(shape, counts, target_layout, dtype) for shape in target.shapes(tokens)
    )
    blocks = [scatter(component, counts, source_layout) for component in dense]
    convert(pair, *blocks, positions, outputs)
    check_outputs(outputs, pair.expected(*dense, positions), TOLERANCE[dtype])


@settings(max_examples=8, deadline=None)
@given(data=st.data(), strip_first=st.booleans())
def test_blocks_of_a_pool_are_found_by_the_table(data, strip_first):
    tokens, length, blocks = (
        data.draw(st.integers(1, 50)),
        data.draw(st.sampled_from((1, 7, 16))),
        60,
    )
    pair = make_pair(SOURCE, TARGET, compute=torch.float32, strip_first=strip_first)
    used = -(-tokens // length)
    table = torch.randperm(blocks)[:used]
    paged, dense = [], []
    for shape in SOURCE.shapes(length):
        # A pool as engines hold it: layers outermost, then blocks.
        pool = torch.randn((shape[0], blocks, *shape[1:])).transpose(0, 1)
        paged.append(Paged.from_pool(pool, table, tokens))
        dense.append(pool[table].transpose(0, 1).flatten(1, 2)[:, :tokens])
    positions = torch.randperm(131_072)[:tokens]
    outputs = tuple(
        Guarded.make(shape, [tokens], Layout(), torch.float32) for shape in TARGET.shapes(tokens)
    )
    out = [Paged.from_views(output.views) for output in outputs]
    map_blocks(pair.packed, *paged, positions, *out)
    check_outputs(outputs, pair.expected(*dense, positions), 1e-5)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("strip_first", [False, True])
def test_fp8_sources_are_decoded_with_their_scales(full, strip_first):
    pair = make_pair(SOURCE, TARGET, full=full, strip_first=strip_first)
    tokens = 45
    codes = [torch.randn(shape).mul(30).to(torch.float8_e4m3fn) for shape in SOURCE.shapes(tokens)]
    scales = [torch.rand(SOURCE.layers, SOURCE.heads) * 0.1 + 0.01 for _ in codes]
    outputs = tuple(
        Guarded.make(shape, [tokens], Layout(), torch.bfloat16) for shape in TARGET.shapes(tokens)
    )
    positions = torch.arange(tokens)
    convert(
        pair,
        *[[component] for component in codes],
        positions,
        outputs,
        key_scales=scales[0],
        value_scales=scales[1],
    )
    dense = [c.float() * s[:, None, :, None] for c, s in zip(codes, scales, strict=True)]
    check_outputs(outputs, pair.expected(*dense, positions), 1e-2)


def test_every_fp8_code_has_its_value():
    """One head of width 256 holds all codes; the identity map shows what each was read as."""
    side = Side(layers=1, heads=1, key_dim=256, value_dim=256, rotated=2)
    pair = make_pair(side, side, compute=torch.float32)
    weight = torch.eye(256).unsqueeze(0)
    for part in (pair.keys, pair.values):
        part[0].weight.copy_(weight)
        part[0].bias.zero_()
    pair.packed.values.weights.copy_(torch.eye(256).flatten())
    pair.packed.values.bias.zero_()
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 1, 1, 256)
    finite = codes.float().nan_to_num(0.0)
    readable = finite.to(torch.float8_e4m3fn)
    out = torch.empty(1, 1, 1, 256)
    unit = torch.ones(1, 1)
    paged = Paged.from_views([readable])
    target = Paged.from_views([out])
    map_blocks(
        pair.packed,
        paged,
        paged,
        torch.zeros(1, dtype=torch.int64),
        Paged.from_views([torch.empty(1, 1, 1, 256)]),
        target,
        key_scales=unit,
        value_scales=unit,
    )
    assert torch.equal(out, finite)


def test_a_range_of_layers_leaves_the_others_alone():
    pair = make_pair(SOURCE, TARGET, compute=torch.float32)
    dense = [torch.randn(shape) for shape in SOURCE.shapes(20)]
    positions = torch.arange(20)
    outputs = [Guarded.make(s, [20], Layout(), torch.float32) for s in TARGET.shapes(20)]
    prepared = prepare(pair.packed, *[Paged.from_views([d]) for d in dense], positions)
    targets = [Paged.from_views(output.views) for output in outputs]
    map_layers(pair.packed, prepared, *targets, range(1, 2))
    for output, wanted in zip(outputs, pair.expected(*dense, positions), strict=True):
        assert output.result()[0].isnan().all()
        assert relative_error(output.result()[1], wanted[1]) < 1e-5
    map_layers(pair.packed, prepared, *targets, range(0))


def test_first_positions_may_have_maps_of_their_own():
    """Their rows are a call of its own; the other tokens keep what they have."""
    pairs = [make_pair(SOURCE, TARGET, compute=torch.float32, seed=seed) for seed in (1, 2)]
    dense = [torch.randn(shape) for shape in SOURCE.shapes(20)]
    positions = torch.arange(20)
    outputs = [Guarded.make(s, [20], Layout(), torch.float32) for s in TARGET.shapes(20)]
    for pair, part in zip(pairs, (slice(0, 1), slice(1, 20)), strict=True):
        paged = [Paged.from_views([component[:, part]]) for component in dense]
        targets = [Paged.from_views([output.views[0][:, part]]) for output in outputs]
        map_blocks(pair.packed, *paged, positions[part], *targets)
    wanted = [pair.expected(*dense, positions) for pair in pairs]
    for index, output in enumerate(outputs):
        assert relative_error(output.result()[:, :1], wanted[0][index][:, :1]) < 1e-5
        assert relative_error(output.result()[:, 1:], wanted[1][index][:, 1:]) < 1e-5


def test_two_runs_are_equal_bit_for_bit():
    pair = make_pair(SOURCE, TARGET)
    dense = [torch.randn(shape).bfloat16() for shape in SOURCE.shapes(50)]
    results = []
    for _ in range(2):
        outputs = [Guarded.make(s, [50], Layout(), torch.bfloat16) for s in TARGET.shapes(50)]
        convert(pair, [dense[0]], [dense[1]], torch.arange(50), outputs)
        results.append([output.result() for output in outputs])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_beyond_two_gigabytes_are_reached():
    """Offsets are 64 bits wide: two blocks 3 GiB apart in one virtual reservation."""
    side = Side(layers=1, heads=1, key_dim=32, value_dim=32, rotated=32)
    pair = make_pair(side, side, compute=torch.float32)
    reserved = mmap.mmap(-1, 3 << 30)  # only the pages of its two ends are ever touched
    blocks = [
        torch.frombuffer(reserved, dtype=torch.float32, count=128, offset=start).view(1, 4, 1, 32)
        for start in (0, (3 << 30) - 512)
    ]
    for block in blocks:
        block.copy_(torch.randn(1, 4, 1, 32))
    dense = torch.cat(blocks, dim=1)
    outputs = [Guarded.make(s, [8], Layout(), torch.float32) for s in side.shapes(8)]
    targets = [Paged.from_views(output.views) for output in outputs]
    sources = Paged.from_views(blocks)
    assert int(sources.rows.max()) * 4 > 2**31
    map_blocks(pair.packed, sources, sources, torch.arange(8), *targets)
    check_outputs(tuple(outputs), pair.expected(dense, dense, torch.arange(8)), 1e-5)
