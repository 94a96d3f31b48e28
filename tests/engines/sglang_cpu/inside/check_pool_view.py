"""`PoolView` against SGLang's own way of reading and writing a page."""

import pytest
import torch
from real_pools import mha_pool, mla_pool

from kvxfer_sglang.pool_view import PoolView, UnsupportedPoolError

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
ORDER = {  # dimensions of SGLang's flat page, after the component, and the way to [L, T, H, D]
    "layer_first": ("LTHD", (0, 1, 2, 3)),
    "page_first": ("TLHD", (1, 0, 2, 3)),
    "page_first_direct": ("LTHD", (0, 1, 2, 3)),
    "page_head": ("HTLD", (2, 1, 0, 3)),
}


def canonical(pool, slot, components=2):
    """SGLang's flat page, in our order."""
    sizes = {"L": pool.layer_num, "T": pool.page_size, "D": -1}
    sizes["H"] = pool.head_num if components == 2 else 1
    order, permutation = ORDER[pool.layout]
    page = pool.get_data_page(slot).view(components, *(sizes[name] for name in order))
    return [part.permute(permutation) for part in page]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_what_sglang_reads(layout, dtype):
    pool = mha_pool(layout, dtype=dtype)
    view = PoolView(pool, dtype)
    for slot in range(0, pool.size, pool.page_size):
        page = view.page(slot)
        keys, values = canonical(pool, slot)
        assert torch.equal(page.keys, keys)
        assert torch.equal(page.values, values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_written_in_place_is_the_one_sglang_would_have_set(layout):
    written, expected = mha_pool(layout), mha_pool(layout)
    expected.kv_buffer.copy_(written.kv_buffer)
    slot = 3 * written.page_size
    flat = torch.randn(written.get_data_page(slot).shape).to(written.dtype)
    expected.set_from_flat_data_page(slot, flat)
    keys, values = canonical(expected, slot)
    page = PoolView(written, written.dtype).page(slot)
    page.keys.copy_(keys)
    page.values.copy_(values)
    assert torch.equal(written.kv_buffer, expected.kv_buffer)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_keys_and_values_of_different_width(layout):
    pool = mha_pool(layout, dim=8, value_dim=4)
    page = PoolView(pool, pool.dtype).page(2 * pool.page_size)
    for view, buffer in zip((page.keys, page.values), pool.kv_buffer, strict=True):
        if layout == "page_first":
            expected = buffer[2 * pool.page_size : 3 * pool.page_size].transpose(0, 1)
        else:
            expected = buffer[2]
        assert torch.equal(view, expected)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_latent_page_is_all_keys(layout):
    pool = mla_pool(layout)
    page = PoolView(pool, pool.dtype).page(5 * pool.page_size)
    (expected,) = canonical(pool, 5 * pool.page_size, components=1)
    assert torch.equal(page.keys, expected)
    assert page.values.numel() == 0


def test_eight_bit_floats_share_the_memory_of_their_bytes():
    pool = mha_pool("page_first", dtype=torch.uint8)
    page = PoolView(pool, torch.float8_e4m3fn).page(0)
    page.keys.copy_(torch.ones(page.keys.shape))
    assert set(pool.get_data_page(0).view(2, -1)[0].tolist()) == {0x38}


def test_a_layout_that_sglang_itself_does_not_page_is_refused():
    pool = mha_pool("page_unified")
    with pytest.raises(UnsupportedPoolError, match="page_unified"):
        PoolView(pool, pool.dtype)
