"""Everything that can go wrong behind the large model, 50 requests each: no answer may be wrong.

What an answer must be follows from how many of the prompt's tokens the engine took from the store,
and the counters must say the same: computed by transformers, without any engine.
"""

import shutil
from collections import Counter
from dataclasses import replace

import pytest
from sglang_cpu.engine import PAGE, TierEngine, extra_config
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
    for prompt in prompts:
        engines.small.ask_and_store(prompt)
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
    blocks, served = Counter(), []
    for number, prompt in enumerate(prompts):
        before(number)
        asked = engine.ask(prompt)
        from_storage = asked.reply.from_storage
        if asked.of("declined", "missed") == 0 or from_storage:
            assert from_storage == PAGE * asked.of("converted", "derived")
        answer = oracle.of_target(prompt, from_storage)
        assert answer.agrees(asked.reply.token_ids), (number, from_storage, asked)
        blocks += asked.blocks
        served.append(from_storage // PAGE)
    return blocks, served


@pytest.fixture
def large(engines):
    yield engines.large
    engines.large.attach(engines.manifest)


def put_back(away, store):
    """The engine makes itself a new folder as soon as there is none."""
    for attempt in range(100):
        if store.exists():
            store.rename(store.with_name(f"interim-{attempt}"))
        try:
            away.rename(store)
        except OSError:
            continue
        return
    raise AssertionError("the folder could not be put back")


def test_a_store_that_is_killed_and_comes_back(large, store, manifest, prompts, oracle):
    large.attach(manifest(store))

    away = store.with_name("away")

    def kill_and_restart(number):
        if number == 15:
            store.rename(away)
        if number == 35:
            put_back(away, store)

    blocks, served = ask_all(large, prompts, oracle, kill_and_restart)
    assert served == [WHOLE] * 15 + [0] * 20 + [WHOLE] * 15
    assert blocks[("converted", "none")] == 30 * WHOLE


def blocks_without_room(engine):
    rows = engine.samples("kvxfer_written_blocks_total")
    return sum(value for labels, value in rows if labels["status"] == "full")


def test_a_full_disk(large, store, manifest, prompts, oracle):
    """What is there is served, what is made finds no room and is made again."""
    large.attach(manifest(store, query="?min_free=500TiB"))
    before = blocks_without_room(large)
    blocks, served = ask_all(large, prompts, oracle)
    assert served == [WHOLE] * REQUESTS
    assert blocks == {("converted", "none"): REQUESTS * WHOLE}
    eventually(lambda: blocks_without_room(large) - before == REQUESTS * WHOLE, 30)
    assert large.fresh(prompts[0]).blocks == {("converted", "none"): WHOLE}


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
    rates = {"prefill_tokens_per_second": 1.0, "conversion_tokens_per_second": 1e6}
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


def test_sglangs_own_failure_injector(launch, store, manifest, prompts, oracle):
    chaos = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
    }
    settings = {"dtype": "float32", "environment": chaos, "arguments": ["--enable-metrics"]}
    with launch("large", storage=extra_config(manifest(store)), **settings) as server:
        _, served = ask_all(TierEngine(server), prompts, oracle)
    assert set(served) == {0, WHOLE}
    assert served.count(WHOLE) > REQUESTS // 3
