"""Stores that hang, fail and die under LMCache: no wrong bytes, reasons counted."""

import dataclasses
import shutil
import sys
import threading
import time

import pytest
import torch
from lmcache.v1.distributed.api import ObjectKey
from toy import (
    HEADS,
    Counted,
    clear,
    equal,
    fetch,
    keys_of,
    layout_of,
    put,
    random_pages,
    store,
    wait,
    write,
)

from kvstore_xfer.blocks.header import MAGIC
from kvstore_xfer.models.attention import AttentionKind
from kvstore_xfer.store.base import BlockStore
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.tier import store_gauges
from kvxfer_lmcache import attach, facts
from kvxfer_lmcache.layouts import Kind

CHUNK, CHUNKS = 16, 5
TOKENS = [(17 * i) % 1000 for i in range(CHUNK * CHUNKS + 3)]


class FaultyStore(BlockStore):
    """In front of a local store: `before` is called with each method's name, may hang or raise."""

    def __init__(self, inner):
        self.inner, self.before = inner, lambda method: None

    def exists(self, keys):
        self.before("exists")
        return self.inner.exists(keys)

    def read(self, requests):
        copies = all(request.destination is None for request in requests)
        self.before("read_record" if copies else "read")
        return self.inner.read(requests)

    def write(self, requests, *, overwrite=False):
        self.before("write")
        return self.inner.write(requests, overwrite=overwrite)

    def delete(self, keys):
        return self.inner.delete(keys)

    def scan(self, prefix=""):
        return self.inner.scan(prefix)

    def stats(self):
        return self.inner.stats()

    def close(self):
        self.inner.close()


@pytest.fixture
def faulty(toy, monkeypatch):
    store = FaultyStore(LocalStore(toy.folder / "store", min_free_bytes=0))
    monkeypatch.setattr(attach, "open_store", lambda url, base: store)
    yield store
    store.before = lambda method: None


class Hang:
    """Holds up one method until released."""

    def __init__(self, method):
        self.method, self.released, self.entered = method, threading.Event(), 0

    def __call__(self, method):
        if method == self.method:
            self.entered += 1
            self.released.wait(60)


def prepared(toy, manager):
    small, layout = layout_of("small", CHUNK)
    pages = random_pages(layout, CHUNKS)
    store(manager, keys_of("small", TOKENS, CHUNK), small, layout, pages)
    return pages


@pytest.mark.parametrize("role", ["small", "large"])
def test_a_load_that_never_finishes_is_answered_and_never_writes_later(toy, faulty, role):
    description, layout = layout_of(role, CHUNK)
    keys, counted = keys_of(role, TOKENS, CHUNK), Counted()
    with toy.manager(load_seconds=0.5) as (manager, adapter):
        fetch(manager, keys, description, layout)
        pages = prepared(toy, manager)
        expected = pages if role == "small" else toy.converted(pages)
        hang = faulty.before = Hang("read")
        started = time.monotonic()
        assert fetch(manager, keys, description, layout) == []
        assert time.monotonic() - started < 10
        assert counted("kvxfer_errors_total", call="lmcache_load_timeout") == 1
        # The memory of that load is LMCache's again; the late read must not touch it.
        others = [dataclasses.replace(key, cache_salt="other") for key in keys]
        objects = manager.reserve_write(others, description)
        for memory in objects.values():
            memory.tensor.fill_(7)
        hang.released.set()
        wait(lambda: not adapter._loads._running)
        assert all(bool((memory.tensor == 7).all()) for memory in objects.values())
        faulty.before = lambda method: None
        manager.finish_write(others)
        clear(manager)
        assert equal(fetch(manager, keys, description, layout), expected)


def test_all_threads_held_up_answers_at_once(toy, faulty):
    small, layout = layout_of("small", CHUNK)
    keys, counted = keys_of("small", TOKENS, CHUNK), Counted()
    with toy.manager(load_seconds=0.3) as (manager, _):
        pages = prepared(toy, manager)
        hang = faulty.before = Hang("read")
        for _ in range(4):
            assert fetch(manager, keys, small, layout) == []
        started = time.monotonic()
        assert fetch(manager, keys, small, layout) == []
        assert time.monotonic() - started < 0.25
        assert counted("kvxfer_errors_total", call="lmcache_load_overload") == 1
        hang.released.set()
        faulty.before = lambda method: None
        wait(lambda: equal(fetch(manager, keys, small, layout), pages))


def test_a_lookup_that_never_finishes_is_a_miss(toy, faulty):
    small, layout = layout_of("small", CHUNK)
    keys, counted = keys_of("small", TOKENS, CHUNK), Counted()
    with toy.manager(lookup_seconds=0.5) as (manager, _):
        pages = prepared(toy, manager)
        hang = faulty.before = Hang("exists")
        assert fetch(manager, keys, small, layout) == []
        assert counted("kvxfer_errors_total", call="lmcache_lookup_timeout") == 1
        hang.released.set()
        faulty.before = lambda method: None
        assert equal(fetch(manager, keys, small, layout), pages)


def test_a_store_task_that_never_finishes_stores_what_it_was_given(toy, faulty):
    """LMCache takes the memory back and fills it with something else before the store answers."""
    small, layout = layout_of("small", CHUNK)
    keys = keys_of("small", TOKENS, CHUNK)
    pages, counted = random_pages(layout, CHUNKS), Counted()
    with toy.manager(store_seconds=0.5) as (manager, adapter):
        fetch(manager, keys, small, layout)
        wait(lambda: adapter.report_status()["engines"])
        hang = faulty.before = Hang("write")
        write(manager, keys, small, layout, pages)
        wait(lambda: counted("kvxfer_errors_total", call="lmcache_store_timeout") == 1)
        clear(manager)
        others = [dataclasses.replace(key, cache_salt="other") for key in keys]
        for memory in manager.reserve_write(others, small).values():
            memory.tensor.fill_(7)
        hang.released.set()
        faulty.before = lambda method: None
        manager.finish_write(others)
        wait(lambda: not adapter._stores._running)
        clear(manager)
        blocks = fetch(manager, keys, small, layout)
        assert equal(blocks, pages[: len(blocks)])
        assert blocks


def test_a_store_that_dies_between_lookup_and_load(toy, faulty):
    small, layout = layout_of("small", CHUNK)
    large, target = layout_of("large", CHUNK)
    keys, counted = keys_of("small", TOKENS, CHUNK), Counted()

    def dead(method):
        if method in ("read", "read_record"):
            raise OSError(5, "the disk is gone")

    with toy.manager() as (manager, _):
        fetch(manager, keys_of("large", TOKENS, CHUNK), large, target)
        pages = prepared(toy, manager)
        faulty.before = dead
        assert fetch(manager, keys, small, layout) == []
        assert fetch(manager, keys_of("large", TOKENS, CHUNK), large, target) == []
        assert counted.blocks("missed", "store_error") == 2 * CHUNKS
        assert manager.report_status()["is_healthy"]
        faulty.before = lambda method: None
        assert equal(fetch(manager, keys, small, layout), pages)


def test_an_engine_that_came_while_the_store_was_down_is_attached_later(toy, faulty, monkeypatch):
    small, layout = layout_of("small", CHUNK)
    keys = keys_of("small", TOKENS, CHUNK)

    def dead(method):
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(attach, "RETRY_SECONDS", 0.2)
    with toy.manager() as (manager, adapter):
        faulty.before = dead
        assert fetch(manager, keys, small, layout) == []
        assert refusals(adapter) == {"store"}
        faulty.before = lambda method: None
        time.sleep(0.3)
        pages = prepared(toy, manager)
        assert equal(fetch(manager, keys, small, layout), pages)


def test_a_store_that_could_not_be_opened_at_start_is_opened_later(toy, monkeypatch, caplog):
    small, layout = layout_of("small", CHUNK)
    keys, counted = keys_of("small", TOKENS, CHUNK), Counted()
    (toy.folder / "store").write_text("a file where the folder should be")
    monkeypatch.setattr(attach, "RETRY_SECONDS", 0.2)
    with toy.manager() as (manager, adapter):
        for _ in range(3):
            assert fetch(manager, keys, small, layout) == []
            time.sleep(0.3)
        assert refusals(adapter) == {"store"}
        assert not adapter.report_status()["is_healthy"]
        assert counted.now("kvxfer_store_up", store="local") == 0
        assert counted.blocks("missed", "store_error") == 3 * CHUNKS
        lines = [r.getMessage() for r in caplog.records if "(store)" in r.getMessage()]
        assert len(lines) == 2  # at the start, and once for the engine
        (toy.folder / "store").unlink()
        pages = prepared(toy, manager)
        assert equal(fetch(manager, keys, small, layout), pages)
        assert refusals(adapter) == set()
        assert adapter.report_status()["is_healthy"]
        assert counted.now("kvxfer_conversion_refused", reason="store") == 0
        wait(lambda: counted.now("kvxfer_store_up", store="local") == 1)
    assert any("answers again" in r.getMessage() for r in caplog.records)


def test_lookups_while_an_engine_is_attached_are_counted(toy, monkeypatch):
    """Digesting weights takes minutes; the denominator of a hit rate has these, too."""
    small, layout = layout_of("small", CHUNK)
    large, target = layout_of("large", CHUNK)
    keys, counted, digested = keys_of("small", TOKENS, CHUNK), Counted(), threading.Event()

    def slow(path, revision=None):
        if str(path).endswith("small"):
            digested.wait(20)
        return toy.describe(path, revision)

    monkeypatch.setattr(facts, "describe", slow)
    with toy.manager(lookup_seconds=0.4) as (manager, _):
        assert fetch(manager, keys, small, layout) == []
        assert counted.blocks("missed", "attaching") == CHUNKS
        assert counted("kvxfer_lookups_total", target="small") == 1
        # One model that takes long, or cannot be read, does not hold up the others.
        assert fetch(manager, keys_of("large", TOKENS, CHUNK), large, target) == []
        assert counted.blocks("missed", "absent") == CHUNKS
        digested.set()


def test_a_folder_that_is_removed_under_the_server(toy):
    small, layout = layout_of("small", CHUNK)
    keys = keys_of("small", TOKENS, CHUNK)
    with toy.manager() as (manager, _):
        prepared(toy, manager)
        shutil.rmtree(toy.folder / "store")
        assert fetch(manager, keys, small, layout) == []
        assert manager.report_status()["is_healthy"]


def test_a_folder_that_goes_and_comes_back_is_said_once_each(toy, monkeypatch, caplog):
    monkeypatch.setattr(store_gauges, "REFRESH_SECONDS", 0.1)
    small, layout = layout_of("small", CHUNK)
    keys, counted = keys_of("small", TOKENS, CHUNK), Counted()
    others = keys_of("small", TOKENS[1:], CHUNK)

    def up():
        return counted.now("kvxfer_store_up", store="local")

    with toy.manager() as (manager, _):
        pages = prepared(toy, manager)
        (toy.folder / "store").rename(toy.folder / "away")
        wait(lambda: up() == 0)
        missed = counted.blocks("missed", "store_error")
        assert fetch(manager, others, small, layout) == []
        assert counted.blocks("missed", "store_error") == missed + len(others)
        time.sleep(0.5)
        assert up() == 0
        (toy.folder / "away").rename(toy.folder / "store")
        wait(lambda: up() == 1)
        assert equal(fetch(manager, keys, small, layout), pages)
    lines = [r.getMessage() for r in caplog.records if "store is " in r.getMessage()]
    assert len(lines) == 2
    assert f"{toy.folder}/store: the folder was removed while in use; put it back" in lines[0]
    assert "up again" in lines[1]


def test_damaged_bytes_end_the_prefix(toy):
    small, layout = layout_of("small", CHUNK)
    keys, counted = keys_of("small", TOKENS, CHUNK), Counted()
    with toy.manager() as (manager, _):
        pages = prepared(toy, manager)
        name = keys[2].chunk_hash.hex().encode()
        files = [file for file in (toy.folder / "store").rglob("*") if file.is_file()]
        named = [file for file in files if name in file.read_bytes()[:4096]]
        named = [file for file in named if file.read_bytes().startswith(MAGIC)]
        assert named
        for file in named:
            raw = bytearray(file.read_bytes())
            raw[-10] ^= 1
            file.write_bytes(raw)
        assert equal(fetch(manager, keys, small, layout), pages[:2])
    # Two of the missed blocks stand behind the damaged one.
    assert counted.blocks("missed", "corrupt") == 1, counted.outcomes()


def test_many_requests_at_once(toy):
    small, layout = layout_of("small", CHUNK)
    large, target = layout_of("large", CHUNK)
    prompts = [[(seed * 131 + 7 * i) % 900 for i in range(CHUNK * CHUNKS)] for seed in range(8)]
    with toy.manager() as (manager, adapter):
        stored = [random_pages(layout, CHUNKS, seed) for seed in range(len(prompts))]
        for tokens, pages in zip(prompts, stored, strict=True):
            store(manager, keys_of("small", tokens, CHUNK), small, layout, pages)
        wrong = []

        def ask(tokens, pages):
            got = fetch(manager, keys_of("large", tokens, CHUNK), large, target)
            if not equal(got, toy.converted(pages)):
                wrong.append(tokens[0])

        pairs = list(zip(prompts, stored, strict=True))
        threads = [threading.Thread(target=ask, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        waiting = {"stores": 0, "lookups": 0, "loads": 0}
        assert adapter.report_status()["waiting"] == waiting


# what turns conversion off: stored and served plainly


def refusals(adapter):
    return {reason for row in adapter.report_status()["engines"] for reason in row["refusals"]}


def serves_plainly_and_converts_nothing(
    toy, kind=Kind.SPLIT, dtype=torch.float32, block=32, **keys
):
    small, layout = layout_of("small", 64, kind, dtype, block=block)
    large, target = layout_of("large", 64, kind, dtype, block=block)
    tokens, counted = [(17 * i) % 1000 for i in range(64 * CHUNKS)], Counted()
    own, others = (
        [dataclasses.replace(key, **keys) for key in keys_of(role, tokens, 64)]
        for role in ("small", "large")
    )
    pages = random_pages(layout, CHUNKS)
    pages = [type(page)(page.keys.to(dtype), page.values.to(dtype)) for page in pages]
    with toy.manager(block_size=block) as (manager, adapter):
        store(manager, own, small, layout, pages)
        assert equal_bytes(fetch(manager, own, small, layout), pages)
        assert fetch(manager, others, large, target) == []
        found = refusals(adapter)
    assert counted.blocks("converted") == 0
    for reason in found:
        assert counted.now("kvxfer_conversion_refused", reason=reason) >= 1
    return found


def equal_bytes(blocks, expected):
    def raw(page):
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in (page.keys, page.values)])

    return len(blocks) == len(expected) and all(
        torch.equal(raw(a), raw(b)) for a, b in zip(blocks, expected, strict=True)
    )


def stores_nothing(toy, adapter, manager, block):
    """Whatever an engine with this block size computes, and which reasons are given."""
    small, layout = layout_of("small", 64, Kind.PACKED, block=block)
    keys = keys_of("small", [(17 * i) % 1000 for i in range(64 * CHUNKS)], 64)
    counted = Counted()
    assert fetch(manager, keys, small, layout) == []
    write(manager, keys, small, layout, random_pages(layout, CHUNKS))
    wait(lambda: adapter.report_status()["waiting"]["stores"] == 0)
    clear(manager)
    assert fetch(manager, keys, small, layout) == []
    assert counted("kvxfer_written_blocks_total") == 0
    return refusals(adapter)


def test_packed_blocks_of_unknown_size(toy):
    """Neither the manifest's word nor none is enough: another size has equal keys."""
    for fields in ({}, {"vllm_cpu_block_tokens": 32}):
        toy.write_manifest(**fields)
        with toy.manager() as (manager, adapter):
            assert stores_nothing(toy, adapter, manager, 32) == {"packing"}


def test_vllm_restarted_with_another_block_size(toy):
    """LMCache's own memory may hold chunks of both."""
    small, layout = layout_of("small", 64, Kind.PACKED)
    with toy.manager(block_size=32) as (manager, adapter):
        keys = keys_of("small", TOKENS[:64] * CHUNKS, 64)
        store(manager, keys, small, layout, random_pages(layout, len(keys)))
        adapter.attachments.block_sizes.ask(lambda: [("small", 1, 64)])
        assert stores_nothing(toy, adapter, manager, 64) == {"packing"}


def test_another_block_size_than_the_manifest_says(toy, caplog):
    toy.write_manifest(vllm_cpu_block_tokens=64)
    assert serves_plainly_and_converts_nothing(toy, Kind.PACKED, block=32) == {"packing"}
    (line,) = {r.getMessage() for r in caplog.records if "models.small" in r.getMessage()}
    for part in ("family.yaml", "vllm_cpu_block_tokens: 64", "--block-size 32"):
        assert part in line


@pytest.mark.parametrize(("stored_by", "read_by"), [(64, 32), (32, 64)])
def test_a_wrong_number_in_the_manifest_spoils_nothing_for_later(toy, stored_by, read_by):
    """Blocks are what LMCache's server says they are, whatever the manifest says meanwhile."""
    keys = keys_of("small", [(17 * i) % 1000 for i in range(64 * CHUNKS)], 64)
    others = keys_of("large", [(17 * i) % 1000 for i in range(64 * CHUNKS)], 64)
    large, target = layout_of("large", 64, Kind.PACKED, block=read_by)
    pages = random_pages(layout_of("small", 64)[1], CHUNKS)
    for block, given in ((stored_by, read_by), (read_by, read_by)):
        toy.write_manifest(vllm_cpu_block_tokens=given)
        small, layout = layout_of("small", 64, Kind.PACKED, block=block)
        with toy.manager(block_size=block) as (manager, _):
            if block == stored_by:
                store(manager, keys, small, layout, pages)
            assert equal(fetch(manager, keys, small, layout), pages)
            if block == read_by:
                assert equal(fetch(manager, others, large, target), toy.converted(pages))


def test_blocks_of_a_size_that_is_packed_otherwise_are_bytes(toy):
    """And those of one size are never read with another."""
    keys = keys_of("small", [(17 * i) % 1000 for i in range(64 * CHUNKS)], 64)
    stored = {}
    for block in (16, 8):
        small, layout = layout_of("small", 64, Kind.PACKED, block=block)
        stored[block] = random_pages(layout, CHUNKS, block)
        with toy.manager(block_size=block) as (manager, adapter):
            store(manager, keys, small, layout, stored[block])
            assert refusals(adapter) == {"packing"}
    for block, pages in stored.items():
        small, layout = layout_of("small", 64, Kind.PACKED, block=block)
        with toy.manager(block_size=block) as (manager, _):
            assert equal(fetch(manager, keys, small, layout), pages)


def test_packed_blocks_where_the_packing_depends_on_the_machine(toy, monkeypatch):
    with monkeypatch.context() as machine:
        machine.setattr(facts, "_cpu_flags", lambda: {"amx_tile"})
        found = serves_plainly_and_converts_nothing(toy, Kind.PACKED, torch.bfloat16)
    assert "packing" in found
    # On another machine of the same store these are no blocks of anybody's.
    monkeypatch.setattr(facts, "_cpu_flags", set)
    keys = keys_of("small", [(17 * i) % 1000 for i in range(64 * CHUNKS)], 64)
    small, layout = layout_of("small", 64, Kind.PACKED, torch.bfloat16)
    with toy.manager(block_size=32) as (manager, _):
        assert fetch(manager, keys, small, layout) == []


def test_fp8_without_scales(toy):
    found = serves_plainly_and_converts_nothing(toy, dtype=torch.float8_e4m3fn)
    assert "kv_dtype" in found


def test_latent_attention(toy):
    for role in ("small", "large"):
        changed = {"attention": AttentionKind.MLA, "refusal": "latents"}
        toy.changed[role] = changed
    assert "mla" in serves_plainly_and_converts_nothing(toy)


def test_another_geometry_than_the_files_say(toy):
    for role in ("small", "large"):
        toy.changed[role] = {"kv_heads": 2 * HEADS}
    assert "geometry" in serves_plainly_and_converts_nothing(toy)


def test_models_outside_the_family(toy):
    toy.write_manifest(models=("other",))
    assert "not_in_family" in serves_plainly_and_converts_nothing(toy)


def test_an_untested_lmcache(toy, monkeypatch):
    monkeypatch.setattr(facts, "lmcache_version", lambda: "0.6.0")
    assert "lmcache_version" in serves_plainly_and_converts_nothing(toy)


def test_weak_hashes(toy):
    small, layout = layout_of("small", CHUNK)
    large, target = layout_of("large", CHUNK)
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    own, others = (
        [ObjectKey(bytes([n]) * 8, role, rank) for n in range(CHUNKS)]
        for role in ("small", "large")
    )
    pages = random_pages(layout, CHUNKS)
    with toy.manager() as (manager, adapter):
        store(manager, own, small, layout, pages)
        assert equal(fetch(manager, own, small, layout), pages)
        assert fetch(manager, others, large, target) == []
        assert "hashes" in refusals(adapter)
    with toy.manager() as (manager, _):  # not for another process, whose hashes may differ
        assert fetch(manager, own, small, layout) == []


def test_cache_blend(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmcache.v1.multiprocess.modules.blend", object())
    assert "cache_blend" in serves_plainly_and_converts_nothing(toy)


def test_places_that_contradict_one_another(toy):
    """Should LMCache ever list a part of a prompt, chunks would seem to stand elsewhere."""
    small, layout = layout_of("small", CHUNK)
    large, target = layout_of("large", CHUNK)
    pages, keys = random_pages(layout, CHUNKS), keys_of("small", TOKENS, CHUNK)
    with toy.manager() as (manager, adapter):
        store(manager, keys, small, layout, pages)
        fetch(manager, keys[2:], small, layout)
        assert "positions" in refusals(adapter)
        assert fetch(manager, keys_of("large", TOKENS, CHUNK), large, target) == []
        assert equal(fetch(manager, keys, small, layout), pages)


def test_a_wrong_manifest_leaves_the_server_working(toy):
    small, layout = layout_of("small", CHUNK)
    (toy.folder / "family.yaml").write_text("family: 3\n")
    with toy.manager() as (manager, adapter):
        keys = keys_of("small", TOKENS, CHUNK)
        assert fetch(manager, keys, small, layout) == []
        write(manager, keys, small, layout, random_pages(layout, CHUNKS))
        clear(manager)
        assert fetch(manager, keys, small, layout) == []
        assert not adapter.report_status()["is_healthy"]


@pytest.mark.parametrize("params", [{"famly": "x"}, {"load_seconds": 0}, {"load_seconds": "1"}])
def test_wrong_parameters_leave_the_server_working(toy, params):
    small, layout = layout_of("small", CHUNK)
    with toy.manager(**params) as (manager, adapter):
        assert fetch(manager, keys_of("small", TOKENS, CHUNK), small, layout) == []
        assert not adapter.report_status()["is_healthy"]


def test_object_groups_beyond_the_first_are_bytes(toy):
    """Two groups of one model, stored side by side."""
    small, layout = layout_of("small", CHUNK)
    keys = keys_of("small", TOKENS, CHUNK)
    second = [dataclasses.replace(key, object_group_id=1) for key in keys]
    pages, counted = random_pages(layout, CHUNKS, 1), Counted()
    with toy.manager() as (manager, adapter):
        put(manager, second, small, layout, pages)
        clear(manager)
        adapter_result = []
        task = adapter.submit_lookup_and_lock_task(second, {1: small})
        wait(
            lambda: (
                adapter_result.append(adapter.query_lookup_and_lock_result(task))
                or adapter_result[-1] is not None
            )
        )
        assert adapter_result[-1].popcount() == CHUNKS
        assert "object_groups" in refusals(adapter)
        task = adapter.submit_lookup_and_lock_task(keys, {0: small})
        wait(
            lambda: (
                adapter_result.append(adapter.query_lookup_and_lock_result(task))
                or adapter_result[-1] is not None
            )
        )
        assert adapter_result[-1].popcount() == 0
    assert counted("kvxfer_written_blocks_total", kind="unplaced") == CHUNKS
