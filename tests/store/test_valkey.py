"""Blocks in a real Valkey: the conformance suite over three set-ups, and what only it can do."""

import time

import pytest
import valkey_servers
from valkey.cluster import ValkeyCluster

from kvstore_xfer.blocks.header import header_bytes
from kvstore_xfer.errors import StoreError
from kvstore_xfer.store.base import ReadStatus, WriteStatus
from kvstore_xfer.store.remote.driver import RemoteError
from kvstore_xfer.store.testing import BlockStoreTests, block_bytes, block_key, get, put
from kvstore_xfer.store.url import open_store


def hash_name(folder, key):
    return f"kvxfer:{folder.name}:{{{key}}}"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    with valkey_servers.single(tmp_path_factory.mktemp("valkey")) as server:
        yield f"valkey://localhost:{server.port}?timeout=30s", server.client


@pytest.fixture(scope="module")
def with_tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valkey")
    (folder / "password").write_text(valkey_servers.PASSWORD)
    with valkey_servers.with_tls(folder) as server:
        url = f"valkeys://{valkey_servers.USER}@localhost:{server.port}?timeout=30s"
        url += f"&ca={server.certificate}&password_file={folder / 'password'}"
        yield url, server.client


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with valkey_servers.cluster(tmp_path_factory.mktemp("valkey")) as servers:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        client = ValkeyCluster("127.0.0.1", servers[0].port)
        yield f"valkey://{hosts}?timeout=30s", client
        client.close()


class ValkeyTests(BlockStoreTests):
    """Each test has a prefix of its own on the one server of its class."""

    def make_store(self, folder):
        return open_store(f"{self.url}&prefix=kvxfer:{folder.name}:")

    def raw_get(self, folder, key):
        fields = self.client.hgetall(hash_name(folder, key))
        numbers = sorted(int(name) for name in fields if name.isdigit())
        return fields[b"h"] + b"".join(fields[str(n).encode()] for n in numbers)

    def raw_put(self, folder, key, raw):
        name = hash_name(folder, key)
        numbers = [field for field in self.client.hkeys(name) if field.isdigit()]
        if numbers:
            self.client.hdel(name, *numbers)
        try:
            cut = header_bytes(raw)
        except ValueError:
            cut = len(raw)
        self.client.hset(name, mapping={"h": raw[:cut], "0": raw[cut:]})


class TestSingle(ValkeyTests):
    @pytest.fixture(autouse=True)
    def _server(self, single):
        self.url, self.client = single


class TestTlsWithPassword(ValkeyTests):
    @pytest.fixture(autouse=True)
    def _server(self, with_tls):
        self.url, self.client = with_tls


class TestCluster(ValkeyTests):
    @pytest.fixture(autouse=True)
    def _server(self, cluster):
        self.url, self.client = cluster

    def test_blocks_are_spread_over_the_nodes(self, tmp_path):
        with self.make_store(tmp_path) as store:
            for number in range(30):
                put(store, block_key(number), b"x")
            sizes = [
                sum(
                    1
                    for name in self.client.scan_iter(target_nodes=node)
                    if name.startswith(f"kvxfer:{tmp_path.name}:".encode())
                )
                for node in self.client.get_primaries()
            ]
        assert sum(sizes) == 30
        assert min(sizes) > 0


@pytest.fixture
def server(tmp_path):
    with valkey_servers.single(tmp_path) as server:
        yield server


def test_a_large_block_is_split(server):
    with open_store(f"valkey://localhost:{server.port}?part_size=64KiB") as store:
        put(store, block_key(1), block_bytes(1, 300_000))
        lengths = [server.client.hstrlen(f"kvxfer:{{{block_key(1)}}}", n) for n in range(6)]
        assert get(store, block_key(1)).payload == block_bytes(1, 300_000)
    assert lengths == [65536] * 4 + [300_000 - 4 * 65536, 0]


def test_blocks_expire(server):
    with open_store(f"valkey://localhost:{server.port}?ttl=24h") as store:
        put(store, block_key(1), b"x")
        assert 86_000 < server.client.ttl(f"kvxfer:{{{block_key(1)}}}") <= 86_400
    with open_store(f"valkey://localhost:{server.port}?ttl=100ms") as store:
        put(store, block_key(2), b"x")
        assert store.exists([block_key(2)]) == [True]
        time.sleep(0.15)
        assert store.exists([block_key(2)]) == [False]
    with open_store(f"valkey://localhost:{server.port}") as store:
        put(store, block_key(3), b"x")
    assert server.client.ttl(f"kvxfer:{{{block_key(3)}}}") == -1


def test_a_writer_that_dies_half_way_leaves_only_what_expires(server, monkeypatch):
    store = open_store(f"valkey://localhost:{server.port}")
    driver = store._link.driver
    real = driver._pipeline

    def die(commands, **options):
        commands = list(commands)
        if commands and commands[0][0] in ("RENAME", "RENAMENX"):
            raise RemoteError("gone")
        return real(commands, **options)

    monkeypatch.setattr(driver, "_pipeline", die)
    assert put(store, block_key(1), b"x") is WriteStatus.ERROR
    (left,) = server.client.keys()
    assert 0 < server.client.ttl(left) <= 60
    assert list(store.scan()) == []
    store.close()


def test_a_full_server_is_full_and_is_left_alone(tmp_path):
    with (
        valkey_servers.single(tmp_path, "--maxmemory", "40mb") as server,
        open_store(f"valkey://localhost:{server.port}") as store,
    ):
        statuses = [put(store, block_key(n), block_bytes(n, 4 << 20)) for n in range(20)]
        stored = [n for n, status in enumerate(statuses) if status is WriteStatus.STORED]
        assert set(statuses) == {WriteStatus.STORED, WriteStatus.FULL}
        assert len(stored) >= 4
        assert [get(store, block_key(n)).payload == block_bytes(n, 4 << 20) for n in stored] == [
            True
        ] * len(stored)
        assert put(store, block_key(98), block_bytes(98, 4 << 20)) is WriteStatus.FULL
        before = server.client.info("stats")["total_net_input_bytes"]
        assert put(store, block_key(99), block_bytes(99, 4 << 20)) is WriteStatus.FULL
        assert server.client.info("stats")["total_net_input_bytes"] - before < 10_000
        assert store.stats().capacity_bytes == 40 << 20
        store.delete([block_key(n) for n in stored])
        time.sleep(1.1)
        assert put(store, block_key(100), b"x") is WriteStatus.STORED


def test_a_server_that_evicts_makes_blocks_missing_never_half(tmp_path):
    options = ("--maxmemory", "40mb", "--maxmemory-policy", "allkeys-lru")
    with (
        valkey_servers.single(tmp_path, *options) as server,
        open_store(f"valkey://localhost:{server.port}?part_size=1MiB") as store,
    ):
        for n in range(30):
            assert put(store, block_key(n), block_bytes(n, 4 << 20)) is WriteStatus.STORED
        results = [get(store, block_key(n)) for n in range(30)]
        assert {r.status for r in results} == {ReadStatus.OK, ReadStatus.MISSING}
        assert store.stats().evicted_blocks > 10
        assert store.stats().corrupt_blocks == 0


def test_a_damaged_block_that_was_replaced_meanwhile_is_kept(server):
    with open_store(f"valkey://localhost:{server.port}") as store:
        put(store, block_key(1), b"old")
        driver = store._link.driver
        version = driver.fetch([block_key(1)])[0].version
        put(store, block_key(1), b"new", overwrite=True)
        driver.remove_version(block_key(1), version)
        assert get(store, block_key(1)).payload == b"new"


def test_a_server_killed_and_restarted(server):
    with open_store(f"valkey://localhost:{server.port}?timeout=500ms") as store:
        put(store, block_key(1), b"x")
        server.kill()
        assert get(store, block_key(1)).status is ReadStatus.ERROR
        assert store.exists([block_key(1)]) == [False]
        assert put(store, block_key(2), b"x") is WriteStatus.ERROR
        assert not store.available
        with pytest.raises(StoreError, match=r"localhost.*check that it runs"):
            list(store.scan())
        server.start()
        assert put_until_stored(store, 3) < 10
        assert store.available
        assert get(store, block_key(1)).status is ReadStatus.MISSING


def put_until_stored(store, number):
    start = time.monotonic()
    while put(store, block_key(number), b"x") is not WriteStatus.STORED:
        assert time.monotonic() < start + 20
        time.sleep(0.05)
    return time.monotonic() - start


def test_a_partitioned_server_costs_its_time_out_and_then_nothing(server):
    with open_store(f"valkey://localhost:{server.port}?timeout=300ms") as store:
        put(store, block_key(1), b"x")
        server.pause()
        try:
            times = []
            for _ in range(12):
                start = time.monotonic()
                assert get(store, block_key(1)).status is ReadStatus.ERROR
                times.append(time.monotonic() - start)
        finally:
            server.resume()
        assert max(times) < 0.6
        assert sum(times) < 2
        put_until_stored(store, 2)
        assert get(store, block_key(1)).payload == b"x"


def test_pins_are_the_engines_matter(server):
    with open_store(f"valkey://localhost:{server.port}") as store:
        assert store.pin([block_key(1)], 1.0) is False


def test_a_lookup_after_a_fork_has_connections_of_its_own(server):
    with open_store(f"valkey://localhost:{server.port}") as store:
        put(store, block_key(1), b"x")
        store._link.pid = -1  # as in a child
        assert get(store, block_key(1)).payload == b"x"


def test_no_server_is_one_line(tmp_path):
    with pytest.raises(StoreError, match=r"^store 'valkey://localhost:1': .*") as caught:
        open_store("valkey://localhost:1")
    assert "\n" not in str(caught.value)


def test_a_wrong_password_is_one_line_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KVXFER_VALKEY_PASSWORD", "wrong-and-secret")
    with valkey_servers.single(tmp_path, "--requirepass", "right", password="right") as server:
        with pytest.raises(StoreError, match="store 'valkey://localhost") as caught:
            open_store(f"valkey://localhost:{server.port}")
        assert "wrong-and-secret" not in str(caught.value)
        monkeypatch.setenv("KVXFER_VALKEY_PASSWORD", "right")
        open_store(f"valkey://localhost:{server.port}").close()
