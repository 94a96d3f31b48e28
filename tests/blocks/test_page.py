"""Pages: the four host layouts of SGLang as views, and the canonical order of their bytes."""

import pytest
import torch

from kvstore_xfer.blocks.page import KvPage, KvShape

L, H, D, P, PAGES = 3, 2, 4, 5, 4
SIZE = P * PAGES
PAGE = 2  # the page under test
SHAPE = KvShape(L, P, H, D, D, torch.bfloat16)


def reference():
    """[2, L, tokens, H, D]: every element of the pool has a value of its own."""
    numbers = torch.arange(2 * L * SIZE * H * D, dtype=torch.int16)
    return numbers.view(torch.bfloat16).reshape(2, L, SIZE, H, D)


def layer_first():
    pool = reference().contiguous()  # (2, L, size, H, D)
    return pool[:, :, PAGE * P : (PAGE + 1) * P]


def page_first():
    pool = reference().permute(0, 2, 1, 3, 4).contiguous()  # (2, size, L, H, D)
    return pool[:, PAGE * P : (PAGE + 1) * P].permute(0, 2, 1, 3, 4)


def page_first_direct():
    paged = reference().reshape(2, L, PAGES, P, H, D)
    pool = paged.permute(0, 2, 1, 3, 4, 5).contiguous()  # (2, pages, L, P, H, D)
    return pool[:, PAGE]


def page_head():
    paged = reference().reshape(2, L, PAGES, P, H, D)
    pool = paged.permute(0, 2, 4, 3, 1, 5).contiguous()  # (2, pages, H, P, L, D)
    return pool[:, PAGE].permute(0, 3, 2, 1, 4)


def canonical_bytes():
    page = reference()[:, :, PAGE * P : (PAGE + 1) * P].contiguous()
    return page.view(torch.uint8).numpy().tobytes()


LAYOUTS = [layer_first, page_first, page_first_direct, page_head]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_page(layout):
    keys, values = layout()
    page = KvPage(keys, values)
    assert page.shape == SHAPE
    copy = KvPage.empty(SHAPE)
    copy.copy_from(page)
    assert b"".join(copy.segments()) == canonical_bytes()


@pytest.mark.parametrize(("layout", "runs"), [(layer_first, 2 * L), (page_first_direct, 2)])
def test_layouts_in_canonical_order_are_used_in_place(layout, runs):
    keys, values = layout()
    segments = KvPage(keys, values).segments()
    assert len(segments) == runs
    assert b"".join(segments) == canonical_bytes()
    for segment in segments:
        segment[:] = bytes(len(segment))
    assert not keys.view(torch.int16).any()
    assert not values.view(torch.int16).any()


@pytest.mark.parametrize("layout", [page_first, page_head])
def test_layouts_in_another_order_have_no_segments(layout):
    assert KvPage(*layout()).segments() is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_restored_into_every_layout(layout):
    filled = KvPage.empty(SHAPE)
    filled.copy_from(KvPage(*layout()))
    target = KvPage(*layout())
    target.keys.zero_()
    target.values.zero_()
    target.copy_from(filled)
    assert torch.equal(target.keys, reference()[0, :, PAGE * P : (PAGE + 1) * P])
    assert torch.equal(target.values, reference()[1, :, PAGE * P : (PAGE + 1) * P])


def test_keys_and_values_of_different_width():
    shape = KvShape(2, 3, 1, 8, 4, torch.float16)
    page = KvPage.empty(shape)
    assert page.shape == shape
    assert shape.payload_bytes == 2 * 3 * (8 + 4) * 2
    assert [len(run) for run in page.segments()] == [96, 48]


def test_one_layer_and_one_token_pages_keep_their_order():
    for layers, tokens in ((1, 4), (4, 1), (1, 1)):
        pool = torch.arange(2 * layers * 8 * H * D).reshape(2, layers, 8, H, D)
        view = pool[:, :, 3 : 3 + tokens]
        segments = KvPage(view[0], view[1]).segments()
        assert b"".join(segments) == view.contiguous().numpy().tobytes()
