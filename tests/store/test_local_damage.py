"""What lies where it should not, flipped bits in the index, and what maintenance mends."""

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import pytest
from test_local import BLOCK, files, fill_store, payload_file, present, run_python

from kvstore_xfer.cli.main import main
from kvstore_xfer.errors import StoreError
from kvstore_xfer.store.base import ReadStatus, WriteStatus
from kvstore_xfer.store.local import LocalStore, index
from kvstore_xfer.store.local.index import Entry
from kvstore_xfer.store.testing import block_bytes, block_key, get, put, write_request


def opened(root, **options):
    return LocalStore(root, **{"min_free_bytes": 0} | options)


def replace_by(path, what):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


STRAYS = ["fifo", "folder", "link to a device"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", STRAYS)
def test_a_stray_in_place_of_a_payload_is_damage(tmp_path, what):
    with opened(tmp_path) as store:
        fill_store(store, [1, 2])
        replace_by(payload_file(tmp_path, block_key(1)), what)
        assert get(store, block_key(1)).status in (ReadStatus.CORRUPT, ReadStatus.ERROR)
        assert get(store, block_key(2)).payload == block_bytes(2, 4096)
        assert fill_store(store, [1]) == [WriteStatus.STORED]
        assert get(store, block_key(1)).payload == block_bytes(1, 4096)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", STRAYS)
@pytest.mark.parametrize("where", ["blocks/x", "blocks/ab", "blocks/ab/cd", "tmp/x", "tmp/NAME"])
def test_a_stray_in_the_folder_does_not_stop_the_store(tmp_path, where, what):
    with opened(tmp_path) as store:
        fill_store(store, [1])
        name = payload_file(tmp_path, block_key(1)).name
    replace_by(tmp_path / where.replace("NAME", name), what)
    shutil.rmtree(tmp_path / "index")
    with opened(tmp_path) as store:
        assert present(store, [1]) == [1]
        assert fill_store(store, [2]) == [WriteStatus.STORED]
        store._folder._tick(sweep=True)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", STRAYS)
@pytest.mark.parametrize(
    "where",
    [
        *("format", "lock", "users", "blocks", "tmp", "index", "index/data.mdb", "index/lock.mdb"),
        *("index/digest", "index/digest.new", "index/unchecked"),
    ],
)
def test_a_stray_in_place_of_a_part_of_the_store_is_one_line_or_mended(tmp_path, where, what):
    root = tmp_path / "store"
    with opened(root) as store:
        fill_store(store, [1])
    replace_by(root / where, what)
    message = ""
    try:
        with opened(root) as store:
            get(store, block_key(1))
            put(store, block_key(2), b"x")
    except StoreError as error:
        message = str(error)
    assert "\n" not in message
    assert not message or str(root) in message


def use(root):
    """The error of a store that cannot be opened; one that can has its block."""
    try:
        with opened(root) as store:
            put(store, block_key(2), b"x")
            assert get(store, block_key(1)).payload == block_bytes(1, 4096)
    except StoreError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "where",
    [
        *("format", "format.new", "lock", "users", "index/data.mdb", "index/lock.mdb"),
        *("index/digest", "index/digest.new", "index/unchecked"),
    ],
)
@pytest.mark.parametrize("there", [True, False], ids=["a file", "nothing"])
def test_nothing_is_written_through_a_link(tmp_path, where, there):
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    with opened(root) as store:
        fill_store(store, [1])
    if there:
        elsewhere.write_text("mine")
    (root / where).unlink(missing_ok=True)
    (root / where).symlink_to(elsewhere)
    message = use(root) or use(root)
    assert not message or (where in message and "\n" not in message)
    assert elsewhere.exists() == there
    assert not there or elsewhere.read_text() == "mine"


FLIPPER = """
import sys, time
from kvstore_xfer.errors import StoreError
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import block_bytes, block_key, get

def missing(store):
    for n in range(60):
        result = get(store, block_key(n))
        if result.payload not in (None, block_bytes(n, 50)): sys.exit(f"wrong bytes: {n} {result}")
        if result.payload is None: return f"{n} {result}"
    try:
        if store.stats().blocks != 60: return "blocks"
        list(store.scan())
    except StoreError as error: return str(error)

with LocalStore(sys.argv[1], min_free_bytes=0) as store:
    patience = int(sys.argv[2])
    while (wrong := missing(store)) and patience:
        patience -= 1
        time.sleep(0.1)
    if wrong: sys.exit(wrong)
"""


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_flipped_bit_anywhere_in_the_index_costs_nothing(tmp_path, clean):
    """Without protection LMDB follows a damaged page out of its map, and the process dies.

    After a crash the rows are checked while the store is in use: its blocks are back soon.
    """
    root, kept = tmp_path / "store", tmp_path / "kept"
    with opened(root) as store:
        for n in range(60):
            put(store, block_key(n), block_bytes(n, 50))
    if not clean:
        (root / "index" / "digest").unlink()
    shutil.copytree(root, kept)
    chance = random.Random(4)
    size = (root / "index" / "data.mdb").stat().st_size
    for _ in range(6):
        shutil.rmtree(root)
        shutil.copytree(kept, root)
        with (root / "index" / "data.mdb").open("r+b") as file:
            for position in (chance.randrange(size) for _ in range(30)):
                file.seek(position)
                byte = file.read(1)[0] ^ 1 << chance.randrange(8)
                file.seek(position)
                file.write(bytes([byte]))
        command = [sys.executable, "-c", FLIPPER, root, "0" if clean else "300"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_an_index_of_version_0_1_is_read(tmp_path):
    with opened(tmp_path) as store:
        fill_store(store, range(5))
        rows = store._folder._index

        def strip(txn):
            for n in range(5):
                key = block_key(n).encode()
                txn.put(key, txn.get(key, db=rows._db.blocks)[:-4], db=rows._db.blocks)

        rows.environment.update(strip)
        assert present(store, range(5)) == [0, 1, 2, 3, 4]
        assert get(store, block_key(3)).payload == block_bytes(3, 4096)


def test_a_damaged_row_is_an_error_and_the_index_is_rebuilt(tmp_path):
    with opened(tmp_path) as store:
        fill_store(store, range(3))
        rows = store._folder._index
        wrong = index.pack_entry(b"another key", Entry(1, 4096, 4096, 0.0, 1))
        key = block_key(1).encode()
        rows.environment.update(lambda txn: txn.put(key, wrong, db=rows._db.blocks))
        assert get(store, block_key(1)).status is ReadStatus.ERROR
        store._folder._tick(sweep=False)
        assert present(store, range(3)) == [0, 1, 2]
        assert get(store, block_key(1)).payload == block_bytes(1, 4096)


@pytest.mark.parametrize("error", [lmdb.DiskError("full"), OSError(errno.ENOSPC, "full")])
def test_a_disk_too_full_to_evict_on_is_full(tmp_path, monkeypatch, error):
    with opened(tmp_path, max_bytes=30_000) as store:
        fill_store(store, range(3))

        def evict(needed):
            raise error

        monkeypatch.setattr(store._folder, "evict", evict)
        assert fill_store(store, range(10, 14))[-1] is WriteStatus.FULL


# Eviction


def derived(number):
    return block_key(number, kind="derived-abc")


def test_at_equal_age_derived_blocks_go_first(tmp_path):
    with opened(tmp_path, max_bytes=4 * BLOCK) as store:
        fill_store(store, [1, 2])
        put(store, derived(1), block_bytes(1, 4096))
        put(store, derived(2), block_bytes(1, 4096))
        fill_store(store, [3, 4])
        assert present(store, range(1, 5)) == [1, 2, 3, 4]
        assert store.exists([derived(1), derived(2)]) == [False, False]


def test_a_native_block_unused_for_long_goes_before_a_derived_one(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "DERIVED_HANDICAP_NS", 1)
    with opened(tmp_path, max_bytes=2 * BLOCK) as store:
        fill_store(store, [1])
        put(store, derived(1), block_bytes(1, 4096))
        fill_store(store, [2])
        assert present(store, [1, 2]) == [2]
        assert store.exists([derived(1)]) == [True]


def test_a_pinned_block_is_not_evicted_before_its_time(tmp_path):
    with opened(tmp_path, max_bytes=3 * BLOCK) as store:
        fill_store(store, [1, 2])
        store.pin([block_key(1), block_key(9)], 0.5)
        fill_store(store, [3, 4, 5])
        assert present(store, range(6)) == [1, 4, 5]
        store.pin([block_key(4), block_key(5)], 60)
        assert fill_store(store, [6]) == [WriteStatus.STORED] or time.sleep(0.5) is None
        time.sleep(0.6)
        assert fill_store(store, [7]) == [WriteStatus.STORED]
        assert present(store, [1, 4, 5]) == [4, 5]


def test_when_everything_is_pinned_the_store_is_full(tmp_path):
    with opened(tmp_path, max_bytes=2 * BLOCK) as store:
        fill_store(store, [1, 2])
        store.pin([block_key(1), block_key(2)], 60)
        assert fill_store(store, [3]) == [WriteStatus.FULL]
        assert present(store, [1, 2]) == [1, 2]


# Maintenance


def test_compact_shrinks_the_index_of_a_store_in_use(tmp_path, capsys):
    with opened(tmp_path) as store:
        for n in range(0, 1500, 500):
            store.write([write_request(block_key(m), b"x") for m in range(n, n + 500)])
        store.delete([block_key(n) for n in range(10, 1500)])
        before = (tmp_path / "index" / "data.mdb").stat().st_size
        run_python(
            "import sys; from kvstore_xfer.cli.main import main; main(sys.argv[1:])",
            "store", "compact", f"local://{tmp_path}",
        )  # fmt: skip
        assert (tmp_path / "index" / "data.mdb").stat().st_size < before / 2
        assert present(store, range(12)) == list(range(10))
        assert put(store, block_key(11), b"y") is WriteStatus.STORED
        sizes = store.compact()
        assert sizes[0] >= sizes[1] > 0
        assert present(store, range(12)) == [*range(10), 11]
    assert main(["store", "compact", f"local://{tmp_path}"]) == 0
    assert capsys.readouterr().out.startswith("index: ")


def test_verify_repair_brings_index_and_files_together(tmp_path, capsys):
    with opened(tmp_path) as store:
        fill_store(store, range(4))
        stowed = payload_file(tmp_path, block_key(3))
        raw, where = stowed.read_bytes(), Path(stowed)
        store.delete([block_key(3)])
    where.write_bytes(raw)  # a file that the index does not know
    payload_file(tmp_path, block_key(1)).unlink()
    url = f"local://{tmp_path}?min_free=0"
    assert main(["store", "verify", "--repair", url]) == 0
    out = capsys.readouterr().out
    assert "3 blocks in the index before, 3 after" in out
    assert "3 blocks intact, 0 damaged" in out
    with opened(tmp_path) as store:
        assert present(store, range(4)) == [0, 2, 3]
        assert len(files(tmp_path)) == 3


def test_two_containers_with_equal_process_ids(tmp_path):
    """Each has a process id namespace of its own: the second is refused with the remedy."""
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.fail("unshare --user --pid is not permitted here; run the tests where it is")
    script = """
import sys, time
from kvstore_xfer.errors import StoreError
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import *
try:
    store = LocalStore(sys.argv[1], min_free_bytes=0)
except StoreError as error:
    print("refused:", error); sys.exit()
put(store, block_key(1), b"x")
with store._folder._index.environment.reading():
    print("ready", flush=True)
    sys.stdin.read()
print(get(store, block_key(1)).payload)
"""
    command = [*unshare, sys.executable, "-c", script, str(tmp_path / "store")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout.readline() == "ready\n"
        second = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
        out, _ = first.communicate("", timeout=60)
    assert out == "b'x'\n"
    assert second.returncode == 0
    assert "process id namespace" in second.stdout or "b'x'" in second.stdout
