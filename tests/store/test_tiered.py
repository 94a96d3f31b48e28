"""Levels as one store: the conformance suite, promotion, write-back, a far level that leaves."""

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import valkey_servers
from test_local import payload_file

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.family import load_family
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteStatus
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import (
    BlockStoreTests,
    block_bytes,
    block_key,
    get,
    put,
    write_request,
)
from kvstore_xfer.store.tiered import mover
from kvstore_xfer.store.tiered.store import TieredStore
from kvstore_xfer.store.tiered.striped import StripedStore
from kvstore_xfer.store.url import check_url, local_folders, open_store


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with valkey_servers.single(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def near(folder):
    levels = [LocalStore(folder / name, min_free_bytes=0) for name in ("memory", "disk")]
    return TieredStore(levels)


def with_far(folder, port, parameters="timeout=10s"):
    levels = "|".join(f"local://{folder / name}?min_free=0" for name in ("memory", "disk"))
    return open_store(f"{levels}|valkey://127.0.0.1:{port}?prefix={folder.name}:&{parameters}")


class TestNearLevels(BlockStoreTests):
    def make_store(self, folder):
        return near(folder)

    def raw_get(self, folder, key):
        return payload_file(folder / "disk", key).read_bytes()

    def raw_put(self, folder, key, raw):
        with LocalStore(folder / "memory", min_free_bytes=0) as memory:
            memory.delete([key])
        payload_file(folder / "disk", key).write_bytes(raw)


class TestStriped(BlockStoreTests):
    def make_store(self, folder):
        stores = [LocalStore(folder / str(n), min_free_bytes=0) for n in range(3)]
        return StripedStore(stores)

    def file(self, folder, key):
        (found,) = folder.glob(f"*/blocks/*/{payload_file_name(folder, key)}.*")
        return found

    def raw_get(self, folder, key):
        return self.file(folder, key).read_bytes()

    def raw_put(self, folder, key, raw):
        self.file(folder, key).write_bytes(raw)

    def test_blocks_are_spread_and_one_disk_more_moves_few(self, tmp_path):
        with self.make_store(tmp_path) as store:
            for n in range(300):
                put(store, block_key(n), b"x")
            shares = [part.stats().blocks for part in store._stores]
            assert min(shares) > 60
        with StripedStore([LocalStore(tmp_path / str(n), min_free_bytes=0) for n in range(4)]) as s:
            assert sum(s.exists([block_key(n) for n in range(300)])) > 180


def payload_file_name(folder, key):
    import hashlib

    return hashlib.sha256(key.encode()).hexdigest()


def test_a_read_from_below_is_promoted(tmp_path):
    with near(tmp_path) as store:
        put(store, block_key(1), block_bytes(1))
        memory, disk = store._near
        memory.delete([block_key(1)])
        memory_of_caller = bytearray(5000)
        (result,) = store.read([ReadRequest(block_key(1), [memoryview(memory_of_caller)])])
        assert (result.status, bytes(memory_of_caller)) == (ReadStatus.OK, block_bytes(1))
        memory_of_caller[:] = bytes(5000)  # the engine's page is used for something else
        assert store.flush()
        assert get(memory, block_key(1)).payload == block_bytes(1)
        assert disk.exists([block_key(1)]) == [True]


def test_a_block_damaged_near_is_healed_from_far(tmp_path, server):
    with with_far(tmp_path, server.port) as store:
        put(store, block_key(1), block_bytes(1))
        assert store.flush()
        store._near[0].delete([block_key(1)])
        path = payload_file(tmp_path / "disk", block_key(1))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        assert get(store, block_key(1)).payload == block_bytes(1)
        assert store.flush()
        assert get(store._near[1], block_key(1)).payload == block_bytes(1)


def test_another_machine_reads_what_was_written_here(tmp_path, server):
    with with_far(tmp_path, server.port) as here:
        for n in range(20):
            put(here, block_key(n), block_bytes(n, 100_000))
        assert here.flush()
    shutil.rmtree(tmp_path / "memory")
    shutil.rmtree(tmp_path / "disk")
    with with_far(tmp_path, server.port) as there:
        assert there.exists([block_key(n) for n in range(21)]) == [True] * 20 + [False]
        results = there.read([ReadRequest(block_key(n)) for n in range(20)])
        assert [r.payload for r in results] == [block_bytes(n, 100_000) for n in range(20)]
        assert there.flush()
        assert there._near[1].stats().blocks == 20


def test_the_far_server_goes_away_and_comes_back(tmp_path):
    with (
        valkey_servers.single(tmp_path / "valkey") as server,
        with_far(tmp_path, server.port, "timeout=300ms") as store,
    ):
        put(store, block_key(0), b"x")
        assert store.flush()
        server.kill()
        longest = 0.0
        for n in range(1, 60):
            start = time.monotonic()
            assert put(store, block_key(n), block_bytes(n)) is WriteStatus.STORED
            assert get(store, block_key(n)).payload == block_bytes(n)
            assert store.exists([block_key(n), block_key(1000 + n)]) == [True, False]
            longest = max(longest, time.monotonic() - start)
        assert longest < 1.5
        server.start()
        assert store.flush(30)
        assert store._far[0].exists([block_key(n) for n in range(1, 60)]) == [True] * 59
        assert store.dropped == {}


def test_a_block_deleted_while_the_far_server_is_away_stays_deleted(tmp_path):
    with (
        valkey_servers.single(tmp_path / "valkey") as server,
        with_far(tmp_path, server.port, "timeout=300ms") as store,
    ):
        put(store, block_key(1), b"x")
        assert store.flush()
        server.pause()
        assert store.delete([block_key(1)]) == [False]  # not yet gone everywhere
        server.resume()
        assert store.exists([block_key(1)]) == [False]
        assert get(store, block_key(1)).status is ReadStatus.MISSING
        assert store.flush(30)
        assert store._far[0].exists([block_key(1)]) == [False]


def test_what_the_queue_cannot_hold_is_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(mover, "QUEUED_KEYS", 5)
    monkeypatch.setattr(mover, "_CLOSE_SECONDS", 0.2)
    with (
        valkey_servers.single(tmp_path / "valkey") as server,
        with_far(tmp_path, server.port, "timeout=100ms") as store,
    ):
        server.kill()
        for n in range(40):
            assert put(store, block_key(n), b"x") is WriteStatus.STORED
        assert store.dropped["upload"] >= 40 - 5 - 16
        assert store.exists([block_key(n) for n in range(40)]) == [True] * 40


def test_an_overwritten_block_leaves_no_old_version_in_any_level(tmp_path, server):
    with with_far(tmp_path, server.port) as store:
        for n in range(30):
            put(store, block_key(1), block_bytes(n), overwrite=True)
        assert store.flush()
        for level in (*store._near, *store._far):
            assert get(level, block_key(1)).payload in (block_bytes(29), None)
        assert get(store._far[0], block_key(1)).payload == block_bytes(29)


def test_a_full_disk_leaves_the_block_in_memory(tmp_path):
    memory = LocalStore(tmp_path / "memory", min_free_bytes=0)
    disk = LocalStore(tmp_path / "disk", min_free_bytes=0, max_bytes=4096)
    with TieredStore([memory, disk]) as store:
        assert put(store, block_key(1), block_bytes(1)) is WriteStatus.STORED
        assert get(store, block_key(1)).payload == block_bytes(1)


def test_a_batch_with_a_far_level_keeps_order(tmp_path, server):
    with with_far(tmp_path, server.port) as store:
        store.write([write_request(block_key(n), block_bytes(n)) for n in range(6)])
        assert store.flush()
        store._near[0].delete([block_key(n) for n in (0, 2, 4)])
        store._near[1].delete([block_key(n) for n in (0, 1)])
        results = store.read([ReadRequest(block_key(n)) for n in (5, 0, 9, 2, 1)])
        expected = [block_bytes(5), block_bytes(0), None, block_bytes(2), block_bytes(1)]
        assert [r.payload for r in results] == expected
        assert [row.key for row in store.scan()] == [block_key(n) for n in range(6)]


def test_shared_memory_is_seen_by_all_and_bounded(tmp_path):
    url = f"memory:?max_size=1MiB&name=test-{os.getpid()}"
    root = Path(f"/dev/shm/kvxfer-{os.getuid()}-test-{os.getpid()}")
    try:
        with open_store(url) as store:
            assert root.stat().st_mode & 0o077 == 0
            statuses = [put(store, block_key(n), block_bytes(n, 100_000)) for n in range(20)]
            assert set(statuses) == {WriteStatus.STORED}
            assert store.stats().bytes <= 1 << 20
            pid = os.fork()
            if not pid:
                os._exit(get(store, block_key(19)).payload != block_bytes(19, 100_000))
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        shutil.rmtree(root)


def test_a_large_batch_uses_all_folders_at_once(tmp_path, monkeypatch):
    """Each folder waits, in its own call, for the other's."""
    calls = {name: threading.Barrier(2, timeout=30) for name in ("read", "write")}
    for name, barrier in calls.items():
        original = getattr(LocalStore, name)

        def meeting(self, items, *, _barrier=barrier, _call=original, **options):
            _barrier.wait()
            return _call(self, items, **options)

        monkeypatch.setattr(LocalStore, name, meeting)
    payloads = [block_bytes(n, 2 << 20) for n in range(12)]
    requests = [write_request(block_key(n), payload) for n, payload in enumerate(payloads)]
    memory = [bytearray(2 << 20) for _ in payloads]
    reads = [ReadRequest(block_key(n), [memoryview(run)]) for n, run in enumerate(memory)]
    with StripedStore([LocalStore(tmp_path / n, min_free_bytes=0) for n in "ab"]) as store:
        assert set(store.write(requests)) == {WriteStatus.STORED}
        assert {result.status for result in store.read(reads)} == {ReadStatus.OK}
    assert memory == payloads


def test_levels_in_a_manifest_and_in_a_url(tmp_path):
    manifest = tmp_path / "family.yaml"
    text = "family: f\nstore:\n- local:near\n- local:///x?more=/y\nmodels: {m: {path: p}}\n"
    manifest.write_text(text)
    assert load_family(manifest).store == "local:near|local:///x?more=/y"
    folders = local_folders("memory:?name=m|local:x?more=/y | s3://bucket/p", tmp_path)
    memory = Path(f"/dev/shm/kvxfer-{os.getuid()}-m")
    assert folders == [memory, tmp_path / "x", Path("/y")]
    check_url("memory:?max_size=1GiB | local:///x | valkeys://h")
    with open_store(f"local://{tmp_path}/a?more={tmp_path}/b&max_size=2GiB&min_free=0") as store:
        assert isinstance(store, StripedStore)
        assert store.stats().capacity_bytes == 2 << 30
    manifest.write_text(text.replace("\n- local:near\n- local:///x?more=/y", " []"))
    with pytest.raises(ConfigError, match="store: "):
        load_family(manifest)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory:?name=../x", "expected memory:"),
        ("memory://x", "expected memory:"),
        ("memory:?max_size=0", "'max_size': must be more than 0"),
        ("local:///x|", "not a URL"),
        ("local:///x?more=/x", "'more': a folder is named twice"),
    ],
)
def test_a_wrong_url_is_named(url, message):
    with pytest.raises(ConfigError, match=message):
        check_url(url)


def test_a_far_level_above_a_near_one_is_refused(tmp_path, server):
    with pytest.raises(ConfigError, match="reorder them"):
        open_store(f"valkey://127.0.0.1:{server.port}|local://{tmp_path}")
