"""Blocks in a real Mooncake Store: master and metadata server from its wheel, over TCP."""

import ctypes.util
import importlib.util
from pathlib import Path

import pytest
from servers import Process, connects, debian_library, free_port

from kvstore_xfer.errors import ConfigError, StoreError
from kvstore_xfer.store.base import WriteStatus
from kvstore_xfer.store.remote.mooncake_url import HOST_VARIABLE, options_of
from kvstore_xfer.store.testing import BlockStoreTests, block_bytes, block_key, get, put
from kvstore_xfer.store.url import check_url, open_store

MASTER = Path(importlib.util.find_spec("mooncake").origin).parent / "mooncake_master"


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Its URL, and a client that lends it memory and goes around the store."""
    debian_library("ibverbs", package="libibverbs1")
    debian_library("numa", package="libnuma1")
    assert ctypes.util.find_library("ibverbs")
    MASTER.chmod(0o755)
    rpc, metadata, admin = (free_port() for _ in range(3))
    server = Process(
        [
            MASTER, "--enable_http_metadata_server=true", f"--http_metadata_server_port={metadata}",
            f"--rpc_port={rpc}", f"--metrics_port={admin}",
        ],
        tmp_path_factory.mktemp("mooncake"),
        lambda: connects(rpc) and connects(metadata) and connects(admin),
    )  # fmt: skip
    url = f"mooncake://127.0.0.1:{rpc}?metadata=http://127.0.0.1:{metadata}/metadata"
    url += f"&admin=http://127.0.0.1:{admin}&timeout=30s&buffer=64MiB"
    lender = open_store(url + "&segment=256MiB")
    yield url, lender._link.driver._store
    lender.close()
    server.kill()


class TestMooncake(BlockStoreTests):
    listing_knows_created = False

    @pytest.fixture(autouse=True)
    def _pool(self, pool):
        self.url, self.client = pool

    def make_store(self, folder):
        return open_store(f"{self.url}&prefix={folder.name}/")

    def raw_get(self, folder, key):
        return self.client.get(f"{folder.name}/{key}")

    def raw_put(self, folder, key, raw):
        """An empty value cannot be stored: one byte stands for it."""
        assert self.client.upsert(f"{folder.name}/{key}", raw or b"\0") == 0


def test_a_full_pool_evicts_or_is_full_and_stays_right(pool):
    url, _ = pool
    with open_store(f"{url}&prefix=full/") as store:
        statuses = {put(store, block_key(n), block_bytes(n, 16 << 20)) for n in range(24)}
        assert statuses <= {WriteStatus.STORED, WriteStatus.FULL}
        for n in range(24):
            assert get(store, block_key(n)).payload in (None, block_bytes(n, 16 << 20))
        assert store.stats().corrupt_blocks == 0
        store.delete([block_key(n) for n in range(24)])


def test_no_master_is_one_line():
    with pytest.raises(StoreError, match=r"no master at 127.0.0.1:1.*check that it runs") as caught:
        open_store("mooncake://127.0.0.1:1")
    assert "\n" not in str(caught.value)


def test_the_host_is_the_urls_else_the_environments(monkeypatch):
    assert options_of("mooncake://m").host == "127.0.0.1"
    monkeypatch.setenv(HOST_VARIABLE, "10.0.0.7")
    assert options_of("mooncake://m").host == "10.0.0.7"
    assert options_of("mooncake://m?host=10.0.0.8").host == "10.0.0.8"


def test_urls():
    options = options_of("mooncake://m?segment=1GiB&protocol=rdma&devices=mlx5_0")
    assert (options.master, options.segment_bytes) == (("m", 50051), 1 << 30)
    assert options.metadata == "http://m:8080/metadata"
    for wrong in ("mooncake://", "mooncake://a,b", "mooncake://m/x", "mooncake://m?protocol=udp"):
        with pytest.raises(ConfigError, match="store 'mooncake:"):
            check_url(wrong)
