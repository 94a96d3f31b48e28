"""Sampled prompts are left to the engine, compared, and turn a pair off that keeps too little."""

from dataclasses import replace

import pytest
import torch
from prometheus_client import REGISTRY

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.errors import ArtifactError
from kvstore_xfer.gate.relation import MIN_SAMPLES, Relation
from kvstore_xfer.gate.watch import WatchRecord, load_watch, save_watch, watch_file
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.base import WriteRequest
from kvstore_xfer.tier.policy import Policy
from kvstore_xfer.tier.watch import PATIENCE, is_sampled

TOKENS = 64
ALWAYS = {"sampled_share": 1.0}


def prompt(number):
    return [number, *range(TOKENS - 1)]


def record(toy, artifact, **fields):
    """Probes of noise, and a relation that says: a loss of x nats a token."""
    model = artifact.mapper.target
    shape = (model.layers, model.kv_heads, 16, model.key_dim)
    probes = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    relation = Relation(((1.0, 0.0),) * 8, (0.1,) * 8, 0.5)
    return WatchRecord(artifact.mapper.digest, relation, probes, **fields)


@pytest.fixture
def watched(toy, store, tiers):
    """``watched(min_retention=..., ...)``: source and target tiers, all prompts sampled."""

    def make(check_id="first", **policy):
        artifact = toy.artifact()
        source = tiers(toy.source)
        target = tiers(toy.target, artifact, policy=Policy(**{**ALWAYS, **policy}))
        watch = record(toy, artifact, check_id=check_id)
        target.pairs = tuple(replace(pair, watch=watch) for pair in target.pairs)
        target._planner = target._make_planner()
        return source, target

    return make


def ask(toy, source, target, number, first=0):
    """The source has the prompt; the target asks, and computes what it was not given."""
    tokens = prompt(number)
    toy.prefill(source, toy.source, tokens)
    results, _ = toy.ask(target, tokens)
    served = next((i for i, result in enumerate(results) if not result.served), len(results))
    toy.prefill(target, toy.target, tokens, first=served, blocks=slice(served, None))
    target.flush()
    return results


def count(status):
    labels = {"source": "source", "target": "target", "direction": "up", "status": status}
    return REGISTRY.get_sample_value("kvxfer_samples_total", labels) or 0


def test_a_sampled_prompt_is_left_to_the_engine_and_compared(toy, watched):
    source, target = watched(min_retention=1e-9)
    declined, compared = count("declined"), count("compared")
    results = ask(toy, source, target, 1)
    assert {(r.outcome, r.reason) for r in results} == {(Outcome.DECLINED, Reason.SAMPLED)}
    assert (count("declined"), count("compared")) == (declined + 1, compared + 1)
    again, _ = toy.ask(target, prompt(1))
    assert {result.outcome for result in again} == {Outcome.NATIVE}
    pair = {"source": "source", "target": "target", "direction": "up"}
    low, mean, high = (
        REGISTRY.get_sample_value("kvxfer_observed_retention", {**pair, "bound": bound})
        for bound in ("low", "mean", "high")
    )
    assert 0 < low <= mean <= high < 1


def test_derived_blocks_of_a_sampled_prompt_are_compared_from_their_source(toy, watched):
    source, target = watched(min_retention=1e-9)
    target.pairs = tuple(
        replace(pair, policy=replace(pair.policy, sampled_share=0.0)) for pair in target.pairs
    )
    target._planner = target._make_planner()
    tokens = prompt(2)
    toy.prefill(source, toy.source, tokens)
    first, _ = toy.ask(target, tokens)
    assert {result.outcome for result in first} == {Outcome.CONVERTED}
    target.flush()
    target.pairs = tuple(
        replace(pair, policy=replace(pair.policy, sampled_share=1.0)) for pair in target.pairs
    )
    target._planner = target._make_planner()
    compared = count("compared")
    results = ask(toy, source, target, 2)
    assert {result.reason for result in results} == {Reason.SAMPLED}
    assert count("compared") == compared + 1


def test_nothing_is_sampled_without_a_relation_or_with_a_share_of_zero(toy, watched, tiers):
    source, target = watched(sampled_share=0.0)
    assert all(result.served for result in ask(toy, source, target, 3))
    plain = tiers(toy.target, toy.artifact(), policy=Policy(**ALWAYS))
    plain.clear()
    assert all(result.served for result in ask(toy, source, plain, 4))


def test_the_share_is_kept_and_the_choice_depends_on_the_hash_alone():
    names = [f"{number:064x}" for number in range(20_000)]
    chosen = [name for name in names if is_sampled(name, 0.05)]
    assert len(chosen) == pytest.approx(1000, rel=0.12)
    assert chosen == [name for name in names if is_sampled(name, 0.05)]
    assert not any(is_sampled(name, 0.0) for name in names)
    assert all(is_sampled(name, 1.0) for name in names)


def test_a_pair_that_keeps_too_little_is_switched_off_for_all_and_for_good(
    toy, watched, tiers, caplog
):
    source, target = watched(min_retention=0.999)
    for number in range(MIN_SAMPLES):
        assert target.pairs[0].refusal is None
        ask(toy, source, target, 100 + number)
    assert target.pairs[0].refusal is Reason.RETENTION
    assert "SWITCHED OFF" in caplog.text
    assert "kvxfer check" in caplog.text
    labels = {"source": "source", "target": "target", "direction": "up"}
    assert REGISTRY.get_sample_value("kvxfer_pair_switched_off", labels) == 1
    assert REGISTRY.get_sample_value("kvxfer_gate_open", labels) == 0
    results = ask(toy, source, target, 200)
    assert {(r.outcome, r.reason) for r in results} == {(Outcome.DECLINED, Reason.RETENTION)}
    # Another rank or host, or this one after a restart:
    _, other = watched(min_retention=0.999)
    results = ask(toy, source, other, 201)
    assert {(r.outcome, r.reason) for r in results} == {(Outcome.DECLINED, Reason.RETENTION)}
    # Checked again: a new record, and the pair serves (here: is sampled) again.
    _, checked = watched(min_retention=0.999, check_id="second")
    results = ask(toy, source, checked, 202)
    assert {(r.outcome, r.reason) for r in results} == {(Outcome.DECLINED, Reason.SAMPLED)}


def test_an_off_record_that_was_evicted_is_written_again(toy, watched, store):
    source, target = watched(min_retention=0.999)
    for number in range(MIN_SAMPLES):
        ask(toy, source, target, 300 + number)
    key = next(row.key for row in store.scan() if "/off-" in row.key)
    store.delete([key])
    ask(toy, source, target, 400)
    assert store.exists([key]) == [True]


def test_samples_outlive_a_restart(toy, watched):
    source, target = watched(min_retention=0.999)
    for number in range(MIN_SAMPLES - 1):
        ask(toy, source, target, 600 + number)
    _, restarted = watched(min_retention=0.999)
    assert restarted.pairs[0].refusal is None
    ask(toy, source, restarted, 650)
    assert restarted.pairs[0].refusal is Reason.RETENTION


@pytest.mark.parametrize("state", [b"", b"{", b"[]", b'{"samples": [1e999]}', b'{"samples": 1}'])
def test_samples_that_cannot_be_read_are_those_of_this_process(toy, watched, store, state, caplog):
    source, target = watched(min_retention=0.999)
    ask(toy, source, target, 700)
    (key,) = [row.key for row in store.scan() if "/samples-" in row.key]
    header = BlockHeader(key=key, payload_bytes=len(state))
    store.write([WriteRequest(header, [memoryview(state)])], overwrite=True)
    for number in range(1, MIN_SAMPLES):
        assert target.pairs[0].refusal is None
        ask(toy, source, target, 700 + number)
    assert target.pairs[0].refusal is Reason.RETENTION
    assert caplog.text.count("its samples") == 1


def test_an_honest_pair_stays_on(toy, watched):
    source, target = watched(min_retention=0.01)
    for number in range(MIN_SAMPLES + 2 * PATIENCE):
        ask(toy, source, target, 500 + number)
    assert target.pairs[0].refusal is None


def test_a_sample_whose_source_is_gone_is_dropped(toy, watched, store):
    source, target = watched(min_retention=0.999)
    toy.prefill(source, toy.source, prompt(5))
    toy.ask(target, prompt(5))
    source.clear()
    dropped = count("dropped")
    toy.prefill(target, toy.target, prompt(5))
    target.flush()
    assert count("dropped") == dropped + 1


def test_a_broken_store_ends_no_comparison_thread(toy, watched, store):
    source, target = watched(min_retention=1e-9)
    toy.prefill(source, toy.source, prompt(6))
    toy.ask(target, prompt(6))
    store.broken.add("read")
    toy.prefill(target, toy.target, prompt(6))
    target.flush()
    store.broken.clear()
    compared = count("compared")
    ask(toy, source, target, 7)
    assert count("compared") == compared + 1


def test_what_a_check_leaves_is_read_back_and_damage_is_seen(toy, tmp_path):
    written = record(toy, toy.artifact())
    save_watch(tmp_path, "float32", written)
    read = load_watch(tmp_path, "float32")
    assert (read.mapper_digest, read.relation, read.check_id) == (
        written.mapper_digest,
        written.relation,
        written.check_id,
    )
    assert torch.equal(read.probes, written.probes)
    assert load_watch(tmp_path, "bfloat16") is None
    file = watch_file(tmp_path, "float32")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError, match="kvxfer check"):
        load_watch(tmp_path, "float32")


def test_a_relation_of_another_mapper_is_not_used(toy, tiers):
    tier = tiers(toy.target)
    engine = toy.engine(toy.target)
    from kvstore_xfer.mapper.convert import TorchConverter
    from kvstore_xfer.tier.pair import make_pair
    from kvstore_xfer.tier.policy import Direction

    pair = make_pair(
        toy.artifact(),
        toy.target,
        engine.identity,
        engine.own_shard,
        Policy(),
        Direction.UP,
        TorchConverter,
        watch=record(toy, toy.artifact(seed=1)),
    )
    assert pair.watch is None
    assert tier.pairs == ()


def test_more_samples_narrow_the_interval():
    relation = Relation(((0.1, 0.1), (0.12, 0.05)) * 50, (0.2,) * 8, 0.9)
    few, many = (relation.estimate([0.1, 0.3] * n) for n in (4, 64))
    assert few.low < many.low < many.mean < many.high < few.high
