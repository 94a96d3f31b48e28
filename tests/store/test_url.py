"""Store URLs: what opens, and the one-line error for everything else."""

from importlib.metadata import EntryPoint

import pytest

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.store import url as url_module
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.parameters import parse_size
from kvstore_xfer.store.url import open_store


def test_an_absolute_folder(tmp_path):
    with open_store(f"local://{tmp_path}/my%20store?max_size=3MiB&min_free=0") as store:
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "my store"
        assert store.stats().capacity_bytes == 3 << 20


def test_defaults(tmp_path):
    with open_store(f"local://{tmp_path}") as store:
        assert store.stats().capacity_bytes == 50 << 30


def test_a_relative_folder_is_relative_to_the_base(tmp_path, monkeypatch):
    with open_store("local:cache/blocks", base=tmp_path) as store:
        assert store.root == tmp_path / "cache" / "blocks"
    monkeypatch.chdir(tmp_path)
    with open_store("local:here") as store:
        assert store.root == tmp_path / "here"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/var/cache", r"not a URL; write local:///"),
        ("", r"not a URL"),
        ("locl:///x", r"unknown scheme 'locl'; known: az, gs, local, memory, mooncake, redis"),
        ("local://var/cache", r"expected local:///absolute/folder"),
        ("local:", r"expected local:///absolute/folder"),
        ("local://[x/y", r"Invalid IPv6 URL; correct the URL"),
        ("memory://[x", r"Invalid IPv6 URL; correct the URL"),
        ("s3://bucket?endpoint=https://[x", r"'endpoint': Invalid IPv6 URL"),
        ("s3://bucket?endpoint=ftp://x", r"'endpoint': expected http://host or https://host"),
        ("local:///x#y", r"expected local:///absolute/folder"),
        ("local:///x%00y", r"expected local:///absolute/folder"),
        ("local:///x?size=1", r"unknown parameter 'size'; allowed: max_size, min_free"),
        ("local:///x?max_size=1&max_size=2", r"'max_size' is given twice"),
        ("local:///x?max_size=", r"'max_size': '' is not a size such as"),
        ("local:///x?max_size=0", r"'max_size': must be more than 0"),
        ("local:///x?min_free=-1", r"'min_free': '-1' is not a size"),
    ],
)
def test_a_wrong_url_is_named(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("500MB", 500_000_000),
        ("50GiB", 50 << 30),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["GiB", "1.5GiB", "1gib", "1K", "1iB", "1e3", "٣", "1" * 16])
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_another_scheme_comes_from_an_entry_point(monkeypatch):
    point = EntryPoint("memo", "builtins:repr", "kvstore_xfer.stores")
    monkeypatch.setattr(
        url_module, "entry_points", lambda group: [point] if group == point.group else []
    )
    assert open_store("memo://x?y=1") == "'memo://x?y=1'"
    with pytest.raises(ConfigError, match="known: az, gs, local, memo, memory, mooncake, redis"):
        open_store("rods://x")
