"""Everything that can go wrong behind the large model, 50 requests each: no answer may be wrong.

What an answer must be follows from how many of the prompt's tokens the engine took from the store,
and the counters must say the same: computed by transformers, without any engine.
"""

import os
import resource
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sglang_cpu.engine import NEW_TOKENS, PAGE
from sglang_cpu.server import eventually

from kvstore_xfer.blocks.header import decode
from kvstore_xfer.gate.record import ACCEPTED, REJECTED, GateRecord, subject
from kvstore_xfer.mapper.artifact import Artifact, load, record_gate, save

REQUESTS, WHOLE = 50, 12


@pytest.fixture(scope="module")
def prompts(texts):
    return texts(REQUESTS)


@pytest.fixture(scope="module")
def filled(engines, manifest, prompts, tmp_path_factory):
    """A store that holds the small model's blocks of all prompts; tests work on copies."""
    store = tmp_path_factory.mktemp("filled")
    engines.small.attach(manifest(store))
    engines.small.store_all(prompts)
    engines.large.attach(manifest(store))  # so that its identity record is there
    for engine in (engines.small, engines.large):
        engine.attach(engines.manifest)
    return store


@pytest.fixture
def store(filled, tmp_path):
    return shutil.copytree(filled, tmp_path / "store")


def ask_all(engine, prompts, oracle, before=lambda number: None):
    """Ask every prompt and check the answer. All lookups, and the pages served to each."""
    engine.server.flush_cache()
    first = known = engine.lookups()
    served = []
    for number, prompt in enumerate(prompts):
        before(number)
        reply = engine.server.generate(prompt, max_new_tokens=NEW_TOKENS)
        now = engine.lookups()
        blocks, known = now - known, now
        # Exactly what the counters say was converted, and nothing of any other kind.
        made = blocks["converted", "none"] + blocks["derived", "none"]
        assert reply.from_storage == PAGE * made, (number, reply, blocks)
        answer = oracle.of_target(prompt, reply.from_storage)
        assert answer.agrees(reply.token_ids), (number, reply, blocks)
        served.append(made)
    return known - first, served


@pytest.fixture
def large(engines):
    yield engines.large
    engines.large.attach(engines.manifest)


def test_a_store_that_is_lost_and_comes_back(large, store, manifest, prompts, oracle):
    """First the blocks' files are gone, their index still there; later the whole folder."""
    copies = [shutil.copytree(store, store.with_name(f"copy-{number}")) for number in range(2)]
    large.attach(manifest(store))

    def lose_and_restore(number):
        if number == 10:
            shutil.rmtree(store / "blocks")
        elif number == 30:
            shutil.rmtree(store)
        elif number in (20, 40):
            put_back(copies.pop(), store)

    blocks, served = ask_all(large, prompts, oracle, lose_and_restore)
    there, gone = [WHOLE] * 10, [0] * 10
    assert served == there + gone + there + gone + there
    assert blocks["converted", "none"] == 30 * WHOLE
    lost = {key: count for key, count in blocks.items() if key[0] == "missed"}
    assert sum(lost.values()) == 20 * WHOLE
    # Of every prompt whose files are gone the first block, found to be so, ends the run.
    assert (lost["missed", "corrupt"], lost["missed", "after_gap"]) == (10, 10 * (WHOLE - 1))
    # Nobody can look into a folder that is not there; the engine may have made a new one.
    assert {reason for _, reason in lost} <= {"corrupt", "after_gap", "store_error", "absent"}
    assert large.errors() == 0


def put_back(copy, store):
    """The engine makes itself a new folder as soon as there is none."""
    for attempt in range(100):
        if store.exists():
            store.rename(store.with_name(f"interim-{attempt}"))
        try:
            copy.rename(store)
        except OSError:
            continue
        return
    raise AssertionError("the folder could not be put back")


@pytest.fixture
def disk(tmp_path):
    """A folder to be filled up: a file system of its own where mounting is permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = _mount(folder, "-t", "tmpfs", "-o", "size=256m", "tmpfs")
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def _mount(folder, *options):
    command = ["mount", *options, str(folder)]
    return not subprocess.run(command, capture_output=True, check=False).returncode


@contextmanager
def no_room_on(folder, block_bytes):
    """The kernel refuses every new block, and nothing else.

    On a file system of its own there is no inode left: ENOSPC. Elsewhere whoever has the store
    open may not write a file of a block's size: EFBIG, half way through.
    """
    if os.path.ismount(folder):
        room = os.statvfs(folder)
        assert _mount(folder, "-o", f"remount,nr_inodes={room.f_files - room.f_ffree}")
        with pytest.raises(OSError, match="No space left"):
            (folder / "one-more").touch()
        yield
        assert _mount(folder, "-o", "remount,nr_inodes=1000000")
        return
    users = [
        pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _uses(pid, folder)
    ]
    assert users
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in users}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (block_bytes - 1, hard))
    yield
    for pid, limits in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _uses(pid, folder):
    try:
        return str(folder) in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False  # it ended meanwhile


def blocks_without_room(engine):
    rows = engine.samples("kvxfer_written_blocks_total")
    return sum(value for labels, value in rows if labels["status"] == "full")


def test_a_full_disk(large, filled, disk, manifest, prompts, oracle):
    """What is there is served, what is made finds no room and is made again."""
    store = shutil.copytree(filled, disk / "store")
    page = oracle.converted_page(prompts[0][:PAGE])
    large.attach(manifest(store))
    before, written = blocks_without_room(large), large.written()
    with no_room_on(disk, page.keys.nbytes + page.values.nbytes):
        blocks, served = ask_all(large, prompts, oracle)
        assert served == [WHOLE] * REQUESTS
        assert blocks == {("converted", "none"): REQUESTS * WHOLE}
        eventually(lambda: large.written() - written == REQUESTS * WHOLE, 30)
        assert blocks_without_room(large) - before == REQUESTS * WHOLE
        assert large.fresh(prompts[0]).blocks == {("converted", "none"): WHOLE}
    large.server.flush_cache()
    assert large.ask_and_store(prompts[0]).blocks == {("converted", "none"): WHOLE}
    assert large.fresh(prompts[0]).blocks == {("derived", "none"): WHOLE}


def damage(store, first_token):
    """Flip the last byte of every block that starts at this token."""
    for file in (path for path in (store / "blocks").rglob("*") if path.is_file()):
        raw = bytearray(file.read_bytes())
        if decode(raw).first_token == first_token:
            raw[-1] ^= 0xFF
            file.write_bytes(raw)


def test_corrupted_payloads(large, store, manifest, prompts, oracle):
    damage(store, first_token=5 * PAGE)
    large.attach(manifest(store))
    blocks, served = ask_all(large, prompts, oracle)
    assert served == [5] * REQUESTS
    assert blocks[("converted", "none")] == 5 * REQUESTS
    assert blocks[("missed", "corrupt")] == REQUESTS


def rejected(artifact, folder):
    saved = save(folder, artifact)
    accepted = GateRecord.from_json(artifact.gate["float32"])
    record_gate(folder, "float32", replace(accepted, verdict=REJECTED).to_json())
    return saved


def for_other_models(artifact, folder):
    """Accepted, but for a target with other weights."""
    target = replace(artifact.mapper.target, weights_digest="others")
    saved = save(folder, Artifact(replace(artifact.mapper, target=target)))
    rates = {
        "prefill_tokens_per_second": 1.0,
        "conversion_tokens_per_second": 1e6,
        "longest_prefix_tokens": 4096,
    }
    record = GateRecord(ACCEPTED, "", **subject(saved.mapper, "float32"), **rates)
    record_gate(folder, "float32", record.to_json())
    return saved


@pytest.mark.parametrize(
    ("make", "reason"), [(rejected, "gate_rejected"), (for_other_models, "fingerprint")]
)
def test_a_mapper_that_must_not_serve(
    make, reason, large, store, manifest, prompts, oracle, family_mapper, tmp_path
):
    make(load(family_mapper.folder), tmp_path / "mapper")
    large.attach(manifest(store, mapper=tmp_path / "mapper"))
    blocks, served = ask_all(large, prompts, oracle)
    assert served == [0] * REQUESTS
    assert blocks == {("declined", reason): REQUESTS * WHOLE}
    assert large.samples("kvxfer_gate_open")[0][1] == 0


def test_sglangs_own_failure_injector(large, store, manifest, prompts, oracle):
    """A fifth of all calls fail, and each is late by up to 50 ms: see `chaos_storage`."""
    chaos = {"module_path": "chaos_storage", "class_name": "ChaosStorage"}
    large.attach(manifest(store), **chaos)
    _, served = ask_all(large, prompts, oracle)
    assert set(served) == {0, WHOLE}
    assert served.count(WHOLE) > REQUESTS // 3
    assert "test injector enabled" in large.server.log.read_text()
