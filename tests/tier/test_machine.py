"""Random histories of two engines, one in two ranks, over one store, with everything going wrong.

The invariants: (1) a native answer is the target's own bytes; (2) derived never stands over native,
native may replace derived; (3) a derived block is no source; (4) what is served is a contiguous
prefix; (5) ranks decide alike; (6) nothing raises; (7) lookups are natives, derived, converted,
declined and missed; (8) no identity is served another's bytes; (9) held-back blocks are
not derived.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from prometheus_client import REGISTRY

from kvstore_xfer.blocks.key import NATIVE, UNPLACED, BlockKey
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.base import WriteStatus
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.tier.policy import Policy

PROMPTS = (tuple(range(16)), tuple(range(100, 116)))
HOLD_BACK = 4
BLOCKS = st.integers(0, 3)
RANKS = 2
METHODS = ("exists", "read", "write", "delete")


def lookups():
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "kvxfer_lookup_blocks_total" and sample.labels["target"] == "target"
    )


@pytest.fixture
def machine(toy, helpers):  # noqa: C901 - one class, which needs the fixtures
    layout = helpers.layout(toy.target, RANKS)
    artifact = toy.artifact()
    native, mapped, own = (
        [toy.blocks(make(prompt)) for prompt in PROMPTS]
        for make in (
            lambda prompt: toy.cache(toy.target, prompt),
            lambda prompt: toy.converted(artifact, prompt),
            lambda prompt: toy.cache(toy.source, prompt),
        )
    )

    class TierMachine(RuleBasedStateMachine):
        @initialize()
        def open(self):
            self.folder = tempfile.TemporaryDirectory()
            self.store = helpers.FaultyStore(LocalStore(self.folder.name, min_free_bytes=0))
            self.version = 0
            self.tiers = []
            self.asked = 0
            self.counted = lookups()
            self.source = toy.tier(self.store, toy.source)
            for prompt in PROMPTS:
                toy.prefill(self.source, toy.source, prompt)
            self.start()

        def start(self):
            """The target's ranks, after an update of its weights under another identity."""
            variant = f"update {self.version}" if self.version else ""
            self.ranks = [
                toy.tier(
                    self.store,
                    toy.target,
                    artifact,
                    policy=Policy(hold_back_tokens=HOLD_BACK),
                    shard=shard,
                    layout=layout,
                    variant=variant,
                )
                for shard in layout
            ]
            self.tiers += self.ranks

        def teardown(self):
            if not hasattr(self, "store"):
                return
            self.store.broken.clear()
            for tier in (self.source, *self.tiers):
                tier.close()
            self.store.close()
            self.folder.cleanup()

        @rule(prompt=st.integers(0, 1), block=BLOCKS, placed=st.booleans())
        def source_writes(self, prompt, block, placed):
            first = block if placed else None
            toy.prefill(self.source, toy.source, PROMPTS[prompt], first, slice(block, block + 1))

        @rule(prompt=st.integers(0, 1), block=BLOCKS, ranks=st.sampled_from([(0,), (1,), (0, 1)]))
        def target_writes(self, prompt, block, ranks):
            if self.version:  # other weights make other caches; they are not modelled
                return
            for rank in ranks:
                shard = layout[rank]
                statuses = toy.prefill(
                    self.ranks[rank],
                    toy.target,
                    PROMPTS[prompt],
                    block,
                    slice(block, block + 1),
                    slice(shard.first_head, shard.last_head),
                )
                if statuses == [WriteStatus.STORED] and not self.store.broken:
                    self.check_native_alone(rank, toy.hashes(PROMPTS[prompt])[block])

        def check_native_alone(self, rank, chain_hash):
            """(2): also what was queued before the native block came."""
            self.flush()
            keys = [BlockKey.parse(row.key) for row in self.store.inner.scan()]
            mine = (self.ranks[rank].identity.digest, str(layout[rank]), chain_hash)
            kinds = {k.kind for k in keys if (k.identity, k.shard, k.chain_hash) == mine}
            assert kinds == {NATIVE}

        @rule(prompt=st.integers(0, 1), blocks=st.integers(1, 4), flush=st.booleans())
        def target_asks(self, prompt, blocks, flush):
            self.check(prompt, blocks)
            if flush:
                self.flush()

        def check(self, prompt, blocks):
            names = toy.hashes(PROMPTS[prompt])[:blocks]
            plans = [rank.find(names) for rank in self.ranks]
            answers = [[(p.outcome, p.reason) for p in plan] for plan in plans]
            if not self.store.broken:
                assert answers[0] == answers[1]  # (5)
            for rank, shard, plan in zip(self.ranks, layout, plans, strict=True):
                pages = toy.pages(rank, blocks)
                results = rank.read(plan, pages)
                self.asked += blocks
                heads = slice(shard.first_head, shard.last_head)
                self.check_served(prompt, results, pages, heads)
            assert lookups() - self.counted == self.asked  # (7)

        def check_served(self, prompt, results, pages, heads):
            served = [result.served for result in results]
            assert served == sorted(served, reverse=True)  # (4)
            for block, (result, page) in enumerate(zip(results, pages, strict=True)):
                if not result.served:
                    assert result.reason is not Reason.NONE
                    continue
                is_native = result.outcome is Outcome.NATIVE
                truth = (native if is_native else mapped)[prompt][block]
                truth = KvPage(truth.keys[:, :, heads], truth.values[:, :, heads])
                if is_native:
                    assert not self.version  # (8)
                    assert helpers.equal(page, truth)  # (1)
                else:
                    assert not self.version  # an updated model has no gate
                    assert block < len(results) - HOLD_BACK // 4  # (9)
                    torch.testing.assert_close(page.keys, truth.keys, rtol=1e-5, atol=1e-5)
                    torch.testing.assert_close(page.values, truth.values, rtol=1e-5, atol=1e-5)

        @rule(prompt=st.integers(0, 1))
        def source_asks(self, prompt):
            """(3) and (8): the source has no pairs, so only its own bytes may come back."""
            plans = self.source.find(toy.hashes(PROMPTS[prompt]))
            pages = toy.pages(self.source, 4)
            results = self.source.read(plans, pages)
            for page, truth, result in zip(pages, own[prompt], results, strict=True):
                if result.served:
                    assert result.outcome is Outcome.NATIVE
                    assert helpers.equal(page, truth)

        @rule(number=st.integers(0, 200))
        def evict(self, number):
            keys = [row.key for row in self.store.inner.scan() if "/record/" not in row.key]
            if keys:
                self.store.inner.delete([keys[number % len(keys)]])

        @rule(number=st.integers(0, 200))
        def corrupt(self, number):
            files = sorted(
                path
                for path in Path(self.folder.name).rglob("*")
                if path.is_file() and path.read_bytes()[:8] == b"KVXBLK01"
            )
            if files:
                file = files[number % len(files)]
                raw = bytearray(file.read_bytes())
                raw[-1] ^= 1
                file.write_bytes(raw)

        @rule(method=st.sampled_from(METHODS), prompt=st.integers(0, 1), block=BLOCKS)
        def everything_is_asked_of_a_broken_store(self, method, prompt, block):
            self.store.broken.add(method)
            self.check(prompt, 4)
            self.source_asks(prompt)
            self.target_writes(prompt, block, (0, 1))
            self.flush()
            self.store.broken.clear()

        @rule()
        def weights_are_updated(self):
            self.version += 1
            self.start()

        @rule()
        def weights_are_restored(self):
            self.version = 0
            self.start()

        @rule()
        def flush(self):
            for tier in self.tiers:
                tier.flush()

        @invariant()
        def derived_blocks_are_the_targets(self):
            """(3): under their own name, made by the one mapper."""
            if not hasattr(self, "store"):
                return
            kinds = {
                (key.identity == self.source.identity.digest, key.kind.partition("-")[2])
                for key in (BlockKey.parse(row.key) for row in self.store.inner.scan())
                if key.kind not in (NATIVE, UNPLACED, "record")
            }
            assert kinds <= {(False, artifact.mapper.digest)}

    return TierMachine


def test_random_histories_keep_the_rules(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=20, stateful_step_count=20, deadline=None, derandomize=True),
    )
