"""Each rule of the tier as a scenario: what is found, what is served, what is refused and why."""

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from prometheus_client import REGISTRY

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.blocks.identity import IdentityRecord
from kvstore_xfer.blocks.key import NATIVE, BlockKey, Shard, derived_kind
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.maps import Method
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_xfer.tier import tier as tier_module
from kvstore_xfer.tier.policy import Policy

TOKENS = tuple(range(10, 34))  # six blocks of four
ABSENT = (Outcome.MISSED, Reason.ABSENT)
AFTER_GAP = (Outcome.MISSED, Reason.AFTER_GAP)
NATIVE_HIT, DERIVED, CONVERTED = (
    (outcome, Reason.NONE) for outcome in (Outcome.NATIVE, Outcome.DERIVED, Outcome.CONVERTED)
)


def verdicts(answers):
    return [(answer.outcome, answer.reason) for answer in answers]


def declined(reason):
    return (Outcome.DECLINED, reason)


def counter(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture
def family(toy, tiers):
    """A source tier that has stored all blocks of TOKENS, and a target tier beside it."""
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    assert toy.prefill(source, toy.source, TOKENS) == [WriteStatus.STORED] * 6
    return source, target


# what find says


def test_find_says_how_each_block_can_be_had(toy, tiers, store):
    """Native before derived before convertible; nothing behind the first gap."""
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    toy.prefill(source, toy.source, TOKENS, blocks=slice(0, 3))
    toy.ask(target, TOKENS[:8])
    target.flush()
    toy.prefill(target, toy.target, TOKENS, blocks=slice(0, 1))
    toy.prefill(target, toy.target, TOKENS, first=4, blocks=slice(4, 5))
    plans = target.find(toy.hashes(TOKENS))
    assert verdicts(plans) == [NATIVE_HIT, DERIVED, CONVERTED, ABSENT, AFTER_GAP, ABSENT]
    assert [plan.chain_hash for plan in plans] == toy.hashes(TOKENS)


def test_find_reads_nothing_but_the_index_and_identity_records(toy, family, store):
    calls = []
    store.before = lambda method, argument: calls.append((method, argument))
    family[1].find(toy.hashes(TOKENS))
    keys = [request.key for method, argument in calls if method == "read" for request in argument]
    assert {BlockKey.parse(key).kind for key in keys} == {"record"}
    assert {method for method, _ in calls} == {"exists", "read"}


def test_nothing_is_found_in_an_empty_store(toy, tiers):
    target = tiers(toy.target, toy.artifact())
    assert verdicts(target.find(toy.hashes(TOKENS))) == [ABSENT] * 6
    assert target.find([]) == []
    assert target.read([], []) == []


@pytest.mark.parametrize("name", ["", "a/b", "../x", "x" * 600, "\x00"])
def test_a_hash_that_is_no_key_is_absent(toy, tiers, name):
    target = tiers(toy.target, toy.artifact())
    assert verdicts(target.find([name])) == [ABSENT]
    page = toy.pages(target, 1)
    assert target.write([name], page, 0) == [WriteStatus.ERROR]


# what read serves


def test_native_blocks_come_back_bit_for_bit(toy, tiers, helpers):
    target = tiers(toy.target)
    toy.prefill(target, toy.target, TOKENS)
    results, pages = toy.ask(target, TOKENS)
    assert verdicts(results) == [NATIVE_HIT] * 6
    for page, expected in zip(pages, toy.blocks(toy.cache(toy.target, TOKENS)), strict=True):
        assert helpers.equal(page, expected)


def test_pages_of_any_strides_are_filled_and_read(toy, tiers, helpers):
    """A pool ``[slot, layer, head, width]``, whose blocks are no runs of bytes."""
    target = tiers(toy.target)
    blocks = toy.blocks(toy.cache(toy.target, TOKENS))

    def scattered(page):
        return KvPage(
            *(p.transpose(0, 1).contiguous().transpose(0, 1) for p in vars(page).values())
        )

    target.write(toy.hashes(TOKENS), [scattered(block) for block in blocks], 0)
    pages = [scattered(page) for page in toy.pages(target, 6)]
    assert pages[0].segments() is None
    results = target.read(target.find(toy.hashes(TOKENS)), pages)
    assert verdicts(results) == [NATIVE_HIT] * 6
    assert all(helpers.equal(a, b) for a, b in zip(pages, blocks, strict=True))


@pytest.mark.parametrize("method", [Method.HEAD_LOCAL, Method.FULL_HEAD])
def test_a_siblings_blocks_are_converted_then_served_derived(toy, tiers, helpers, method):
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact(method=method))
    toy.prefill(source, toy.source, TOKENS)
    results, pages = toy.ask(target, TOKENS)
    assert verdicts(results) == [CONVERTED] * 6
    expected = toy.blocks(toy.converted(toy.artifact(method=method), TOKENS))
    for page, block in zip(pages, expected, strict=True):
        helpers.close(page, block)
    target.flush()
    again, derived = toy.ask(target, TOKENS)
    assert verdicts(again) == [DERIVED] * 6
    assert all(helpers.equal(a, b) for a, b in zip(pages, derived, strict=True))


def test_a_derived_block_names_its_origin_and_position(toy, family, store):
    source, target = family
    toy.ask(target, TOKENS)
    target.flush()
    digest = toy.artifact().mapper.digest
    shard = str(toy.engine(toy.target).own_shard)
    for number, name in enumerate(toy.hashes(TOKENS)):
        key = str(BlockKey(target.identity.digest, shard, derived_kind(digest), name))
        (read,) = store.read([ReadRequest(key)])
        assert read.status is ReadStatus.OK
        assert read.header.first_token == 4 * number
        assert read.header.provenance.source_identity == source.identity.digest
        assert read.header.provenance.mapper_digest == digest


def test_conversion_continues_behind_native_blocks_at_the_right_position(toy, family, helpers):
    _, target = family
    toy.prefill(target, toy.target, TOKENS, blocks=slice(0, 2))
    toy.prefill(target, toy.target, TOKENS, first=3, blocks=slice(3, 4))
    results, pages = toy.ask(target, TOKENS)
    kinds = [NATIVE_HIT, NATIVE_HIT, CONVERTED, NATIVE_HIT, CONVERTED, CONVERTED]
    assert verdicts(results) == kinds
    native, mapped = (
        toy.blocks(cache)
        for cache in (toy.cache(toy.target, TOKENS), toy.converted(toy.artifact(), TOKENS))
    )
    for page, kind, own, made in zip(pages, kinds, native, mapped, strict=True):
        helpers.close(page, own if kind is NATIVE_HIT else made)


def test_many_groups_equal_one_conversion(toy, tiers, helpers, monkeypatch):
    monkeypatch.setattr(tier_module, "_GROUP_TOKENS", 8)
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    tokens = tuple(range(60))
    toy.prefill(source, toy.source, tokens)
    results, pages = toy.ask(target, tokens)
    assert verdicts(results) == [CONVERTED] * 15
    for page, block in zip(pages, toy.blocks(toy.converted(toy.artifact(), tokens)), strict=True):
        helpers.close(page, block)


def test_a_batch_of_an_earlier_find_is_converted_at_its_own_position(toy, family, helpers):
    _, target = family
    names = toy.hashes(TOKENS)[2:5]
    pages = toy.pages(target, 3)
    results = target.read(target.find(names, whole_prompt=False), pages)
    assert verdicts(results) == [CONVERTED] * 3
    expected = toy.blocks(toy.converted(toy.artifact(), TOKENS))[2:5]
    for page, block in zip(pages, expected, strict=True):
        helpers.close(page, block)


# rule 1: derived blocks


def test_a_derived_block_is_never_a_source(toy, family, tiers):
    _, target = family
    toy.ask(target, TOKENS)
    target.flush()
    third = tiers(toy.third, toy.artifact(toy.target, toy.third, seed=1))
    assert verdicts(third.find(toy.hashes(TOKENS))) == [ABSENT] * 6
    toy.prefill(target, toy.target, TOKENS, blocks=slice(0, 1))
    assert verdicts(third.find(toy.hashes(TOKENS))) == [CONVERTED] + [ABSENT] * 5


def test_a_derived_block_answers_for_its_own_identity_and_mapper_only(toy, family, tiers):
    source, target = family
    toy.ask(target, TOKENS)
    target.flush()
    source.clear()
    names = toy.hashes(TOKENS)
    assert verdicts(target.find(names)) == [DERIVED] * 6
    updated = tiers(toy.target, toy.artifact(), variant="weights updated")
    assert verdicts(updated.find(names)) == [ABSENT] * 6
    refitted = tiers(toy.target, toy.artifact(seed=7))
    assert verdicts(refitted.find(names)) == [ABSENT] * 6
    assert verdicts(tiers(toy.target).find(names)) == [ABSENT] * 6


def test_derived_blocks_give_way_to_native_ones(toy, family, store, helpers):
    _, target = family
    toy.ask(target, TOKENS)
    target.flush()
    toy.prefill(target, toy.target, TOKENS)
    kinds = {BlockKey.parse(row.key).kind for row in store.scan(f"v1/{target.identity.digest}/h")}
    assert kinds == {NATIVE}
    results, pages = toy.ask(target, TOKENS)
    assert verdicts(results) == [NATIVE_HIT] * 6
    for page, expected in zip(pages, toy.blocks(toy.cache(toy.target, TOKENS)), strict=True):
        assert helpers.equal(page, expected)


@pytest.mark.parametrize("first", [0, None])
def test_a_derived_block_that_comes_late_is_not_stored(toy, family, store, first):
    """The native block arrives while the derived one still waits in the queue."""
    _, target = family
    waiting, gate = threading.Event(), threading.Event()
    target._writer.submit(lambda: (waiting.set(), gate.wait(10)))
    waiting.wait(10)
    assert verdicts(toy.ask(target, TOKENS)[0]) == [CONVERTED] * 6
    toy.prefill(target, toy.target, TOKENS, first=first)
    gate.set()
    target.flush()
    kinds = {BlockKey.parse(row.key).kind for row in store.scan(f"v1/{target.identity.digest}/h")}
    assert kinds == {NATIVE if first == 0 else "unplaced"}


# rule 2: gates


def refused(toy, change):
    """An artifact that must not serve, and why."""
    artifact = toy.artifact()
    record = artifact.gate["float32"]
    return {
        "no record": ({}, Reason.GATE_MISSING),
        "rejected": ({"float32": {**record, "verdict": "rejected"}}, Reason.GATE_REJECTED),
        "accepted by an earlier protocol": (
            {"float32": {k: v for k, v in record.items() if k != "protocol"}},
            Reason.GATE_OUTDATED,
        ),
        "another dtype": ({"bfloat16": {**record, "dtype": "bfloat16"}}, Reason.GATE_DTYPE),
        "a record filed under another dtype": (
            {"float32": {**record, "dtype": "bfloat16"}},
            Reason.GATE_DTYPE,
        ),
        "another mapper": ({"float32": {**record, "mapper_digest": "x"}}, Reason.FINGERPRINT),
        "another source": ({"float32": {**record, "source_fingerprint": "x"}}, Reason.FINGERPRINT),
        "another target": ({"float32": {**record, "target_fingerprint": "x"}}, Reason.FINGERPRINT),
        "another source RoPE": ({"float32": {**record, "source_rope": "x"}}, Reason.FINGERPRINT),
        "another target RoPE": ({"float32": {**record, "target_rope": "x"}}, Reason.FINGERPRINT),
        "a word that is no verdict": (
            {"float32": {**record, "verdict": "ok"}},
            Reason.GATE_REJECTED,
        ),
    }[change]


@pytest.mark.parametrize(
    "change",
    [
        "no record",
        "rejected",
        "accepted by an earlier protocol",
        "another dtype",
        "a record filed under another dtype",
        "another mapper",
        "another source",
        "another target",
        "another source RoPE",
        "another target RoPE",
        "a word that is no verdict",
    ],
)
def test_nothing_is_converted_without_an_accepted_gate(toy, family, tiers, change):
    gate, reason = refused(toy, change)
    target = tiers(toy.target, replace(toy.artifact(), gate=gate))
    results, pages = toy.ask(target, TOKENS)
    assert verdicts(results)[0] == declined(reason)
    assert not any(result.served for result in results)
    assert all(page.keys.isnan().all() for page in pages)


def test_derived_blocks_of_a_mapper_that_lost_its_gate_are_not_served(toy, family, tiers):
    _, target = family
    toy.ask(target, TOKENS)
    target.flush()
    gate, reason = refused(toy, "rejected")
    later = tiers(toy.target, replace(toy.artifact(), gate=gate))
    assert verdicts(later.find(toy.hashes(TOKENS)))[0] == declined(reason)


@pytest.mark.parametrize("field", ["adapter", "kv_scales", "variant"])
def test_a_target_that_no_gate_has_seen_is_not_converted_for(toy, field):
    engine = toy.engine(toy.target)
    identity = replace(engine.identity, **{field: "x"})
    changed = replace(engine)
    object.__setattr__(changed, "variant", "x")
    assert toy.pair(engine).refusal is None
    assert identity != engine.identity
    assert toy.pair(changed).refusal is Reason.FINGERPRINT


def test_a_mapper_for_a_target_of_other_geometry_is_refused_not_an_error(
    toy, tiers, family, make_description
):
    narrow = make_description("narrow", 3, 2, 8)
    assert toy.pair(toy.engine(narrow, shard=Shard(1, 2, 0, 3))).refusal is Reason.FINGERPRINT
    wide = make_description("wide", 3, 8, 8)
    engine = toy.engine(wide, shard=Shard(6, 8, 0, 3))
    assert toy.pair(engine).refusal is Reason.FINGERPRINT


def test_another_rope_is_another_identity(toy, tiers, make_description):
    """A source run with another RoPE than it was fitted with: same weights, other keys."""
    stretched = make_description("source", 2, 4, 8, theta=77.0, parameters=1000)
    assert stretched.weights_digest == toy.source.weights_digest
    source, target = tiers(stretched), tiers(toy.target, toy.artifact())
    toy.prefill(source, stretched, TOKENS)
    assert verdicts(target.find(toy.hashes(TOKENS))) == [ABSENT] * 6


def test_a_rank_of_a_pipeline_is_not_converted_for(toy, family, tiers):
    target = tiers(toy.target, toy.artifact(), shard=Shard(0, 4, 0, 2))
    assert verdicts(target.find(toy.hashes(TOKENS)))[0] == declined(Reason.UNSUPPORTED)


def test_a_refused_sibling_does_not_hide_a_good_one(toy, family, tiers, make_description):
    bad = toy.artifact(toy.third, toy.target, seed=3)
    third = tiers(toy.third)
    toy.prefill(third, toy.third, TOKENS)
    target = tiers(toy.target, replace(bad, gate={}), toy.artifact())
    assert verdicts(target.find(toy.hashes(TOKENS))) == [CONVERTED] * 6


def test_the_first_sibling_is_preferred_and_the_second_fills_in(toy, tiers, helpers):
    source, third = tiers(toy.source), tiers(toy.third)
    toy.prefill(source, toy.source, TOKENS, blocks=slice(0, 2))
    toy.prefill(third, toy.third, TOKENS)
    second = toy.artifact(toy.third, toy.target, seed=3)
    target = tiers(toy.target, toy.artifact(), second)
    results, pages = toy.ask(target, TOKENS)
    assert verdicts(results) == [CONVERTED] * 6
    by_first, by_second = (
        toy.blocks(toy.converted(artifact, TOKENS)) for artifact in (toy.artifact(), second)
    )
    for page, block in zip(pages, by_first[:2] + by_second[2:], strict=True):
        helpers.close(page, block)


@pytest.mark.parametrize(
    ("policy", "by_first"),
    [
        (Policy(min_tokens=1000), 0),
        (Policy(max_prefix_tokens=8), 2),
        (Policy(hold_back_tokens=8), 4),
        (Policy(conversion_tokens_per_second=1.0), 0),
    ],
    ids=["min_tokens", "max_prefix", "hold_back", "not_worth_it"],
)
def test_a_sibling_that_policy_declines_does_not_hide_the_next(
    toy, family, tiers, helpers, policy, by_first
):
    third = tiers(toy.third)
    toy.prefill(third, toy.third, TOKENS)
    artifacts = toy.artifact(), toy.artifact(toy.third, toy.target, seed=3)
    target = tiers(toy.target, *artifacts, policies=[policy, Policy()])
    results, pages = toy.ask(target, TOKENS)
    assert verdicts(results) == [CONVERTED] * 6
    first, second = (toy.blocks(toy.converted(artifact, TOKENS)) for artifact in artifacts)
    for page, block in zip(pages, first[:by_first] + second[by_first:], strict=True):
        helpers.close(page, block)


def test_when_policy_declines_every_sibling_the_first_one_says_why(toy, family, tiers):
    third = tiers(toy.third)
    toy.prefill(third, toy.third, TOKENS)
    artifacts = toy.artifact(), toy.artifact(toy.third, toy.target, seed=3)
    policies = [Policy(min_tokens=1000), Policy(conversion_tokens_per_second=1.0)]
    target = tiers(toy.target, *artifacts, policies=policies)
    plans = target.find(toy.hashes(TOKENS))
    assert verdicts(plans) == [declined(Reason.MIN_TOKENS)] * 6
    assert all(plan.sibling is target.pairs[0] for plan in plans)


# rule 3: bytes


def test_a_native_block_of_another_shape_ends_the_prefix(toy, tiers, store):
    target = tiers(toy.target)
    toy.prefill(target, toy.target, TOKENS)
    overwrite(toy, store, target, toy.target, 2)
    results, _ = toy.ask(target, TOKENS)
    gap = [AFTER_GAP] * 3
    assert verdicts(results) == [NATIVE_HIT] * 2 + [(Outcome.MISSED, Reason.SHAPE_MISMATCH), *gap]


def overwrite(toy, store, tier, model, number, **fields):
    """Replace a native block by one whose header tells of another shape, or as `fields` say."""
    engine = toy.engine(model)
    key = str(
        BlockKey(tier.identity.digest, str(engine.own_shard), NATIVE, toy.hashes(TOKENS)[number])
    )
    page = KvPage.empty(engine.block_shape)
    page.keys.fill_(0)
    page.values.fill_(0)
    header = BlockHeader(key, engine.block_shape.payload_bytes, **fields)
    store.write([WriteRequest(header, page.segments())], overwrite=True)


def test_a_source_block_of_another_shape_is_not_converted(toy, family, store):
    source, target = family
    overwrite(toy, store, source, toy.source, 1)
    results, _ = toy.ask(target, TOKENS)
    expected = [CONVERTED, (Outcome.MISSED, Reason.SHAPE_MISMATCH)] + [AFTER_GAP] * 4
    assert verdicts(results) == expected


@pytest.mark.parametrize("status", [ReadStatus.CORRUPT, ReadStatus.ERROR, ReadStatus.MISSING])
@pytest.mark.parametrize("whose", ["native", "source"])
def test_a_block_that_cannot_be_read_ends_the_prefix(toy, family, store, status, whose):
    _, target = family
    if whose == "native":
        toy.prefill(target, toy.target, TOKENS)
    names, inner = toy.hashes(TOKENS), store.inner

    class Failing:
        def __getattr__(self, name):
            return getattr(inner, name)

        def read(self, requests):
            found = inner.read(requests)
            bad = [request.key.endswith(names[2]) for request in requests]
            return [
                replace(result, status=status, header=None) if failed else result
                for result, failed in zip(found, bad, strict=True)
            ]

    store.inner = Failing()
    reason = {"corrupt": Reason.CORRUPT, "error": Reason.STORE_ERROR, "missing": Reason.ABSENT}
    served = NATIVE_HIT if whose == "native" else CONVERTED
    results, _ = toy.ask(target, TOKENS)
    expected = [served] * 2 + [(Outcome.MISSED, reason[status.value])] + [AFTER_GAP] * 3
    assert verdicts(results) == expected


# positions


def test_blocks_without_a_certain_position_are_served_but_never_converted(toy, tiers, helpers):
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    toy.prefill(source, toy.source, TOKENS, first=None)
    unplaced = (Outcome.DECLINED, Reason.POSITION_UNKNOWN)
    assert verdicts(target.find(toy.hashes(TOKENS))) == [unplaced] * 6
    results, pages = toy.ask(source, TOKENS)
    assert verdicts(results) == [NATIVE_HIT] * 6
    for page, expected in zip(pages, toy.blocks(toy.cache(toy.source, TOKENS)), strict=True):
        assert helpers.equal(page, expected)


@pytest.mark.parametrize(
    ("positions", "served"),
    [
        ([0, 1, 5, 3, 4, 5], 2),  # one block claims to be elsewhere
        ([1, 0, 2, 3, 4, 5], 1),  # swapped
        ([3, 3, 3, 3, 3, 3], 1),  # all at the same place
        ([0, 0, 0, 0, 0, 0], 1),  # before the place where it stands in the prompt
    ],
)
@pytest.mark.parametrize("group", [4, 1024])
def test_positions_out_of_order_are_not_converted(
    toy, tiers, monkeypatch, positions, served, group
):
    """Whether the blocks are read in one group or one by one."""
    monkeypatch.setattr(tier_module, "_GROUP_TOKENS", group)
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    for number, position in enumerate(positions):
        toy.prefill(source, toy.source, TOKENS, first=position, blocks=slice(number, number + 1))
    results, _ = toy.ask(target, TOKENS)
    assert verdicts(results)[:served] == [CONVERTED] * served
    assert verdicts(results)[served] == declined(Reason.POSITION_UNKNOWN)
    assert verdicts(results)[served + 1 :] == [AFTER_GAP] * (5 - served)


# policy


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(enabled=False), [declined(Reason.DISABLED)] * 6),
        (Policy(min_tokens=24), [CONVERTED] * 6),
        (Policy(min_tokens=25), [declined(Reason.MIN_TOKENS)] * 6),
        (Policy(hold_back_tokens=1), [CONVERTED] * 5 + [declined(Reason.HOLD_BACK)]),
        (Policy(hold_back_tokens=4), [CONVERTED] * 5 + [declined(Reason.HOLD_BACK)]),
        (Policy(hold_back_tokens=5), [CONVERTED] * 4 + [declined(Reason.HOLD_BACK)] * 2),
        (Policy(hold_back_tokens=99), [declined(Reason.HOLD_BACK)] * 6),
        (Policy(max_prefix_tokens=8), [CONVERTED] * 2 + [declined(Reason.MAX_PREFIX)] * 4),
        (Policy(max_prefix_tokens=9), [CONVERTED] * 2 + [declined(Reason.MAX_PREFIX)] * 4),
        (Policy(max_prefix_tokens=8, min_tokens=9), [declined(Reason.MIN_TOKENS)] * 6),
        (Policy(conversion_tokens_per_second=101.0), [CONVERTED] * 6),
        (Policy(conversion_tokens_per_second=99.0), [declined(Reason.NOT_WORTH_IT)] * 6),
        (Policy(prefill_tokens_per_second=2000.0), [declined(Reason.NOT_WORTH_IT)] * 6),
        (Policy(conversion_overhead_seconds=0.2), [CONVERTED] * 6),
        (Policy(conversion_overhead_seconds=0.3), [declined(Reason.NOT_WORTH_IT)] * 6),
    ],
    ids=str,
)
def test_each_limit_of_the_policy_has_its_reason(toy, family, tiers, policy, expected):
    target = tiers(toy.target, toy.artifact(), policy=policy)
    results, pages = toy.ask(target, TOKENS)
    found = [plan for plan in verdicts(results) if plan != AFTER_GAP]
    assert found == expected[: len(found)]
    assert verdicts(results) == [
        e if e[0] is not Outcome.MISSED else AFTER_GAP for e in verdicts(results)
    ]
    assert [r.served for r in results] == [e == CONVERTED for e in expected]
    for page, result in zip(pages, results, strict=True):
        assert bool(page.keys.isnan().all()) is not result.served


def test_blocks_behind_a_gap_do_not_count_for_the_minimum(toy, tiers):
    source = tiers(toy.source)
    target = tiers(toy.target, toy.artifact(), policy=Policy(min_tokens=12))
    toy.prefill(source, toy.source, TOKENS, blocks=slice(0, 2))
    toy.prefill(source, toy.source, TOKENS, first=3, blocks=slice(3, 6))
    assert verdicts(target.find(toy.hashes(TOKENS)))[0] == declined(Reason.MIN_TOKENS)
    toy.prefill(source, toy.source, TOKENS, first=2, blocks=slice(2, 3))
    assert verdicts(target.find(toy.hashes(TOKENS))) == [CONVERTED] * 6


def test_held_back_blocks_are_not_served_derived_either(toy, family, tiers):
    _, target = family
    toy.ask(target, TOKENS)
    target.flush()
    careful = tiers(toy.target, toy.artifact(), policy=Policy(hold_back_tokens=8))
    results, _ = toy.ask(careful, TOKENS)
    assert verdicts(results)[:5] == [DERIVED] * 4 + [declined(Reason.HOLD_BACK)]
    toy.prefill(careful, toy.target, TOKENS)
    assert verdicts(toy.ask(careful, TOKENS)[0]) == [NATIVE_HIT] * 6


def test_a_batch_keeps_to_the_longest_prefix_by_its_own_positions(toy, family, tiers):
    target = tiers(toy.target, toy.artifact(), policy=Policy(max_prefix_tokens=16))
    names = toy.hashes(TOKENS)[2:6]
    results = target.read(target.find(names, whole_prompt=False), toy.pages(target, 4))
    assert verdicts(results) == [CONVERTED] * 2 + [declined(Reason.MAX_PREFIX), AFTER_GAP]


@pytest.mark.parametrize("whole_prompt", [True, False])
def test_nothing_far_beyond_what_was_checked_is_converted(toy, family, tiers, whole_prompt):
    made = toy.artifact()
    record = toy.record(made.mapper, longest_prefix_tokens=4)
    measured = replace(made, gate={"float32": record.to_json()})
    target = tiers(toy.target, measured, policy=Policy(max_beyond_checked=2.5))
    plan = target.find(toy.hashes(TOKENS), whole_prompt=whole_prompt)
    results = target.read(plan, toy.pages(target, 6))
    assert verdicts(results)[:3] == [CONVERTED] * 2 + [declined(Reason.BEYOND_CHECKED)]
    assert not any(result.served for result in results[2:])


def test_a_store_that_hangs_costs_the_budget_and_not_the_engine(toy, family, tiers, store):
    target = tiers(toy.target, toy.artifact(), policy=Policy(budget_seconds=0.1))
    toy.prefill(target, toy.target, TOKENS, blocks=slice(0, 2))
    plans = target.find(toy.hashes(TOKENS))
    release = threading.Event()

    def hang(method, argument):
        if method == "read" and threading.current_thread().name.startswith("kvxfer-read"):
            release.wait(20)

    store.before = hang
    started = time.monotonic()
    results = target.read(plans, toy.pages(target, 6))
    taken = time.monotonic() - started
    release.set()
    assert verdicts(results)[:3] == [NATIVE_HIT] * 2 + [declined(Reason.BUDGET)]
    assert not any(result.served for result in results[3:])
    assert taken < 5


def test_an_endless_budget_is_possible(toy, family, tiers):
    target = tiers(toy.target, toy.artifact(), policy=Policy(budget_seconds=float("inf")))
    assert verdicts(toy.ask(target, TOKENS)[0]) == [CONVERTED] * 6


def test_a_full_queue_drops_derived_blocks_and_counts_them(toy, family, tiers, monkeypatch):
    monkeypatch.setattr(tier_module, "_QUEUE_BLOCKS", 2)
    monkeypatch.setattr(tier_module, "_QUEUE_BLOCKS_AT_LEAST", 1)
    target = tiers(toy.target, toy.artifact())
    labels = {"target": "target", "kind": "derived"}
    before = {
        status: counter("kvxfer_written_blocks_total", **labels, status=status)
        for status in ("stored", "dropped")
    }
    waiting, gate = threading.Event(), threading.Event()
    target._writer.submit(lambda: (waiting.set(), gate.wait(10)))
    assert waiting.wait(10)
    assert verdicts(toy.ask(target, TOKENS)[0]) == [CONVERTED] * 6
    gate.set()
    target.flush()
    after = {
        status: counter("kvxfer_written_blocks_total", **labels, status=status) - count
        for status, count in before.items()
    }
    assert after == {"stored": 2, "dropped": 4}
    assert verdicts(target.find(toy.hashes(TOKENS))) == [DERIVED] * 2 + [CONVERTED] * 4


def test_the_queue_is_bounded_in_bytes_too(toy, tiers, monkeypatch):
    target = tiers(toy.target)
    monkeypatch.setattr(tier_module, "_QUEUE_BYTES", 10 * target.shape.payload_bytes)
    assert tiers(toy.target)._writer._queue.maxsize == 10


def test_conversion_can_be_turned_off_at_once(toy, family):
    _, target = family
    toy.ask(target, TOKENS[:8])
    target.flush()
    toy.prefill(target, toy.target, TOKENS, blocks=slice(0, 1))
    plans = target.find(toy.hashes(TOKENS))
    assert verdicts(plans) == [NATIVE_HIT, DERIVED] + [CONVERTED] * 4
    target.disable_conversion(Reason.UNSUPPORTED)
    results = target.read(plans, toy.pages(target, 6))
    assert verdicts(results)[:2] == [NATIVE_HIT, declined(Reason.UNSUPPORTED)]
    assert not any(result.served for result in results[1:])
    expected = [NATIVE_HIT] + [declined(Reason.UNSUPPORTED)] * 5
    assert verdicts(target.find(toy.hashes(TOKENS))) == expected


# tensor parallel


@pytest.mark.parametrize(("source_ranks", "target_ranks"), [(2, 2), (2, 1), (1, 2), (4, 2), (1, 4)])
@pytest.mark.parametrize("method", [Method.HEAD_LOCAL, Method.FULL_HEAD])
def test_ranks_convert_their_slices_of_the_whole(
    toy, tiers, helpers, source_ranks, target_ranks, method
):
    source_layout = helpers.layout(toy.source, source_ranks)
    for shard in source_layout:
        rank = tiers(toy.source, shard=shard, layout=source_layout)
        heads = slice(shard.first_head, shard.last_head)
        toy.prefill(rank, toy.source, TOKENS, heads=heads)
    expected = toy.blocks(toy.converted(toy.artifact(method=method), TOKENS))
    target_layout = helpers.layout(toy.target, target_ranks)
    artifact = toy.artifact(method=method)
    ranks = [
        tiers(toy.target, artifact, shard=shard, layout=target_layout) for shard in target_layout
    ]
    for rank, shard in zip(ranks, target_layout, strict=True):
        results, pages = toy.ask(rank, TOKENS)
        assert verdicts(results) == [CONVERTED] * 6
        heads = slice(shard.first_head, shard.last_head)
        for page, block in zip(pages, expected, strict=True):
            helpers.close(page, KvPage(block.keys[:, :, heads], block.values[:, :, heads]))
    for rank in ranks:
        rank.flush()
    assert [verdicts(rank.find(toy.hashes(TOKENS))) for rank in ranks] == [[DERIVED] * 6] * len(
        ranks
    )


def test_all_ranks_say_the_same_when_one_ranks_block_is_evicted(toy, tiers, store, helpers):
    layout = helpers.layout(toy.target, 2)
    ranks = [tiers(toy.target, shard=shard, layout=layout) for shard in layout]
    for rank, shard in zip(ranks, layout, strict=True):
        heads = slice(shard.first_head, shard.last_head)
        toy.prefill(rank, toy.target, TOKENS, heads=heads)
    names = toy.hashes(TOKENS)
    key = str(BlockKey(ranks[1].identity.digest, str(layout[1]), NATIVE, names[3]))
    assert store.delete([key]) == [True]
    expected = [NATIVE_HIT] * 3 + [ABSENT] + [AFTER_GAP] * 2
    assert [verdicts(rank.find(names)) for rank in ranks] == [expected] * 2


def test_all_ranks_say_the_same_when_one_source_shard_is_evicted(toy, tiers, store, helpers):
    source_layout, target_layout = helpers.layout(toy.source, 2), helpers.layout(toy.target, 2)
    for shard in source_layout:
        rank = tiers(toy.source, shard=shard, layout=source_layout)
        toy.prefill(rank, toy.source, TOKENS, heads=slice(shard.first_head, shard.last_head))
    names = toy.hashes(TOKENS)
    key = str(BlockKey(rank.identity.digest, str(source_layout[1]), NATIVE, names[3]))
    assert store.delete([key]) == [True]
    ranks = [
        tiers(toy.target, toy.artifact(), shard=shard, layout=target_layout)
        for shard in target_layout
    ]
    expected = [CONVERTED] * 3 + [ABSENT] + [AFTER_GAP] * 2
    assert [verdicts(rank.find(names)) for rank in ranks] == [expected] * 2


def test_a_source_served_in_two_layouts_is_found_in_either(toy, tiers, helpers):
    pair = helpers.layout(toy.source, 2)
    for shard in pair:
        rank = tiers(toy.source, shard=shard, layout=pair)
        heads = slice(shard.first_head, shard.last_head)
        toy.prefill(rank, toy.source, TOKENS, blocks=slice(0, 2), heads=heads)
    toy.prefill(tiers(toy.source), toy.source, TOKENS, first=2, blocks=slice(2, 4))
    target = tiers(toy.target, toy.artifact())
    results, pages = toy.ask(target, TOKENS)
    assert verdicts(results) == [CONVERTED] * 4 + [ABSENT] * 2
    expected = toy.blocks(toy.converted(toy.artifact(), TOKENS))
    for page, block in zip(pages[:4], expected[:4], strict=True):
        helpers.close(page, block)


# rule 5: faults


@pytest.mark.parametrize("method", ["exists", "read", "write", "delete", "scan"])
@pytest.mark.parametrize("what", ["native", "converted"])
def test_no_broken_store_raises_into_the_engine(toy, family, store, method, what):
    _, target = family
    if what == "native":
        toy.prefill(target, toy.target, TOKENS)
    plans = target.find(toy.hashes(TOKENS))
    store.broken.add(method)
    pages = toy.pages(target, 6)
    found = target.find(toy.hashes(TOKENS))
    results = target.read(plans, pages)
    written = toy.prefill(target, toy.target, TOKENS)
    cleared = target.clear()
    target.flush()
    store.broken.clear()
    assert len(found) == len(results) == len(written) == 6
    if method in ("exists", "read"):
        assert {plan.reason for plan in found} <= {Reason.STORE_ERROR, Reason.NONE}
    if method == "read":
        assert (
            verdicts(results)
            == [(Outcome.MISSED, Reason.STORE_ERROR)] + [(Outcome.MISSED, Reason.STORE_ERROR)] * 5
        )
    if method in ("write", "exists"):
        assert set(written) <= {WriteStatus.ERROR}
    if method in ("scan", "delete"):
        assert cleared == 0


def test_a_converter_that_fails_is_declined_and_counted(toy, family):
    _, target = family

    class Broken:
        def convert(self, sources, first_tokens, targets):
            raise RuntimeError("out of memory")

    target.pairs = tuple(replace(pair, converter=Broken()) for pair in target.pairs)
    target._planner = target._make_planner()
    before = counter("kvxfer_errors_total", target="target", call="convert")
    results, pages = toy.ask(target, TOKENS)
    assert verdicts(results)[0] == declined(Reason.CONVERSION_ERROR)
    assert not any(result.served for result in results)
    assert all(page.keys.isnan().all() for page in pages)
    assert counter("kvxfer_errors_total", target="target", call="convert") == before + 1


@pytest.mark.parametrize("payload", [b"", b"{}", b"[1]", b"\xff", b'{"layouts": [["x"]]}'])
def test_an_identity_record_that_cannot_be_read_stops_conversion_only(toy, family, store, payload):
    source, target = family
    toy.prefill(target, toy.target, TOKENS, blocks=slice(0, 2))
    key = IdentityRecord.key(source.identity.digest)
    header = BlockHeader(key, len(payload))
    store.write([WriteRequest(header, [memoryview(payload)])], overwrite=True)
    assert verdicts(target.find(toy.hashes(TOKENS))) == [NATIVE_HIT] * 2 + [ABSENT] * 4
    toy.tier(store, toy.source).close()  # announcing again repairs it
    assert verdicts(target.find(toy.hashes(TOKENS))) == [NATIVE_HIT] * 2 + [CONVERTED] * 4


def test_pages_that_do_not_match_are_a_miss(toy, family):
    _, target = family
    plans = target.find(toy.hashes(TOKENS))
    assert not any(result.served for result in target.read(plans, toy.pages(target, 2)))
    small = [KvPage(torch.zeros(1, 4, 1, 1), torch.zeros(1, 4, 1, 1)) for _ in plans]
    results = target.read(plans, small)
    assert len(results) == 6
    assert not any(result.served for result in results)


def test_a_closed_tier_answers_with_misses(toy, family):
    _, target = family
    plans = target.find(toy.hashes(TOKENS))
    target.close()
    target.close()
    target.flush()
    assert not any(result.served for result in target.read(plans, toy.pages(target, 6)))


def test_lookups_add_up(toy, family, tiers):
    target = tiers(toy.target, toy.artifact(), policy=Policy(hold_back_tokens=4))
    toy.prefill(target, toy.target, TOKENS, blocks=slice(0, 1))

    def counts(name):
        total = Counter()
        for sample in (sample for metric in REGISTRY.collect() for sample in metric.samples):
            if sample.name == name and sample.labels["target"] == "target":
                total[sample.labels["outcome"], sample.labels["reason"]] += sample.value
        return total

    blocks, tokens = counts("kvxfer_lookup_blocks_total"), counts("kvxfer_lookup_tokens_total")
    toy.ask(target, (*TOKENS, 99, 98, 97, 96))
    changed = counts("kvxfer_lookup_blocks_total") - blocks
    assert changed == {("native", "none"): 1, ("converted", "none"): 5, ("missed", "absent"): 1}
    assert (counts("kvxfer_lookup_tokens_total") - tokens).total() == 7 * 4


def test_clear_removes_this_engines_blocks_and_nobody_elses(toy, family, store):
    source, target = family
    toy.prefill(target, toy.target, TOKENS, blocks=slice(0, 2))
    toy.ask(target, TOKENS)  # four derived blocks are queued
    assert target.clear() == 6
    assert not list(store.scan(f"v1/{target.identity.digest}/h"))
    assert verdicts(source.find(toy.hashes(TOKENS))) == [NATIVE_HIT] * 6


def test_threads_may_use_one_tier(toy, tiers, helpers):
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    prompts = [tuple(range(n, n + 16)) for n in range(0, 160, 40)]
    for prompt in prompts:
        toy.prefill(source, toy.source, prompt)
    wrong = []

    def work(number):
        for turn in range(6):
            prompt = prompts[(number + turn) % 4]
            results, pages = toy.ask(target, prompt)
            native = toy.blocks(toy.cache(toy.target, prompt))
            mapped = toy.blocks(toy.converted(toy.artifact(), prompt))
            for result, page, own, made in zip(results, pages, native, mapped, strict=True):
                expected = own if result.outcome is Outcome.NATIVE else made
                if not result.served or not torch.allclose(page.keys, expected.keys, atol=1e-5):
                    wrong.append((number, turn, result))
            if turn == number:
                toy.prefill(target, toy.target, prompt, blocks=slice(0, 2))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
