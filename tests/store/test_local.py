"""The local store: the conformance suite, and what only a shared folder can get wrong."""

import contextlib
import errno
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import lmdb
import pytest

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.blocks.key import BlockKey
from kvstore_xfer.errors import StoreError
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_xfer.store.local import LocalStore, environment, folder, index
from kvstore_xfer.store.local.layout import Layout, new_generation, payload_name
from kvstore_xfer.store.testing import (
    BlockStoreTests,
    block_bytes,
    block_key,
    get,
    put,
    write_request,
)

BLOCK = 8192  # a header page and 4096 payload bytes


def payload_file(root, key):
    digest = hashlib.sha256(key.encode()).hexdigest()
    (path,) = (root / "blocks").rglob(f"{digest}.*")
    return path


def fill_store(store, numbers):
    return [put(store, block_key(n), block_bytes(n, 4096)) for n in numbers]


def present(store, numbers):
    return [n for n in numbers if store.exists([block_key(n)])[0]]


def files(root):
    return [path for path in (root / "blocks").rglob("*") if path.is_file()]


def run_python(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


class TestLocalStore(BlockStoreTests):
    def make_store(self, folder):
        return LocalStore(folder, min_free_bytes=0)

    def raw_get(self, folder, key):
        return payload_file(folder, key).read_bytes()

    def raw_put(self, folder, key, raw):
        payload_file(folder, key).write_bytes(raw)


@pytest.fixture
def open_store(tmp_path):
    """Opens stores on one folder and closes them in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            LocalStore(tmp_path, **{"min_free_bytes": 0} | options)
        )


# The index


@pytest.mark.parametrize("damage", ["removed", "folder removed", "garbage", "truncated", "emptied"])
def test_a_lost_or_damaged_index_is_rebuilt(tmp_path, open_store, damage):
    store = open_store()
    fill_store(store, range(40))
    before = list(store.scan())
    store.close()
    data = tmp_path / "index" / "data.mdb"
    if damage == "removed":
        data.unlink()
    elif damage == "folder removed":
        shutil.rmtree(data.parent)
    elif damage == "garbage":
        data.write_bytes(os.urandom(data.stat().st_size))
    elif damage == "truncated":
        os.truncate(data, data.stat().st_size // 2)
    else:
        os.truncate(data, 0)
    store = open_store()
    after = list(store.scan())
    assert [(row.key, row.size, row.created) for row in after] == [
        (row.key, row.size, row.created) for row in before
    ]
    assert store.stats().bytes == 40 * BLOCK
    assert all(get(store, block_key(n)).payload == block_bytes(n, 4096) for n in range(40))


def test_a_rebuild_takes_intact_blocks_only(tmp_path, open_store):
    store = open_store()
    fill_store(store, range(4))
    store.close()
    payload_file(tmp_path, block_key(0)).write_bytes(b"garbage")
    os.truncate(payload_file(tmp_path, block_key(1)), BLOCK - 1)
    misnamed = Path(Layout(tmp_path).payload(payload_name(b"another key", 1)))
    misnamed.parent.mkdir(exist_ok=True)
    payload_file(tmp_path, block_key(2)).rename(misnamed)
    shutil.rmtree(tmp_path / "index")
    store = open_store()
    assert [row.key for row in store.scan()] == [block_key(3)]
    assert files(tmp_path) == [payload_file(tmp_path, block_key(3))]


def test_an_interrupted_rebuild_starts_again(tmp_path, open_store, monkeypatch):
    store = open_store()
    fill_store(store, range(4))
    store.close()
    shutil.rmtree(tmp_path / "index")
    with monkeypatch.context() as patch:
        patch.setattr(folder.Folder, "_adopt", lambda *_: (_ for _ in ()).throw(OSError(5, "IO")))
        with pytest.raises(StoreError, match="check the disk"):
            open_store()
    assert present(open_store(), range(4)) == [0, 1, 2, 3]


def test_a_running_store_notices_that_its_index_was_replaced(tmp_path, open_store):
    store = open_store()
    fill_store(store, [1])
    run_python(
        "import shutil, sys; from kvstore_xfer.store.local import LocalStore\n"
        "shutil.rmtree(sys.argv[1] + '/index'); LocalStore(sys.argv[1]).close()",
        tmp_path,
    )
    assert fill_store(store, [2]) == [WriteStatus.STORED]
    assert present(store, [1, 2]) == [1, 2]
    other = run_python(
        "import sys; from kvstore_xfer.store.local import LocalStore\n"
        "print(LocalStore(sys.argv[1]).exists(sys.argv[2:]))",
        tmp_path, block_key(1), block_key(2),
    )  # fmt: skip
    assert other.strip() == "[True, True]"


def test_the_walk_after_a_reboot_finds_a_block_without_an_entry(tmp_path, open_store, monkeypatch):
    store = open_store()
    fill_store(store, [1])
    store.close()
    shutil.copytree(tmp_path / "index", tmp_path.parent / "old-index")
    store = open_store()
    fill_store(store, [2])
    store.close()
    shutil.rmtree(tmp_path / "index")
    shutil.move(tmp_path.parent / "old-index", tmp_path / "index")
    store = open_store()
    assert present(store, [1, 2]) == [1]
    monkeypatch.setattr(folder, "_boot_id", lambda: "the next boot")
    store._folder._tick(sweep=True)
    assert present(store, [1, 2]) == [1, 2]


def test_the_map_grows_in_this_process_and_in_others(tmp_path, monkeypatch):
    monkeypatch.setattr(index.Index.__init__, "__defaults__", (1 << 18,))
    with LocalStore(tmp_path, min_free_bytes=0) as store:
        fill_store(store, [0])
        script = (
            "import sys; from kvstore_xfer.store.local import LocalStore\n"
            "from kvstore_xfer.store.testing import *\n"
            "with LocalStore(sys.argv[1], min_free_bytes=0) as store:\n"
            "    for at in range(1000, 3000, 500):\n"
            "        numbers = range(at, at + 500)\n"
            "        store.write([write_request(block_key(n), b'x') for n in numbers])\n"
            "    print(store.stats().blocks)"
        )
        assert run_python(script, tmp_path).strip() == "2001"  # grows it under our feet
        assert store.exists([block_key(2999)]) == [True]
        requests = [write_request(block_key(n), b"x") for n in range(3000, 6000)]
        assert set(store.write(requests)) == {WriteStatus.STORED}
        assert store.stats().blocks == 5001


def test_the_reader_slot_of_a_killed_process_is_freed(tmp_path, open_store):
    store = open_store()
    script = (
        "import os, sys; from kvstore_xfer.store.local import LocalStore\n"
        "store = LocalStore(sys.argv[1])\n"
        "with store._folder._index.environment.reading(): os._exit(0)"
    )
    run_python(script, tmp_path)
    assert store._folder._index.environment.clear_stale_readers() == 1


def test_two_containers_with_one_process_id_get_a_clear_error(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise lmdb.LockError("mdb_txn_begin: Resource temporarily unavailable")

    monkeypatch.setattr(environment.lmdb, "open", refuse)
    with pytest.raises(StoreError, match="process id namespace"):
        LocalStore(tmp_path)


def test_a_removed_folder_is_an_error_and_no_answer(tmp_path, open_store):
    store = open_store()
    fill_store(store, [1])
    shutil.rmtree(tmp_path / "index")
    assert present(store, [1]) == []
    assert get(store, block_key(1)).status is ReadStatus.MISSING
    store._folder._tick(sweep=True)
    assert present(store, [1]) == [1]
    shutil.rmtree(tmp_path)
    assert present(store, [1]) == []
    assert fill_store(store, [2]) == [WriteStatus.ERROR]
    assert store.delete([block_key(1)]) == [False]
    for call in (store.stats, lambda: list(store.scan())):
        with pytest.raises(StoreError, match="open the store again"):
            call()


def test_a_folder_that_goes_away_and_comes_back_is_used_again(tmp_path):
    root, away = tmp_path / "store", tmp_path / "away"
    with LocalStore(root, min_free_bytes=0) as store:
        fill_store(store, [1])
        root.rename(away)
        assert present(store, [1]) == []
        assert fill_store(store, [2]) == [WriteStatus.ERROR]
        away.rename(root)
        assert present(store, [1]) == [1]
        assert fill_store(store, [2]) == [WriteStatus.STORED]


# Sharing


def test_a_block_that_is_finished_while_a_walk_looks_at_it_stays(open_store, monkeypatch):
    store = open_store()
    assert store.write([write_request(block_key(0), b"whole")]) == [WriteStatus.STORED]
    folder = store._folder
    whole, looks = folder._inspect, []

    def half_written_at_first(name):
        looks.append(name)
        return whole(name) if len(looks) > 1 else whole(name)._replace(key=b"", entry=None)

    monkeypatch.setattr(folder, "_inspect", half_written_at_first)
    folder.walk()
    assert len(looks) == 2
    (result,) = store.read([ReadRequest(block_key(0))])
    assert (result.status, result.payload) == (ReadStatus.OK, b"whole")


def test_two_stores_of_one_process_share_the_folder(tmp_path, open_store):
    link = tmp_path.parent / "link"
    link.symlink_to(tmp_path)
    first, second = open_store(), LocalStore(link, min_free_bytes=0)
    fill_store(first, [1])
    first.close()
    assert present(second, [1]) == [1]
    second.close()
    assert not folder._opened


def test_a_forked_child_reads_and_writes(tmp_path):
    script = """
import os, sys, warnings
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import *
warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what is tested
store = LocalStore(sys.argv[1], min_free_bytes=0)
put(store, block_key(1), b"parent")
for n in range(2, 6):
    if os.fork() == 0:
        ok = get(store, block_key(1)).payload == b"parent"
        ok = ok and put(store, block_key(n), b"child") == "stored"
        store.close()
        os._exit(0 if ok else 1)
codes = [os.wait()[1] for _ in range(4)]
print(codes, [get(store, block_key(n)).payload for n in range(1, 6)])
"""
    expected = [b"parent"] + [b"child"] * 4
    assert run_python(script, tmp_path).strip() == f"[0, 0, 0, 0] {expected}"


# Eviction


def test_the_least_recently_used_block_goes_first(open_store):
    store = open_store(max_bytes=4 * BLOCK)
    fill_store(store, range(4))
    get(store, block_key(0))
    fill_store(store, [4])
    assert present(store, range(5)) == [0, 2, 3, 4]
    assert store.stats().evicted_blocks == 1


def test_a_use_by_another_store_object_counts(open_store):
    store, other = open_store(max_bytes=3 * BLOCK), open_store()
    fill_store(store, range(3))
    get(other, block_key(0))
    fill_store(store, [3])
    assert present(store, range(4)) == [0, 2, 3]


def test_a_use_by_another_process_counts(tmp_path, open_store):
    store = open_store(max_bytes=3 * BLOCK)
    fill_store(store, range(3))
    script = (
        "import sys; from kvstore_xfer.store.local import LocalStore\n"
        "from kvstore_xfer.store.testing import *\n"
        "with LocalStore(sys.argv[1]) as store: print(get(store, block_key(0)).status.value)"
    )
    assert run_python(script, tmp_path).strip() == "ok"
    fill_store(store, [3])
    assert present(store, range(4)) == [0, 2, 3]


def test_the_cap_is_never_exceeded(tmp_path, open_store):
    store, other = open_store(max_bytes=10 * BLOCK), open_store(max_bytes=10 * BLOCK)
    for n in range(0, 60, 3):
        fill_store(store, [n])
        other.write([write_request(block_key(m), block_bytes(m)) for m in (n + 1, n + 2)])
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * BLOCK
    stats = store.stats()
    assert stats.bytes == sum(path.stat().st_size for path in files(tmp_path))
    assert stats.bytes > 7 * BLOCK


def test_a_batch_larger_than_the_cap_keeps_its_last_blocks(open_store):
    store = open_store(max_bytes=4 * BLOCK)
    requests = [write_request(block_key(n), block_bytes(n, 4096)) for n in range(10)]
    assert store.write(requests) == [WriteStatus.STORED] * 10
    assert present(store, range(10)) == [6, 7, 8, 9]


def test_a_block_larger_than_the_cap_is_refused_and_evicts_nothing(open_store):
    store = open_store(max_bytes=4 * BLOCK)
    fill_store(store, range(4))
    assert put(store, block_key(9), block_bytes(9, 5 * BLOCK)) is WriteStatus.FULL
    assert present(store, range(4)) == [0, 1, 2, 3]


def test_blocks_give_way_to_the_free_space_floor(open_store, monkeypatch):
    store = open_store(min_free_bytes=100 * BLOCK)
    room = [108 * BLOCK]
    monkeypatch.setattr(Layout, "free_bytes", lambda self: room[0] - BLOCK * len(files(self.root)))
    assert fill_store(store, range(12)) == [WriteStatus.STORED] * 12
    assert present(store, range(12)) == list(range(4, 12))
    room[0] = 50 * BLOCK  # somebody else fills the disk: emptying the store would not help
    assert fill_store(store, [12]) == [WriteStatus.FULL]
    assert len(present(store, range(12))) == 8


def test_eviction_goes_on_after_a_file_that_cannot_be_removed(tmp_path, open_store):
    store = open_store(max_bytes=4 * BLOCK)
    fill_store(store, range(4))
    stuck = payload_file(tmp_path, block_key(0))
    stuck.unlink()
    stuck.mkdir()  # unlink fails on a folder
    assert fill_store(store, [4, 5]) == [WriteStatus.STORED] * 2
    assert present(store, range(6)) == [3, 4, 5]
    assert store.stats().bytes == 4 * BLOCK  # the stuck one still counts
    stuck.rmdir()
    store._folder._tick(sweep=False)
    store._folder._tick(sweep=False)
    assert store.stats().bytes == 3 * BLOCK


def test_a_read_that_is_not_a_use_does_not_protect(open_store):
    from kvstore_xfer.store.base import ReadRequest

    store = open_store(max_bytes=2 * BLOCK)
    fill_store(store, range(2))
    store.read([ReadRequest(block_key(0), touch=False)])
    fill_store(store, [2])
    assert present(store, range(3)) == [1, 2]


# Crashes


def test_a_block_whose_file_vanished_is_damage(tmp_path, open_store):
    store = open_store()
    fill_store(store, [1])
    payload_file(tmp_path, block_key(1)).unlink()
    assert get(store, block_key(1)).status is ReadStatus.CORRUPT
    assert present(store, [1]) == []
    assert store.stats().corrupt_blocks == 1


@pytest.mark.parametrize("point", ["announce", "write", "publish", "put"])
def test_a_writer_that_dies_leaves_nothing(tmp_path, open_store, point):
    script = f"""
import os, sys
from kvstore_xfer.store.local import LocalStore, index, layout, writer
from kvstore_xfer.store.testing import *
def die(*_, **__): os._exit(0)
real_put = index.Rows.put
def die_before_commit(*arguments): real_put(*arguments); os._exit(0)
def write_half(descriptor, *_): os.write(descriptor, bytes(100)); os._exit(0)
{{"announce": lambda: setattr(layout.Layout, "create_payload", die),
 "write": lambda: setattr(writer, "write_block", write_half),
 "publish": lambda: setattr(writer.Writer, "_publish", die),
 "put": lambda: setattr(index.Rows, "put", die_before_commit)}}[{point!r}]()
put(LocalStore(sys.argv[1], min_free_bytes=0), block_key(1), b"x")
"""
    run_python(script, tmp_path)
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    assert len(files(tmp_path)) == (point != "announce")
    store = open_store()
    assert list((tmp_path / "tmp").iterdir()) == files(tmp_path) == []
    assert present(store, [1]) == []
    assert fill_store(store, [1]) == [WriteStatus.STORED]


def announce(root, key):
    """What a writer leaves that dies before it takes the announcement of this block back."""
    generation = payload_file(root, key).name.rpartition(".")[2]
    (root / "tmp" / ("0" * 32)).write_text(f"{generation} {key}\n")


@pytest.mark.parametrize("lost", [False, True], ids=["index there", "index lost"])
def test_a_crash_after_the_commit_keeps_the_block(tmp_path, open_store, lost):
    store = open_store()
    fill_store(store, [1])
    announce(tmp_path, block_key(1))  # the writer died before taking this back
    store.close()
    if lost:
        shutil.rmtree(tmp_path / "index")
    store = open_store()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert get(store, block_key(1)).payload == block_bytes(1, 4096)


def test_a_removal_cut_short_is_finished_later(tmp_path, open_store, monkeypatch):
    store = open_store()
    fill_store(store, [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(folder.Folder, "_remove_file", lambda *_: False)
        assert store.delete([block_key(1)]) == [True]
    assert len(files(tmp_path)) == 2
    store._folder._tick(sweep=False)
    assert files(tmp_path) == [payload_file(tmp_path, block_key(2))]


def test_the_sweep_leaves_the_file_of_a_living_writer(tmp_path, open_store):
    store = open_store()
    layout, key, generation = store._folder.layout, b"k", new_generation()
    name = payload_name(key, generation)
    with layout.announced([(key, generation)]):
        os.close(layout.create_payload(name))
        store._folder.sweep_temporaries()
        store._folder.walk()  # an empty file: damage, were it nobody's
        assert [path.name for path in files(tmp_path)] == [name]
        (announcement,) = (tmp_path / "tmp").iterdir()
        text = announcement.read_bytes()
    assert text == b"%016x k\n" % generation
    announcement.write_bytes(b"torn by a power cut\n" + text)
    store._folder.sweep_temporaries()
    assert files(tmp_path) == list((tmp_path / "tmp").iterdir()) == []


def test_the_sweep_removes_what_an_earlier_version_left(tmp_path, open_store):
    """It had whole blocks in there, under their final names."""
    store = open_store()
    (tmp_path / "tmp" / payload_name(b"k", new_generation())).write_bytes(bytes(9000))
    (tmp_path / "tmp" / "not ours").touch()
    store._folder.sweep_temporaries()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["not ours"]


# Folders that cannot be used


def test_an_unknown_format_is_refused(tmp_path):
    LocalStore(tmp_path).close()
    (tmp_path / "format").write_text("kvstore_xfer local store, format 7\n")
    with pytest.raises(StoreError, match=r"unknown format 'kvstore_xfer local store, format 7'"):
        LocalStore(tmp_path)


def test_a_folder_of_format_1_is_used_as_it_is(tmp_path, open_store):
    (tmp_path / "format").write_text("kvstore_xfer local store, format 1\n")
    store = open_store()
    fill_store(store, range(4))
    path = payload_file(tmp_path, block_key(0))
    assert path.relative_to(tmp_path / "blocks").parts == (path.name[:2], path.name[2:4], path.name)
    store.close()
    shutil.rmtree(tmp_path / "index")
    store = open_store()
    assert present(store, range(4)) == [0, 1, 2, 3]
    assert get(store, block_key(0)).payload == block_bytes(0, 4096)
    assert (tmp_path / "format").read_text() == "kvstore_xfer local store, format 1\n"


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(StoreError, match=r"other files \(thesis.txt\).*empty folder"):
        LocalStore(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.txt"}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreError, match="name a folder"):
            LocalStore(path)


@contextlib.contextmanager
def without_privileges():
    """Root ignores permission bits; the effective user does not."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_folder():
    """A folder that an unprivileged user can reach, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_a_read_only_folder_is_refused(public_folder, existing):
    if existing:
        LocalStore(public_folder).close()
    public_folder.chmod(0o555)
    with without_privileges(), pytest.raises(StoreError, match="make it writable") as caught:
        LocalStore(public_folder)
    assert str(public_folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_turns_read_only_gives_statuses(public_folder):
    if os.geteuid() == 0:
        os.chown(public_folder, 65534, -1)
    with without_privileges(), LocalStore(public_folder, min_free_bytes=0) as store:
        fill_store(store, [1])
        for path in (public_folder / "tmp", payload_file(public_folder, block_key(1)).parent):
            path.chmod(0o555)
        assert fill_store(store, [2]) == [WriteStatus.ERROR]
        assert get(store, block_key(1)).payload == block_bytes(1, 4096)
        payload_file(public_folder, block_key(1)).parent.chmod(0o755)


def test_a_full_disk_gives_full_and_keeps_what_is_there(open_store):
    """The kernel's file size limit fails a write half way, like a disk that is full."""
    store = open_store()
    fill_store(store, range(3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert put(store, block_key(9), bytes(4 << 20)) is WriteStatus.FULL
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert present(store, [*range(3), 9]) == [0, 1, 2]
    assert list((store.root / "tmp").iterdir()) == []


def test_a_disk_that_fills_while_publishing_gives_full(tmp_path, open_store, monkeypatch):
    store = open_store()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Layout, "create_payload", full)
        assert fill_store(store, [1]) == [WriteStatus.FULL]
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "announced", full)
        assert fill_store(store, [1]) == [WriteStatus.FULL]
    with monkeypatch.context() as patch:
        patch.setattr(
            environment.Environment, "update", lambda *_: (_ for _ in ()).throw(lmdb.DiskError())
        )
        assert fill_store(store, [2]) == [WriteStatus.FULL]
        assert get(store, block_key(2)).status is ReadStatus.MISSING
    assert files(tmp_path) == []
    assert fill_store(store, [1, 2]) == [WriteStatus.STORED] * 2


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MiB; CI that may not mount relies on the two tests above."""
    mounted = (
        shutil.which("mount")
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting is not permitted here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_blocks_give_way_on_a_small_disk(small_disk):
    with LocalStore(small_disk, min_free_bytes=0) as store:
        statuses = [put(store, block_key(n), block_bytes(n, 200_000)) for n in range(40)]
        assert set(statuses) == {WriteStatus.STORED}
        kept = present(store, range(40))
        assert kept == list(range(40 - len(kept), 40))
        assert len(kept) > 10
        assert all(get(store, block_key(n)).payload == block_bytes(n, 200_000) for n in kept)


def test_a_disk_that_is_really_full(small_disk, monkeypatch):
    with LocalStore(small_disk, min_free_bytes=0) as store:
        assert put(store, block_key(0), block_bytes(0)) is WriteStatus.STORED
        # The disk fills between the look at its free space and the write.
        monkeypatch.setattr(Layout, "free_bytes", lambda _: 1 << 40)
        statuses = [put(store, block_key(n), block_bytes(n, 200_000)) for n in range(1, 40)]
        stored = [n for n, status in enumerate(statuses, 1) if status is WriteStatus.STORED]
        assert set(statuses) == {WriteStatus.STORED, WriteStatus.FULL}
        assert present(store, range(40)) == [0, *stored]
        assert all(get(store, block_key(n)).payload == block_bytes(n, 200_000) for n in stored)
        assert list((small_disk / "tmp").iterdir()) == []
        assert store.delete([block_key(stored[0])]) == [True]
        assert put(store, block_key(99), block_bytes(99, 150_000)) is WriteStatus.STORED


def test_a_store_that_another_process_makes_meanwhile_is_used(tmp_path, monkeypatch):
    """Two engines that start over one empty folder: both have seen it without a format."""
    listdir = os.listdir

    def after_another(folder):
        monkeypatch.setattr(os, "listdir", listdir)
        Layout(tmp_path).prepare()
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", after_another)
    with LocalStore(tmp_path, min_free_bytes=0) as store:
        assert fill_store(store, [1]) == [WriteStatus.STORED]


def test_a_full_disk_is_refused_when_opening(small_disk):
    with contextlib.suppress(OSError), (small_disk / "lost+found").open("wb") as filler:
        while True:
            filler.write(bytes(4096))
    with pytest.raises(StoreError, match="free some space"):
        LocalStore(small_disk)


def test_a_read_only_file_system_is_refused_and_read_at_run_time(small_disk):
    store = LocalStore(small_disk, min_free_bytes=0)
    fill_store(store, [1])
    subprocess.run(["mount", "-o", "remount,ro", small_disk], capture_output=True, check=False)
    store.close()
    if subprocess.run(["mount", "-o", "remount,ro", small_disk], capture_output=True).returncode:
        pytest.skip("remounting is not permitted here")
    with pytest.raises(StoreError, match="mount it read-write"):
        LocalStore(small_disk)


def test_a_file_system_that_the_kernel_turns_read_only_gives_errors(tmp_path, monkeypatch):
    """Only a disk error does that to files in use; LMDB's next reader would be a bus error."""
    intact = os.statvfs

    def read_only(path):
        *rest, flag, longest = intact(path)[:10]
        return os.statvfs_result((*rest, flag | os.ST_RDONLY, longest))

    with LocalStore(tmp_path / "store", min_free_bytes=0) as store:
        fill_store(store, [1])
        monkeypatch.setattr(os, "statvfs", read_only)
        assert get(store, block_key(1)).status is ReadStatus.ERROR
        assert put(store, block_key(2), b"x") is WriteStatus.ERROR
        monkeypatch.undo()
        assert get(store, block_key(1)).status is ReadStatus.OK


def test_no_key_leads_out_of_the_folder(tmp_path):
    root = tmp_path / "store"
    with LocalStore(root, min_free_bytes=0) as store:
        for key in ("v1/../../x/native/1", "../../x", "/etc/passwd"):
            put(store, key, b"x")
        fill_store(store, [1])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert len(files(root)) == 1


def test_a_damaged_row_of_the_index_is_one_error_and_rebuilt_at_the_next_open(tmp_path):
    """LMDB's pages carry no checksum, so that a damaged row may reach us."""
    header = BlockHeader(key=str(BlockKey("a", "b", "native", "c")), payload_bytes=4)
    with LocalStore(tmp_path / "store", min_free_bytes=0) as store:
        store.write([WriteRequest(header, [memoryview(b"1234")])])
        rows = store._folder._index
        rows.environment.update(
            lambda txn: txn.put(header.key.encode(), b"short", db=rows._db.blocks)
        )
        with pytest.raises(StoreError, match="open the store again"):
            list(store.scan())
    with LocalStore(tmp_path / "store", min_free_bytes=0) as store:
        assert [row.key for row in store.scan()] == [header.key]
