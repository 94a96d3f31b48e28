"""A store on the network that is late: the tier answers within its time, and says why it misses."""

import time
from urllib.parse import quote

import pytest
import s3_servers
import torch
import valkey_servers
from prometheus_client import REGISTRY

from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.deadline import in_force, within
from kvstore_xfer.store.url import open_store
from kvstore_xfer.tier.policy import Policy

TOKENS = tuple(range(10, 34))  # six blocks of four
SLACK = 2.0  # for a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_servers.s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def proxy(server):
    proxy = s3_servers.Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def remote(proxy, tmp_path, monkeypatch):
    """With the scheme's own time-out, which is ten seconds."""
    for name, value in s3_servers.LOGIN.items():
        monkeypatch.setenv(name, value)
    where = f"region=us-east-1&endpoint={quote(proxy.endpoint)}"
    with open_store(f"s3://{s3_servers.BUCKET}/{tmp_path.name}?{where}") as store:
        yield store


def timed(call, *arguments):
    start = time.monotonic()
    result = call(*arguments)
    return result, time.monotonic() - start


def blocks_missed(reason):
    labels = {"target": "target", "source": "", "direction": "", "outcome": "missed"}
    return REGISTRY.get_sample_value("kvxfer_lookup_blocks_total", labels | {"reason": reason}) or 0


def test_a_read_that_is_given_up_never_writes_into_the_pages_later(toy, tiers, remote, proxy):
    target = tiers(toy.target, at=remote, read_seconds=0.5)
    toy.prefill(target, toy.target, TOKENS)
    plans, pages = target.find(toy.hashes(TOKENS)), toy.pages(target, 6)
    assert all(plan.served for plan in plans)
    before = blocks_missed("budget")
    proxy.body_seconds = 2.0
    results, taken = timed(target.read, plans, pages)
    assert {(r.outcome, r.reason) for r in results} == {(Outcome.MISSED, Reason.BUDGET)}
    assert blocks_missed("budget") == before + 6
    assert taken < 0.5 + SLACK
    proxy.wait_until_idle()  # every body has been sent
    time.sleep(0.2)
    assert all(torch.isnan(page.keys).all() and torch.isnan(page.values).all() for page in pages)


def test_where_blocks_do_not_come_they_are_not_looked_up_either(toy, tiers, remote, proxy):
    target = tiers(toy.target, at=remote, read_seconds=0.5)
    toy.prefill(target, toy.target, TOKENS)
    proxy.body_seconds = 1.5
    for _ in range(3):
        toy.ask(target, TOKENS)
    asked = len(proxy.requests)
    (results, _), taken = timed(toy.ask, target, TOKENS)
    assert {r.reason for r in results} == {Reason.STORE_ERROR}  # not absent: nobody was asked
    assert len(proxy.requests) == asked
    assert taken < 0.5
    proxy.body_seconds = 0.0
    time.sleep(1.1)
    assert all(r.served for r in toy.ask(target, TOKENS)[0])


def test_a_lookup_takes_a_second_however_much_it_asks(toy, tiers, remote, proxy):
    """Native, unplaced, derived, the sibling's record and its blocks: one after the other."""
    source, target = tiers(toy.source, at=remote), tiers(toy.target, toy.artifact(), at=remote)
    toy.prefill(source, toy.source, TOKENS)
    proxy.think_seconds = 0.4
    plans, taken = timed(target.find, toy.hashes(TOKENS))
    assert {plan.reason for plan in plans} == {Reason.BUDGET}
    assert taken < 1.0 + SLACK
    proxy.think_seconds, proxy.body_seconds = 0.0, 5.0  # the record is a body
    plans, taken = timed(target.find, toy.hashes(TOKENS))
    assert {plan.reason for plan in plans} == {Reason.BUDGET}
    assert taken < 1.0 + SLACK


def test_source_blocks_that_are_late_cost_the_policys_budget(toy, tiers, remote, proxy):
    source = tiers(toy.source, at=remote)
    target = tiers(toy.target, toy.artifact(), policy=Policy(budget_seconds=0.5), at=remote)
    toy.prefill(source, toy.source, TOKENS)
    plans = target.find(toy.hashes(TOKENS))
    assert {plan.outcome for plan in plans} == {Outcome.CONVERTED}
    proxy.body_seconds = 2.0
    results, taken = timed(target.read, plans, toy.pages(target, 6))
    assert (results[0].outcome, results[0].reason) == (Outcome.DECLINED, Reason.BUDGET)
    assert taken < 0.5 + SLACK
    # The thread that reads ahead is free again: it does not wait for the store's own time-out.
    assert timed(target._ahead.submit(lambda: None).result)[1] < SLACK
    proxy.body_seconds = 0.0


def test_a_partitioned_valkey(toy, tiers, tmp_path):
    with (
        valkey_servers.single(tmp_path / "valkey") as server,
        open_store(f"valkey://127.0.0.1:{server.port}") as store,
    ):
        target = tiers(toy.target, toy.artifact(), at=store, read_seconds=0.5)
        toy.prefill(target, toy.target, TOKENS)
        plans = target.find(toy.hashes(TOKENS))
        server.pause()
        results, taken = timed(target.read, plans, toy.pages(target, 6))
        assert {r.reason for r in results} == {Reason.BUDGET}
        assert taken < 0.5 + SLACK
        for _ in range(4):
            plans, taken = timed(target.find, toy.hashes(TOKENS))
            assert {plan.reason for plan in plans} <= {Reason.BUDGET, Reason.STORE_ERROR}
            assert taken < 1.0 + SLACK
        server.resume()
        target.close()


def test_the_earlier_deadline_counts_and_remembers():
    assert in_force().left > 1e9
    with within(60.0) as outer:
        with within(3600.0) as inner:
            assert inner is outer
        with within(0.0) as inner:
            assert in_force() is inner
            inner.give_up()
        assert (inner.unanswered, inner.missed) == (True, True)
        assert (outer.unanswered, outer.missed) == (False, False)
        outer.give_up()
        assert (outer.unanswered, outer.missed) == (True, False)
        assert in_force() is outer
    with pytest.raises(RuntimeError), within(1.0):
        raise RuntimeError
    assert in_force().left > 1e9
