"""An index that a crash has left: walked when it is opened, its rows checked while in use."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from test_local import fill_store, present

from kvstore_xfer.store.local import LocalStore, check, folder, index
from kvstore_xfer.store.local.check import Check, is_marked, set_mark
from kvstore_xfer.store.local.index import Entry
from kvstore_xfer.store.testing import block_bytes, block_key, get

COUNT = 40
KEY = block_key(7).encode()
SOON = 60


def opened(root):
    return LocalStore(root, min_free_bytes=0)


def change_row(txn, databases, what):
    row = txn.get(KEY, db=databases.blocks)
    place = index.recent_row(KEY, index.unpack_entry(KEY, row).stamp)
    if what == "entry":
        wrong = index.pack_entry(b"another key", Entry(1, 4096, 4096, 0.0, 1))
        txn.put(KEY, wrong, db=databases.blocks)
    elif what == "place":
        txn.delete(place, db=databases.recent)
        txn.put(bytes(8) + KEY, b"", db=databases.recent)
    elif what == "size":
        txn.put(KEY, row + bytes(200), db=databases.blocks)
    elif what == "key":
        txn.delete(KEY, db=databases.blocks)
        txn.put(KEY + b"x", row, db=databases.blocks)
    elif what == "place lost":
        txn.delete(place, db=databases.recent)


def crashed(root, damage=None):
    """A store of `COUNT` blocks that nobody has closed."""
    with opened(root) as store:
        fill_store(store, range(COUNT))
        rows = store._folder._index
        rows.environment.update(lambda txn: change_row(txn, rows._db, damage))
    (root / "index" / "digest").unlink()
    if damage == "branch":
        mislead(root / "index" / "data.mdb")


def mislead(data):
    """In branch pages, the keys that say which way a look-up has to go."""
    raw, size, branch = bytearray(data.read_bytes()), 4096, 1
    for start in range(0, len(raw), size):
        page = raw[start : start + size]
        if page[10] & branch:
            raw[start : start + size] = page.replace(b"/native/000", b"/native/fff")
    assert raw != data.read_bytes()
    data.write_bytes(raw)


def all_present(store):
    return present(store, range(COUNT)) == list(range(COUNT))


def sealed(root):
    return (root / "index" / "digest").exists()


def wait_until(condition):
    for _ in range(50 * SOON):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not come to that")


def started_check(store):
    wait_until(lambda: store._folder._check is not None)
    return store._folder._check


@pytest.fixture
def endless(monkeypatch):
    """The child does not come to an end."""
    monkeypatch.setattr(check, "_ARGUMENTS", ("-c", "import time; time.sleep(600)"))


@pytest.fixture
def no_ticks(monkeypatch):
    monkeypatch.setattr(folder, "_TICK_SECONDS", 1000)


def test_a_sound_index_is_kept_and_sealed_again(tmp_path, caplog):
    crashed(tmp_path)
    before = (tmp_path / "index" / "data.mdb").stat().st_ino
    with opened(tmp_path) as store:
        assert is_marked(tmp_path / "index")
        assert all_present(store)
        wait_until(lambda: not is_marked(tmp_path / "index"))
    assert sealed(tmp_path)
    assert (tmp_path / "index" / "data.mdb").stat().st_ino == before
    assert "rebuilt" not in caplog.text
    with opened(tmp_path):
        assert not is_marked(tmp_path / "index")


@pytest.mark.parametrize("damage", ["entry", "place", "branch"])
def test_a_damaged_row_is_mended_without_being_read(tmp_path, caplog, damage):
    crashed(tmp_path, damage)
    with opened(tmp_path) as store:
        assert "rebuilt" not in caplog.text
        wait_until(lambda: "rebuilt" in caplog.text and all_present(store))
        assert not is_marked(tmp_path / "index")
        assert get(store, block_key(7)).payload == block_bytes(7, 4096)
    assert sealed(tmp_path)


@pytest.mark.parametrize("damage", ["size", "key", "place lost"])
def test_rows_that_could_harm_lmdb_are_found_at_once(tmp_path, caplog, endless, damage):
    crashed(tmp_path, damage)
    with opened(tmp_path) as store:
        assert "rebuilt" in caplog.text
        assert all_present(store)
    assert sealed(tmp_path)


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_the_index_is_damage(tmp_path, caplog):
    crashed(tmp_path)
    (tmp_path / "index" / "data.mdb").unlink()
    os.mkfifo(tmp_path / "index" / "data.mdb")
    with opened(tmp_path) as store:
        assert "rebuilt" in caplog.text
        assert all_present(store)


def test_closing_ends_the_check(tmp_path, endless):
    crashed(tmp_path)
    store = opened(tmp_path)
    child = started_check(store)._child
    assert child.poll() is None
    store.close()
    assert child.returncode == -signal.SIGKILL
    assert is_marked(tmp_path / "index")
    assert not sealed(tmp_path)


def test_closing_takes_a_verdict_that_is_there(tmp_path, no_ticks):
    crashed(tmp_path, "entry")
    store = opened(tmp_path)
    started_check(store)._child.wait(SOON)
    store.close()
    with opened(tmp_path) as store:
        assert get(store, block_key(7)).payload == block_bytes(7, 4096)


def test_a_child_killed_from_outside_is_no_verdict(tmp_path, endless, caplog):
    crashed(tmp_path)
    with opened(tmp_path) as store:
        os.kill(started_check(store)._child.pid, signal.SIGTERM)
        wait_until(lambda: store._folder._check is None)
        assert is_marked(tmp_path / "index")
        store._folder._see_to_check(begin=True)
        assert store._folder._check is not None
    assert "rebuilt" not in caplog.text
    assert not sealed(tmp_path)


def test_a_child_that_crashes_is_damage(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(check, "_ARGUMENTS", ("-c", "import os; os.kill(os.getpid(), 11)"))
    crashed(tmp_path)
    with opened(tmp_path) as store:
        wait_until(lambda: "status -11" in caplog.text and all_present(store))


@pytest.mark.parametrize("damage", [None, "entry"])
def test_a_compacted_index_is_checked_anew(tmp_path, no_ticks, caplog, damage):
    crashed(tmp_path, damage)
    with opened(tmp_path) as store:
        started_check(store)._child.wait(SOON)
        store.compact()
        store._folder._see_to_check(begin=False)  # of the index that was replaced
        assert store._folder._check is None
        assert is_marked(tmp_path / "index")
        assert "rebuilt" not in caplog.text
        store._folder._see_to_check(begin=True)
        started_check(store)._child.wait(SOON)
        store._folder._see_to_check(begin=False)
        assert not is_marked(tmp_path / "index")
        store._folder._tick(sweep=False)
        assert ("rebuilt" in caplog.text) == (damage is not None)
        assert get(store, block_key(7)).payload == block_bytes(7, 4096)
    assert sealed(tmp_path)


def test_a_compacted_index_is_not_sealed_unchecked(tmp_path, endless):
    crashed(tmp_path)
    with opened(tmp_path) as store:
        store.compact()
    assert is_marked(tmp_path / "index")
    assert not sealed(tmp_path)


def test_one_at_a_time_checks_and_another_takes_over(tmp_path, endless):
    set_mark(tmp_path)
    first = Check.begin(tmp_path)
    try:
        assert Check.begin(tmp_path) is None
    finally:
        first.end()
    second = Check.begin(tmp_path)
    assert second is not None
    second.end()


def test_a_forked_child_leaves_the_check_to_its_parent(tmp_path, endless):
    crashed(tmp_path)
    with opened(tmp_path) as store:
        child = started_check(store)._child
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                store.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert child.poll() is None
        assert Check.begin(tmp_path / "index") is None


def test_the_check_ends_with_the_process_that_waits_for_it():
    script = (
        "import time; from kvstore_xfer.store.local import check_index\n"
        "check_index.check = lambda folder: time.sleep(600)\n"
        "check_index.main('any')\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as child:
        child.stdin.close()
        assert child.wait(SOON) == 1
