"""`strip_keys` against its float64 definition, and the angles against exact ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvxfer_kernels.paged import Paged
from kvxfer_kernels.rotation import Rotation
from kvxfer_kernels.strip_keys import reference, strip_keys
from kvxfer_kernels.testing import Guarded, Layout, Side, relative_error, scatter


@settings(max_examples=15, deadline=None)
@given(
    width=st.sampled_from((32, 34, 80, 128)),
    rotated=st.sampled_from((0.3, 1.0)),
    interleaved=st.booleans(),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    padding=st.sampled_from((0, 1, 8)),
)
def test_listed_layers_are_stripped_and_others_untouched(
    width, rotated, interleaved, counts, padding
):
    side = Side(3, 2, width, 32, 2 * max(1, int(rotated * width / 2)), interleaved, 1.3)
    tokens = sum(counts)
    keys = torch.randn(side.shapes(tokens)[0])
    layout = Layout((1, 0, 2, 3), padding, 64)
    out = Guarded.make(tuple(keys.shape), counts, layout, torch.float32)
    positions = torch.randint(0, 131_072, (tokens,))
    rotation = side.rotation()
    strip_keys(
        Paged.from_views(scatter(keys, counts, layout)),
        Paged.from_views(out.views),
        rotation,
        rotation.strip_table(positions),
        torch.tensor([2, 0], dtype=torch.int32),
    )
    expected = reference.strip_keys(keys, rotation, positions)
    assert relative_error(out.result()[[0, 2]], expected[[0, 2]]) < 1e-5
    assert out.result()[1].isnan().all()
    assert out.stray_writes() == 0


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_may_be_stripped_where_they_lie(interleaved):
    rotation = Side(2, 2, 64, 32, 40, interleaved).rotation()
    keys = torch.randn(2, 70, 2, 64)
    positions = torch.arange(70)
    expected = reference.strip_keys(keys, rotation, positions)
    paged = Paged.from_views([keys])
    layers = torch.arange(2, dtype=torch.int32)
    strip_keys(paged, paged, rotation, rotation.strip_table(positions), layers)
    assert relative_error(keys, expected) < 1e-5


def test_angles_are_accurate_at_the_end_of_a_long_context():
    """The float32 product is the angle; its sine and cosine must be right to float32."""
    rotation = Rotation(torch.tensor([1.0, 0.7, 1e-4]), 32)
    positions = torch.arange(131_000, 131_072)
    table = rotation.apply_table(positions)[..., :3]
    angles = (positions.float()[:, None] * rotation.inv_freq).double()
    assert (table[:, 0].double() - angles.cos()).abs().max() < 2e-7
    assert (table[:, 1].double() - angles.sin()).abs().max() < 2e-7
