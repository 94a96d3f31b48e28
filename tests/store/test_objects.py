"""Blocks in object storage: the conformance suite against a real S3 API server, and its faults."""

import threading
import time
from urllib.parse import quote

import pytest
import s3_servers

from kvstore_xfer.errors import ConfigError, StoreError
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteStatus
from kvstore_xfer.store.remote import store as remote_store
from kvstore_xfer.store.remote.objects_url import options_of
from kvstore_xfer.store.testing import (
    BlockStoreTests,
    block_bytes,
    block_key,
    get,
    put,
    write_request,
)
from kvstore_xfer.store.url import check_url, open_store


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_servers.s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def _login(monkeypatch):
    for name, value in s3_servers.LOGIN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(server):
    proxy = s3_servers.Proxy(server)
    yield proxy
    proxy.close()


def open_at(endpoint, folder, parameters=""):
    return open_store(
        f"s3://{s3_servers.BUCKET}/{folder.name}?region=us-east-1&endpoint={quote(endpoint)}"
        + parameters
    )


class TestObjects(BlockStoreTests):
    listing_knows_created = False

    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def make_store(self, folder):
        return open_at(self.server.endpoint, folder, "&timeout=60s")

    def raw_get(self, folder, key):
        return bytes(self.server.objects().get(f"{folder.name}/{key}").bytes())

    def raw_put(self, folder, key, raw):
        self.server.objects().put(f"{folder.name}/{key}", raw)


def test_a_large_block_is_sent_in_parts(server, proxy, tmp_path):
    payload = block_bytes(1, 12 << 20)
    with open_at(proxy.endpoint, tmp_path, "&part_size=5MiB") as store:
        assert put(store, block_key(1), payload) is WriteStatus.STORED
        assert proxy.requests.count("PUT") == 2  # parts of 8 MiB
        assert proxy.requests.count("POST") == 2  # begin and complete
        assert put(store, block_key(1), block_bytes(2)) is WriteStatus.EXISTS
        assert put(store, block_key(1), payload[::-1]) is WriteStatus.EXISTS
        assert get(store, block_key(1)).payload == payload


def test_of_two_writers_at_once_the_first_wins(server, tmp_path, monkeypatch):
    """Both have seen that the block is not there."""
    with open_at(server.endpoint, tmp_path) as store:
        monkeypatch.setattr(store, "exists", lambda keys: [False] * len(keys))
        assert put(store, block_key(1), b"first") is WriteStatus.STORED
        assert put(store, block_key(1), b"second") is WriteStatus.EXISTS
        assert get(store, block_key(1)).payload == b"first"


def test_a_few_500s_are_retried(proxy, tmp_path):
    with open_at(proxy.endpoint, tmp_path) as store:
        proxy.failures = 2
        assert put(store, block_key(1), b"x") is WriteStatus.STORED
        proxy.failures = 2
        assert get(store, block_key(1)).payload == b"x"
        assert store.available


def test_endless_500s_are_errors_and_then_nothing_is_asked(proxy, tmp_path):
    with open_at(proxy.endpoint, tmp_path, "&timeout=1s") as store:
        put(store, block_key(1), b"x")
        proxy.failures = 10**9
        start = time.monotonic()
        for _ in range(10):
            assert get(store, block_key(1)).status is ReadStatus.ERROR
        assert time.monotonic() - start < 6
        assert not store.available
        asked = len(proxy.requests)
        assert get(store, block_key(1)).status is ReadStatus.ERROR
        assert len(proxy.requests) == asked
        proxy.failures = 0
        time.sleep(1.1)
        assert get(store, block_key(1)).payload == b"x"
        assert store.available


def test_a_slow_body_costs_the_time_out_and_no_more(proxy, tmp_path):
    with open_at(proxy.endpoint, tmp_path, "&timeout=500ms") as store:
        put(store, block_key(1), block_bytes(1))
        proxy.body_seconds = 5.0
        start = time.monotonic()
        assert get(store, block_key(1)).status is ReadStatus.ERROR
        assert time.monotonic() - start < 1.5
        proxy.body_seconds = 0.0
        assert get(store, block_key(1)).payload == block_bytes(1)


def test_a_batch_is_under_way_together(proxy, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_store, "LOOKUP_SECONDS", 20.0)
    keys = [block_key(n) for n in range(64)]
    payloads = [block_bytes(n) for n in range(64)]
    requests = [write_request(key, payload) for key, payload in zip(keys, payloads, strict=True)]
    with open_at(proxy.endpoint, tmp_path, "&timeout=20s") as store:
        calls = {
            "write": lambda: set(store.write(requests, overwrite=True)) == {WriteStatus.STORED},
            "exists": lambda: all(store.exists(keys)),
            "read": lambda: (
                [r.payload for r in store.read(list(map(ReadRequest, keys)))] == payloads
            ),
            "delete": lambda: all(store.delete(keys)),
        }
        proxy.think_seconds = 0.2
        for name, call in calls.items():
            proxy.most_at_once = 0
            assert call(), name
            assert proxy.most_at_once > 16, name


def test_one_failing_object_fails_alone(proxy, tmp_path):
    with open_at(proxy.endpoint, tmp_path) as store:
        store.write([write_request(block_key(n), block_bytes(n)) for n in range(8)])
        proxy.broken = f"{5:064x}"
        results = store.read([ReadRequest(block_key(n)) for n in range(8)])
        assert [n for n, r in enumerate(results) if r.status is ReadStatus.ERROR] == [5]
        assert [r.payload for r in results[:5]] == [block_bytes(n) for n in range(5)]
        proxy.broken = None
        assert get(store, block_key(5)).payload == block_bytes(5)


def test_closing_ends_what_it_started(proxy, tmp_path):
    store = open_at(proxy.endpoint, tmp_path)
    store.exists([block_key(n) for n in range(64)])
    threads = [t for t in threading.enumerate() if t.name.startswith("kvxfer-remote")]
    assert threads
    store.close()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_missing_bucket_or_server_is_one_line(server):
    where = f"region=us-east-1&timeout=2s&endpoint={quote(server.endpoint)}"
    with pytest.raises(StoreError, match="404") as caught:
        open_store(f"s3://no-such-bucket?{where}")
    assert "\n" not in str(caught.value)
    with pytest.raises(StoreError, match="check that it runs") as caught:
        open_store("s3://bucket?region=us-east-1&timeout=500ms&endpoint=http://127.0.0.1:1")
    assert "\n" not in str(caught.value)
    assert "test-secret" not in str(caught.value)


def test_urls_of_the_three_clouds():
    assert options_of("s3://b1/p/q?region=r").prefix == "p/q"
    assert options_of("gs://bucket").kind == "gs"
    assert options_of("az://container/x?account=me").account == "me"
    for url in ("gs://bucket/p", "az://container", "s3://bucket/p?part_size=64MiB&timeout=2s"):
        check_url(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "expected s3://bucket/prefix"),
        ("s3://key:secret@bucket", "expected s3://bucket/prefix"),
        ("s3://bucket/../x", "not a prefix"),
        ("s3://bucket?endpoint=x", "'endpoint': expected http"),
        ("s3://bucket?endpoint=http://id:secret@host", "belong in the environment"),
        ("s3://bucket?secret_access_key=hush", "unknown parameter 'secret_access_key'"),
        ("s3://bucket?part_size=1MiB", "'part_size': at least"),
        ("gs://bucket?region=x", "unknown parameter 'region'"),
    ],
)
def test_a_wrong_url_is_named_without_its_secrets(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_url(url)
    assert "hush" not in str(caught.value)
    assert ":secret@" not in str(caught.value)
