import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore_xfer.blocks.page import KvPage, KvShape
from kvxfer_lmcache.layouts import Kind, Layout, opaque_layout, recognise_layout

SHAPE = KvShape(3, 64, 4, 32, 32, torch.float32)
MODEL = KvShape(3, 1, 4, 32, 32, torch.float32)
SEEN = {
    (2, 3, 64, 128): Kind.SPLIT,
    (6, 64, 128): Kind.STACKED,
    (1, 6, 64, 128): Kind.STACKED,
    (3, 64, 256): Kind.PACKED,
    (1, 3, 64, 256): Kind.PACKED,
}


def page_of(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (shape.key_shape, shape.value_shape)
    return KvPage(*(torch.randn(size, generator=generator).to(shape.dtype) for size in sizes))


def equal(one, other):
    return torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@pytest.mark.parametrize(("shape", "kind"), SEEN.items())
def test_the_layouts_that_lmcache_hands_over(shape, kind):
    layout = recognise_layout([shape], [torch.float32], MODEL, packed=32)
    assert (layout.kind, layout.shape, layout.object_shape) == (kind, SHAPE, shape)


@pytest.mark.parametrize(
    ("shape", "dtype", "packed"),
    [
        ((2, 4, 64, 128), torch.float32, 32),  # another number of layers
        ((2, 3, 64, 64), torch.float32, 32),  # another width
        ((1, 3, 64, 128), torch.float32, 32),  # one component only: latents
        ((2, 3, 64, 128), torch.uint8, 32),  # bytes of who knows what
        ((3, 64), torch.float32, 32),
        ((2, 3, 64, 4, 32), torch.float32, 32),
    ],
)
def test_everything_else_is_bytes(shape, dtype, packed):
    assert recognise_layout([shape], [dtype], MODEL, packed).kind is Kind.OPAQUE


@pytest.mark.parametrize("packed", [0, 16, 48, 128])
def test_packed_blocks_need_a_block_size_that_fits(packed):
    layout = recognise_layout([(3, 64, 256)], [torch.float32], MODEL, packed)
    assert layout.kind is Kind.FUSED
    assert not layout.is_canonical


def test_several_kernel_groups_are_bytes():
    layout = recognise_layout([(2, 3, 64, 128)] * 2, [torch.float32] * 2, MODEL)
    assert layout.kind is Kind.OPAQUE
    assert layout.shape.payload_bytes == 2 * 2 * 3 * 64 * 128 * 4


@given(
    kind=st.sampled_from([Kind.SPLIT, Kind.STACKED, Kind.PACKED]),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    dim=st.sampled_from([32, 64]),
    blocks=st.integers(1, 3),
    size=st.sampled_from([32, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_packing_and_unpacking_are_inverse(kind, layers, heads, dim, blocks, size, dtype):
    shape = KvShape(layers, blocks * size, heads, dim, dim, dtype)
    layout = Layout(kind, shape, (), size if kind is Kind.PACKED else 0)
    page, raw = page_of(shape), torch.zeros(shape.payload_bytes, dtype=torch.uint8)
    layout.pack(page, raw)
    assert equal(layout.unpack(raw), page)
    copy = torch.zeros_like(raw)
    layout.pack(layout.unpack(raw), copy)
    assert torch.equal(copy, raw)


def test_packed_blocks_are_those_of_vllms_kernel():
    """Element by element: keys of a head column by column, its values row by row."""
    heads, dim, size, blocks = 2, 32, 32, 2
    shape = KvShape(1, size * blocks, heads, dim, dim, torch.float32)
    page = page_of(shape)
    kernel = torch.empty(blocks, heads, 2, size * dim)
    for block in range(blocks):
        for head in range(heads):
            for token in range(size):
                for element in range(dim):
                    place = (0, block * size + token, head, element)
                    kernel[block, head, 0, element * size + token] = page.keys[place]
                    kernel[block, head, 1, token * dim + element] = page.values[place]
    # LMCache believes in [blocks, H, BS, 2 * D] and moves tokens to the front.
    believed = kernel.view(blocks, heads, size, 2 * dim).permute(0, 2, 1, 3)
    expected = believed.reshape(1, blocks * size, heads * 2 * dim).contiguous()
    raw = torch.empty(shape.payload_bytes, dtype=torch.uint8)
    Layout(Kind.PACKED, shape, (), size).pack(page, raw)
    assert torch.equal(raw.view(torch.float32).view(expected.shape), expected)


def test_stacked_objects_hold_all_keys_before_all_values():
    layout = Layout(Kind.STACKED, SHAPE)
    raw = torch.arange(SHAPE.payload_bytes // 4, dtype=torch.float32).view(torch.uint8)
    page = layout.unpack(raw)
    assert page.keys[0, 0, 0, 0] == 0
    assert page.values[0, 0, 0, 0] == 3 * 64 * 4 * 32
    assert page.keys.data_ptr() == raw.data_ptr()


def test_bytes_are_kept_as_they_are():
    layout = opaque_layout([(5, 7)], [torch.float16])
    raw = torch.arange(70, dtype=torch.uint8)
    copy = torch.zeros_like(raw)
    layout.pack(layout.unpack(raw), copy)
    assert torch.equal(copy, raw)
