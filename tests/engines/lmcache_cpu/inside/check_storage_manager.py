"""Two models behind LMCache's StorageManager: what is read was stored, or converted."""

import pytest
import torch
from toy import (
    HEADS,
    Counted,
    clear,
    equal,
    fetch,
    in_dtype,
    keys_of,
    layout_of,
    put,
    random_pages,
    store,
    wait,
)

from kvstore_xfer.blocks.page import KvPage
from kvxfer_lmcache.layouts import Kind

CHUNKS = 5
KINDS = [
    (Kind.SPLIT, False),
    (Kind.STACKED, False),
    (Kind.STACKED, True),
    (Kind.PACKED, False),
    (Kind.PACKED, True),
]


def tokens_of(chunk, seed=1, chunks=CHUNKS):
    return [(seed * 7919 + 31 * i) % 1000 for i in range(chunk * chunks + 3)]


@pytest.mark.parametrize(("kind", "moved"), KINDS)
def test_converted_bytes_equal_the_offline_conversion(toy, kind, moved):
    small, layout = layout_of("small", 64, kind, moved=moved)
    large, target = layout_of("large", 64, kind, moved=moved)
    pages, counted = random_pages(layout, CHUNKS), Counted()
    tokens = tokens_of(64)
    with toy.manager(block_size=32) as (manager, adapter):
        store(manager, keys_of("small", tokens, 64), small, layout, pages)
        assert equal(fetch(manager, keys_of("small", tokens, 64), small, layout), pages)
        clear(manager)
        expected = toy.converted(pages)
        keys = keys_of("large", tokens, 64)
        assert equal(fetch(manager, keys, large, target), expected)
        adapter.attachments.flush()
        clear(manager)
        assert equal(fetch(manager, keys, large, target), expected)
        assert adapter.report_status()["engines"][0]["refusals"] == []
    assert counted.blocks("converted") == CHUNKS
    assert counted.blocks("derived") == CHUNKS
    assert counted.blocks("native") == CHUNKS


@pytest.mark.parametrize("chunk", [16, 32, 64, 128, 256])
def test_chunk_sizes(toy, chunk):
    small, layout = layout_of("small", chunk)
    large, target = layout_of("large", chunk)
    pages, tokens = random_pages(layout, CHUNKS), tokens_of(chunk)
    with toy.manager() as (manager, _adapter):
        store(manager, keys_of("small", tokens, chunk), small, layout, pages)
        blocks = fetch(manager, keys_of("large", tokens, chunk), large, target)
    assert equal(blocks, toy.converted(pages))


def test_blocks_of_one_engine_serve_the_same_model_in_another(toy):
    """The canonical block is the same whoever computed it: stored by SGLang, read by vLLM."""
    stacked, layout = layout_of("small", 64, Kind.STACKED)
    split, other = layout_of("small", 64, Kind.SPLIT)
    pages, keys = random_pages(layout, CHUNKS), keys_of("small", tokens_of(64), 64)
    with toy.manager() as (manager, _adapter):
        store(manager, keys, stacked, layout, pages)
        assert equal(fetch(manager, keys, split, other), pages)


def test_a_long_second_turn_is_stored_at_its_place(toy):
    small, layout = layout_of("small", 16)
    large, target = layout_of("large", 16)
    pages, tokens = random_pages(layout, 8), tokens_of(16, chunks=8)
    keys = keys_of("small", tokens, 16)
    with toy.manager() as (manager, _adapter):
        store(manager, keys[:5], small, layout, pages[:5])
        fetch(manager, keys, small, layout)
        put(manager, keys[5:], small, layout, pages[5:])
        clear(manager)
        blocks = fetch(manager, keys_of("large", tokens, 16), large, target)
    assert equal(blocks, toy.converted(pages))


def test_chunks_that_no_lookup_listed_are_stored_and_never_converted(toy):
    small, layout = layout_of("small", 16)
    large, target = layout_of("large", 16)
    pages, tokens, counted = random_pages(layout, CHUNKS), tokens_of(16), Counted()
    keys = keys_of("small", tokens, 16)
    with toy.manager() as (manager, _adapter):
        put(manager, keys, small, layout, pages)
        assert counted("kvxfer_written_blocks_total", kind="unplaced") == CHUNKS
        clear(manager)
        assert fetch(manager, keys_of("large", tokens, 16), large, target) == []
        assert equal(fetch(manager, keys, small, layout), pages)


def test_chunks_that_lmcache_holds_itself_are_not_needed_here(toy):
    small, layout = layout_of("small", 16)
    pages, keys = random_pages(layout, CHUNKS), keys_of("small", tokens_of(16), 16)
    with toy.manager() as (manager, adapter):
        store(manager, keys, small, layout, pages)
        adapter.delete(keys[:2])
        wait(lambda: fetch(manager, keys, small, layout) == [])
        put(manager, keys[:2], small, layout, pages[:2])
        adapter.delete(keys[:2])  # evicted from the store again, but still in L1
        wait(lambda: equal(fetch(manager, keys, small, layout), pages))


def test_tenants_never_share(toy):
    small, layout = layout_of("small", 16)
    large, target = layout_of("large", 16)
    tokens = tokens_of(16)
    one, other = (random_pages(layout, CHUNKS, seed) for seed in (1, 2))
    with toy.manager() as (manager, _adapter):
        store(manager, keys_of("small", tokens, 16, "one"), small, layout, one)
        for salt in ("", "other"):
            assert fetch(manager, keys_of("small", tokens, 16, salt), small, layout) == []
            assert fetch(manager, keys_of("large", tokens, 16, salt), large, target) == []
        store(manager, keys_of("small", tokens, 16, "other"), small, layout, other)
        for salt, pages in (("one", one), ("other", other)):
            blocks = fetch(manager, keys_of("large", tokens, 16, salt), large, target)
            assert equal(blocks, toy.converted(pages))


def test_runs_in_two_dtypes_are_never_mixed(toy):
    """LMCache's keys are equal for both."""
    tokens, pages = tokens_of(16), {}
    with toy.manager() as (manager, _adapter):
        for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
            small, layout = layout_of("small", 16, dtype=dtype)
            keys = keys_of("small", tokens, 16)
            assert fetch(manager, keys, small, layout) == []
            pages[dtype] = [in_dtype(p, dtype) for p in random_pages(layout, CHUNKS, seed)]
            store(manager, keys, small, layout, pages[dtype])
        for dtype, stored in pages.items():
            small, layout = layout_of("small", 16, dtype=dtype)
            large, target = layout_of("large", 16, dtype=dtype)
            assert equal(fetch(manager, keys_of("small", tokens, 16), small, layout), stored)
            clear(manager)
            blocks = fetch(manager, keys_of("large", tokens, 16), large, target)
            assert equal(blocks, toy.converted(stored))
            clear(manager)


def test_other_weights_under_the_same_name_are_another_model(toy):
    small, layout = layout_of("small", 16)
    keys = keys_of("small", tokens_of(16), 16)
    pages = random_pages(layout, CHUNKS)
    with toy.manager() as (manager, _adapter):
        store(manager, keys, small, layout, pages)
    toy.changed["small"] = {"weights_digest": "retrained"}
    with toy.manager() as (manager, _):
        assert fetch(manager, keys, small, layout) == []
    del toy.changed["small"]
    with toy.manager() as (manager, _):  # blocks outlive the server
        assert equal(fetch(manager, keys, small, layout), pages)


@pytest.mark.parametrize(("stored_by", "read_by"), [(2, 2), (1, 2), (2, 1), (4, 2)])
def test_tensor_parallel_ranks(toy, stored_by, read_by):
    tokens, counted = tokens_of(16), Counted()
    _, whole = layout_of("small", 16)
    pages = random_pages(whole, CHUNKS)
    expected = toy.converted(pages)
    width, out = HEADS // stored_by, HEADS // read_by
    small, layout = layout_of("small", 16, heads=width)
    large, target = layout_of("large", 16, heads=out)

    def part(page, rank, heads):
        cut = slice(rank * heads, (rank + 1) * heads)
        return KvPage(page.keys[:, :, cut], page.values[:, :, cut])

    with toy.manager() as (manager, _adapter):
        for rank in range(stored_by):
            keys = keys_of("small", tokens, 16, ranks=stored_by, rank=rank)
            mine = [part(page, rank, width) for page in pages]
            store(manager, keys, small, layout, mine)
        rows = [keys_of("large", tokens, 16, ranks=read_by, rank=r) for r in range(read_by)]
        blocks = fetch(manager, [key for row in rows for key in row], large, target)
    for rank in range(read_by):
        mine = [part(page, rank, out) for page in expected]
        assert equal(blocks[rank * CHUNKS : (rank + 1) * CHUNKS], mine)
    assert counted.blocks("converted") == CHUNKS * read_by


def test_retained_chunks_are_converted_once(toy):
    small, layout = layout_of("small", 16)
    large, target = layout_of("large", 16)
    pages, tokens, counted = random_pages(layout, CHUNKS), tokens_of(16), Counted()
    with toy.manager(policy="retain") as (manager, _adapter):
        store(manager, keys_of("small", tokens, 16), small, layout, pages)
        for _ in range(3):
            blocks = fetch(manager, keys_of("large", tokens, 16), large, target)
            assert equal(blocks, toy.converted(pages))
    assert counted.blocks("converted") == CHUNKS
    assert counted.blocks("derived") == 0
