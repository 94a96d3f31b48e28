"""Threads of the local store: results, homes, ends."""

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_xfer.errors import StoreError
from kvstore_xfer.store.local.workers import Workers

LARGE = 1 << 20


@pytest.fixture(scope="module")
def workers():
    made = Workers("store x")
    yield made
    made.shutdown()


@given(sizes=st.lists(st.integers(0, 40 << 20), max_size=70))
def test_results_have_the_order_of_the_items(workers, sizes):
    assert workers.map(lambda item: item + 1, list(range(len(sizes))), sizes) == [
        item + 1 for item in range(len(sizes))
    ]


def homes_of(workers, items, size):
    """The processors of each thread that takes part."""
    homes = {}

    def work(_):
        time.sleep(0.002)  # long enough for every thread to get some
        homes[threading.get_ident()] = frozenset(os.sched_getaffinity(0))

    workers.map(work, list(range(items)), [size] * items)
    return list(homes.values())


def test_threads_share_the_processors_out(workers):
    homes = homes_of(workers, 64, LARGE)
    assert len(homes) == 4
    assert set().union(*homes) == os.sched_getaffinity(0)


def test_the_threads_of_small_items_meet_on_no_processor(workers):
    for _ in range(4):  # batches take turns
        first, second = homes_of(workers, 64, LARGE - 1)
        assert len(os.sched_getaffinity(0)) == 1 or not first & second


def test_a_few_small_items_stay_with_the_caller(workers):
    assert set(workers.map(lambda _: threading.get_ident(), [1, 2], [10, 10])) == {
        threading.get_ident()
    }


def test_an_error_is_raised_when_nobody_works_any_more(workers):
    ended = []

    def work(item):
        if not item:
            raise ValueError("first")
        time.sleep(0.05)
        ended.append(item)

    with pytest.raises(ValueError, match="first"):
        workers.map(work, list(range(4)), [LARGE] * 4)
    assert sorted(ended) == [1, 2, 3]


def test_closed_workers_say_whose_they_are():
    gone = Workers("store x")
    gone.shutdown()
    with pytest.raises(StoreError, match="store x: closed"):
        gone.map(str, [1, 2], [LARGE, LARGE])
