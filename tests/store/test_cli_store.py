"""The ``kvxfer store`` commands on a small store."""

import argparse
import json
import time

import pytest

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.cli import store as cli
from kvstore_xfer.errors import ConfigError, StoreError
from kvstore_xfer.store.base import WriteRequest
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import block_key, get

KEYS = [
    block_key(1, "model-a"),
    block_key(2, "model-a"),
    block_key(1, "model-a", "derived-0123"),
    block_key(1, "model-b"),
]


@pytest.fixture
def folder(tmp_path):
    with LocalStore(tmp_path, min_free_bytes=0) as store:
        store.write(
            [
                WriteRequest(
                    BlockHeader(key, 4096, created=time.time() - 7200), [memoryview(bytes(4096))]
                )
                for key in KEYS
            ]
        )
    return tmp_path


@pytest.fixture
def run(folder, capsys):
    """Runs one command; returns its exit status and its output."""

    def call(command, *options):
        parser = argparse.ArgumentParser()
        cli.register(parser.add_subparsers())
        args = parser.parse_args(["store", command, f"local://{folder}?min_free=0", *options])
        status = args.run(args)
        return status, capsys.readouterr().out

    return call


def test_ls_shows_size_age_kind_and_key(run):
    status, output = run("ls")
    assert status == 0
    assert [line.split() for line in output.splitlines()] == [
        ["8.0", "KiB", "2h", key.split("/")[3].split("-")[0], key] for key in sorted(KEYS)
    ]


def test_ls_by_prefix_as_json(run):
    status, output = run("ls", "--prefix", "v1/model-b", "--json")
    (row,) = map(json.loads, output.splitlines())
    assert (status, row["key"], row["size"], row["kind"]) == (0, KEYS[3], 8192, "native")


def test_stat_counts_per_identity_and_kind(run):
    status, output = run("stat")
    assert status == 0
    assert "4 blocks, 32.0 KiB of 50.0 GiB; 0 evicted, 0 found damaged so far" in output
    assert [line.split() for line in output.splitlines()[2:]] == [
        ["model-a", "derived", "1", "8.0", "KiB"],
        ["model-a", "native", "2", "16.0", "KiB"],
        ["model-b", "native", "1", "8.0", "KiB"],
    ]


def test_stat_as_json(run):
    status, output = run("stat", "--json")
    found = json.loads(output)
    assert (status, found["blocks"], found["bytes"]) == (0, 4, 4 * 8192)
    assert {"identity": "model-a", "kind": "native", "blocks": 2, "bytes": 16384} in found["groups"]


def test_verify_of_an_intact_store(run):
    assert run("verify") == (0, "4 blocks intact, 0 damaged\n")


def test_verify_names_what_is_damaged(run, folder):
    digits = sorted((folder / "blocks").rglob("*.*"))
    raw = bytearray(digits[0].read_bytes())
    raw[-1] ^= 1
    digits[0].write_bytes(raw)
    status, output = run("verify")
    first, last = output.splitlines()
    assert status == 1
    assert first.removeprefix("corrupt ") in KEYS
    assert last == "3 blocks intact, 1 damaged"
    assert run("verify") == (0, "3 blocks intact, 0 damaged\n")  # the store has removed it


def test_pin_keeps_one_models_blocks(run, folder):
    assert run("pin", "--prefix", "v1/model-b/", "--hours", "0.5") == (0, "1 blocks pinned\n")
    with LocalStore(folder, max_bytes=2 * 8192, min_free_bytes=0) as store:
        new = [BlockHeader(block_key(n, "model-c"), 4096) for n in range(5)]
        store.write([WriteRequest(header, [memoryview(bytes(4096))]) for header in new])
        assert [row.key for row in store.scan()] == [KEYS[3], new[-1].key]


def test_pin_says_what_it_cannot(run, monkeypatch):
    for hours in ("0", "-1", "nan", "721"):
        with pytest.raises(ConfigError, match="--hours"):
            run("pin", "--prefix", "v1/", "--hours", hours)
    monkeypatch.setattr(LocalStore, "pin", lambda *_: False)
    with pytest.raises(StoreError, match="cannot be pinned there"):
        run("pin", "--prefix", "v1/", "--hours", "1")


def test_clear_asks_or_wants_yes(run, folder, monkeypatch):
    with pytest.raises(ConfigError, match="add --yes"):
        run("clear")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(cli.Confirm, "ask", lambda *_, **__: False)
    assert run("clear")[0] == 1
    with LocalStore(folder) as store:
        assert get(store, KEYS[0]).status == "ok"
    monkeypatch.setattr(cli.Confirm, "ask", lambda *_, **__: True)
    assert run("clear") == (0, "4 blocks deleted\n")


def test_clear_by_prefix(run):
    assert run("clear", "--prefix", "v1/model-a/h0-2.l0-4/native/", "--yes") == (
        0,
        "2 blocks deleted\n",
    )
    _, output = run("ls")
    assert [line.split()[-1] for line in output.splitlines()] == [KEYS[2], KEYS[3]]
