import pytest
import torch

from kvxfer_sglang.pool_view import PoolView, UnsupportedPoolError

LAYERS, PAGES, TOKENS, HEADS, DIM = 3, 5, 4, 2, 8
LAYOUTS = {  # from the canonical [2, L, N, T, H, D] to the order in memory
    "layer_first": (0, 1, 2, 3, 4, 5),
    "page_first": (0, 2, 3, 1, 4, 5),
    "page_first_direct": (0, 2, 1, 3, 4, 5),
    "page_head": (0, 2, 4, 3, 1, 5),
}
SLOTS_IN_ONE_DIMENSION = {"layer_first": (2, 3), "page_first": (1, 2)}


class MHATokenToKVPoolHost:
    """The attributes of SGLang's class of this name, over a buffer of known numbers."""

    def __init__(self, layout, dtype=torch.float32):
        shape = (2, LAYERS, PAGES, TOKENS, HEADS, DIM)
        self.canonical = torch.arange(2 * LAYERS * PAGES * TOKENS * HEADS * DIM).view(shape)
        self.canonical = self.canonical.to(dtype)
        buffer = self.canonical.permute(LAYOUTS.get(layout, LAYOUTS["layer_first"])).contiguous()
        if layout in SLOTS_IN_ONE_DIMENSION:
            buffer = buffer.flatten(*SLOTS_IN_ONE_DIMENSION[layout])
        self.kv_buffer = buffer
        self.layout, self.page_size, self.layer_num = layout, TOKENS, LAYERS
        self.head_num, self.head_dim, self.v_head_dim = HEADS, DIM, DIM


class OtherPool(MHATokenToKVPoolHost):
    pass


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_page_of_every_layout_is_the_same_block(layout):
    pool = MHATokenToKVPoolHost(layout)
    view = PoolView(pool, torch.float32)
    assert view.pages == PAGES
    for number in range(PAGES):
        page = view.page(number * TOKENS)
        assert torch.equal(page.keys, pool.canonical[0, :, number])
        assert torch.equal(page.values, pool.canonical[1, :, number])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_a_page_changes_the_pool_there_and_nowhere_else(layout):
    pool = MHATokenToKVPoolHost(layout)
    before = pool.kv_buffer.clone()
    page = PoolView(pool, torch.float32).page(2 * TOKENS)
    page.keys.fill_(-1)
    page.values.fill_(-2)
    changed = pool.kv_buffer != before
    assert set(pool.kv_buffer[changed].tolist()) == {-1.0, -2.0}
    assert int(changed.sum()) == 2 * LAYERS * TOKENS * HEADS * DIM
    assert torch.equal(PoolView(pool, torch.float32).page(TOKENS).keys, pool.canonical[0, :, 1])


@pytest.mark.parametrize(
    ("layout", "runs"),
    [
        ("layer_first", 2 * LAYERS),
        ("page_first", None),
        ("page_first_direct", 2),
        ("page_head", None),
    ],
)
def test_layouts_that_keep_canonical_order_are_moved_without_a_copy(layout, runs):
    page = PoolView(MHATokenToKVPoolHost(layout), torch.float32).page(TOKENS)
    segments = page.segments()
    assert (None if segments is None else len(segments)) == runs


def test_pages_follow_the_slots_of_a_call():
    pool = MHATokenToKVPoolHost("page_first")
    slots = torch.tensor([3, 0, 4]).repeat_interleave(TOKENS) * TOKENS + torch.arange(
        TOKENS
    ).repeat(3)
    pages = PoolView(pool, torch.float32).pages_at(slots)
    for page, number in zip(pages, (3, 0, 4), strict=True):
        assert torch.equal(page.keys, pool.canonical[0, :, number])


@pytest.mark.parametrize("slot", [-TOKENS, 1, PAGES * TOKENS])
def test_a_slot_that_starts_no_page_is_an_error(slot):
    with pytest.raises(IndexError, match=f"slot {slot}"):
        PoolView(MHATokenToKVPoolHost("page_first"), torch.float32).page(slot)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_bit_floats_are_seen_as_such(layout):
    pool = MHATokenToKVPoolHost(layout, torch.uint8)
    view = PoolView(pool, torch.float8_e4m3fn)
    assert view.shape.dtype is torch.float8_e4m3fn
    page = view.page(TOKENS)
    assert torch.equal(page.keys.view(torch.uint8), pool.canonical[0, :, 1])


def test_an_unknown_layout_is_refused_by_name():
    with pytest.raises(UnsupportedPoolError, match=r"layout 'page_unified'.*--hicache-mem-layout"):
        PoolView(MHATokenToKVPoolHost("page_unified"), torch.float32)


def test_an_unknown_pool_class_is_refused_by_name():
    with pytest.raises(UnsupportedPoolError, match="OtherPool"):
        PoolView(OtherPool("page_first"), torch.float32)


def test_a_buffer_that_contradicts_its_attributes_is_refused():
    pool = MHATokenToKVPoolHost("page_first")
    pool.head_num += 1
    with pytest.raises(UnsupportedPoolError, match="not supported"):
        PoolView(pool, torch.float32)
