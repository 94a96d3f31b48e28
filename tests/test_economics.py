"""Savings computed by hand beside those of the module."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_xfer.economics import Rates, SwitchTraffic, break_even_tokens, saving
from kvstore_xfer.tier.policy import Policy


def traffic(*prefixes, **fields):
    given = {"requests_per_hour": 600.0, "switch_share": 0.5, "target_gpus": 4}
    return SwitchTraffic(
        source="small", target="large", prefix_tokens=list(prefixes), **{**given, **fields}
    )


RATES = Rates(prefill=1000.0, conversion=10_000.0)


def test_two_prefixes_by_hand():
    policy = Policy(conversion_overhead_seconds=0.09, hold_back_tokens=100)
    saved = saving(traffic(1100, 2100), policy, RATES, bytes_per_token=6)
    # 1,000 tokens: 1 s - 0.1 s - 0.09 s; 2,000 tokens: 2 s - 0.2 s - 0.09 s
    assert saved.seconds_per_switch == pytest.approx((0.81 + 1.71) / 2)
    assert saved.gpu_seconds_per_hour == pytest.approx(1.26 * 300 * 4)
    assert saved.derived_bytes_per_hour == pytest.approx(1500 * 300 * 6)
    assert saved.converted_share == 1.0
    assert saved.break_even_tokens == 101


def test_what_the_store_lost_and_what_the_policy_bounds_is_not_converted():
    policy = Policy(max_prefix_tokens=800)
    saved = saving(traffic(1000, hit_rate=0.5), policy, RATES, 1)
    assert saved.converted_tokens_per_switch == 500
    assert saving(traffic(5000), policy, RATES, 1).converted_tokens_per_switch == 800
    assert saving(traffic(100), Policy(min_tokens=101), RATES, 1).converted_share == 0


def test_a_conversion_slower_than_prefill_saves_nothing():
    slow = Rates(prefill=1000.0, conversion=1000.0)
    saved = saving(traffic(64, 4096), Policy(), slow, 1)
    assert (saved.seconds_per_switch, saved.break_even_tokens) == (0, None)


@given(
    prefixes=st.lists(st.integers(1, 200_000), min_size=1, max_size=8),
    overhead=st.floats(0, 5),
    hold_back=st.integers(0, 4096),
    prefill=st.floats(1, 1e6),
    speed=st.floats(0.01, 0.99) | st.floats(1.01, 1000),
)
def test_never_a_loss_and_break_even_is_where_it_starts_to_pay(
    prefixes, overhead, hold_back, prefill, speed
):
    policy = Policy(conversion_overhead_seconds=overhead, hold_back_tokens=hold_back)
    conversion = prefill * speed
    rates = Rates(prefill, conversion)
    saved = saving(traffic(*prefixes), policy, rates, 1)
    assert saved.seconds_per_switch >= -1e-9
    start = break_even_tokens(policy, rates)
    if start is None:
        assert saved.converted_share == 0
    else:
        assert policy.pays(start + 1, prefill, conversion)
        assert start == 1 or not policy.pays(start - 1, prefill, conversion)
