"""Plans between SGLang's two calls of one lookup."""

import pytest

from kvstore_xfer.outcome import Outcome
from kvstore_xfer.tier.plan import BlockPlan
from kvxfer_sglang import promises
from kvxfer_sglang.promises import Promises

KEYS = ["a", "b", "c"]
TIER, OTHER = object(), object()


def plans(*outcomes):
    return [
        BlockPlan(outcome, chain_hash=key) for key, outcome in zip(KEYS, outcomes, strict=False)
    ]


OWN = plans(*[Outcome.NATIVE] * 3)


@pytest.fixture
def kept():
    promised = Promises()
    promised.keep(TIER, OWN)
    return promised


def test_a_promise_is_taken_once(kept):
    assert kept.take(TIER, KEYS) == OWN
    assert kept.take(TIER, KEYS) is None


def test_ranks_may_have_agreed_on_fewer_pages(kept):
    assert kept.take(TIER, KEYS[:2]) == OWN[:2]


@pytest.mark.parametrize("keys", [["a", "b", "x"], ["b", "c"], [*KEYS, "d"], []])
def test_other_pages_were_not_promised(kept, keys):
    assert kept.take(TIER, keys) is None


def test_another_tier_promised_nothing(kept):
    assert kept.take(OTHER, KEYS) is None


def test_a_promise_grows_old(kept, monkeypatch):
    now = promises.time.monotonic()
    monkeypatch.setattr(promises.time, "monotonic", lambda: now + 6)
    assert kept.take(TIER, KEYS) is None


@pytest.mark.parametrize("outcome", [Outcome.DERIVED, Outcome.CONVERTED])
def test_policy_is_asked_again_about_blocks_of_a_sibling(outcome):
    promised = Promises()
    promised.keep(TIER, plans(Outcome.NATIVE, outcome))
    assert promised.take(TIER, KEYS[:2]) is None


def test_promises_that_nobody_takes_are_forgotten():
    promised = Promises()
    for number in range(100):
        promised.keep(TIER, [BlockPlan(Outcome.NATIVE, chain_hash=str(number))])
    taken = [promised.take(TIER, [str(number)]) is not None for number in range(100)]
    assert taken == [False] * 36 + [True] * 64
