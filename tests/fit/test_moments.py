"""Streamed moments against all rows at once in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_xfer.fit.moments import Moments

BATCHES = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0)


def rows(groups, sizes, p, q, seed, offset=0.0):
    chance = np.random.default_rng(seed)
    shape = (groups, sum(sizes))
    return chance.normal(offset, 1, (*shape, p)), chance.normal(-offset, 2, (*shape, q))


def stream(x, y, sizes):
    moments = Moments.zero(x.shape[0], x.shape[2], y.shape[2])
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        moments.update(torch.tensor(x[:, part]), torch.tensor(y[:, part]))
        start += size
    return moments


def assert_equals_one_shot(moments, x, y, tolerance):
    mean_x, mean_y = x.mean(1), y.mean(1)
    cx, cy = x - mean_x[:, None], y - mean_y[:, None]
    expected = {
        "mean_x": mean_x,
        "mean_y": mean_y,
        "xx": np.einsum("gni,gnj->gij", cx, cx),
        "xy": np.einsum("gni,gnj->gij", cx, cy),
        "yy": np.einsum("gni,gni->gi", cy, cy),
    }
    assert moments.rows == x.shape[1]
    for name, value in expected.items():
        found = getattr(moments, name).numpy()
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, value, rtol=tolerance, atol=tolerance, err_msg=name)


@given(
    groups=st.integers(1, 3),
    p=st.integers(1, 4),
    q=st.integers(1, 4),
    sizes=BATCHES,
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_streaming_equals_all_rows_at_once(groups, p, q, sizes, seed):
    x, y = rows(groups, sizes, p, q, seed)
    assert_equals_one_shot(stream(x, y, sizes), x, y, 1e-11)


@given(left=BATCHES, right=BATCHES, seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_merging_equals_seeing_both(left, right, seed):
    x, y = rows(2, [*left, *right], 3, 2, seed)
    cut = sum(left)
    moments = stream(x[:, :cut], y[:, :cut], left)
    moments.merge(stream(x[:, cut:], y[:, cut:], right))
    assert_equals_one_shot(moments, x, y, 1e-11)


def test_large_offsets_do_not_cancel():
    """Sums of squares would lose everything here: 1e16 against a scatter of about 1e3."""
    sizes = [100] * 10
    x, y = rows(1, sizes, 3, 2, 7, offset=1e8)
    assert_equals_one_shot(stream(x, y, sizes), x, y, 1e-6)


def test_an_empty_batch_and_an_empty_merge_change_nothing():
    x, y = rows(1, [5], 2, 2, 1)
    moments = stream(x, y, [5, 0])
    moments.merge(Moments.zero(1, 2, 2))
    assert_equals_one_shot(moments, x, y, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rows_are_summed_in_float64(dtype):
    x, y = rows(2, [50], 3, 2, 3)
    low_x, low_y = torch.tensor(x).to(dtype), torch.tensor(y).to(dtype)
    moments = Moments.zero(2, 3, 2)
    moments.update(low_x, low_y)
    assert_equals_one_shot(moments, low_x.double().numpy(), low_y.double().numpy(), 1e-12)


def test_bytes_needed_is_what_is_allocated():
    moments = Moments.zero(3, 5, 7)
    parts = (moments.mean_x, moments.mean_y, moments.xx, moments.xy, moments.yy)
    assert Moments.bytes_needed(3, 5, 7) == sum(part.numel() * 8 for part in parts)
