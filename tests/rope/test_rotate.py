"""Laws of rotation, on generated inputs."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kvstore_xfer.rope.rotate import apply_rope, rope_tables, strip_rope
from kvstore_xfer.rope.spec import RopeSpec

EPS = torch.finfo(torch.float32).eps
FACTORS = (1.0, 1.138629436111989, 0.5)


@st.composite
def specs(draw, factors=FACTORS):
    pairs = draw(st.integers(1, 16))
    rotary_dim = 2 * pairs
    inv_freq = 1.0 / (10000.0 ** (torch.arange(pairs) / pairs))
    return RopeSpec(
        rope_type="default",
        head_dim=rotary_dim + draw(st.integers(0, 8)),
        rotary_dim=rotary_dim,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=draw(st.sampled_from(factors)),
        interleaved=draw(st.booleans()),
    )


positions = st.lists(st.integers(0, 131072), min_size=1, max_size=8)
seeds = st.integers(0, 2**31)


def random_content(seed, tokens, spec, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, 3, spec.head_dim, generator=generator, dtype=dtype)


def reference_rotation(content, spec, at):
    """The definition, in complex float64: multiply pair j by factor * exp(i * angle_j)."""
    angles = (at.float()[:, None] * torch.tensor(spec.inv_freq)).double()
    turn = torch.polar(torch.full_like(angles, spec.attention_factor), angles)[:, None]
    rotated = content.double().clone()
    for pair in range(spec.rotary_dim // 2):
        if spec.interleaved:
            a, b = 2 * pair, 2 * pair + 1
        else:
            a, b = pair, pair + spec.rotary_dim // 2
        z = torch.complex(rotated[..., a], rotated[..., b]) * turn[..., pair]
        rotated[..., a], rotated[..., b] = z.real, z.imag
    return rotated


@given(specs(), positions, seeds)
@settings(deadline=None)
def test_strip_after_apply_is_the_identity(spec, at, seed):
    tables = rope_tables(spec, torch.tensor(at))
    content = random_content(seed, len(at), spec)
    back = strip_rope(apply_rope(content, spec, *tables), spec, *tables)
    assert (back - content).abs().max() <= 4 * EPS * content.abs().max()
    assert torch.equal(back[..., spec.rotary_dim :], content[..., spec.rotary_dim :])


@given(specs(), positions, seeds)
@settings(deadline=None)
def test_apply_agrees_with_the_definition_in_float64(spec, at, seed):
    at = torch.tensor(at)
    content = random_content(seed, len(at), spec)
    reference = reference_rotation(content, spec, at)
    bound = content.abs().max() * spec.attention_factor
    ours = apply_rope(content, spec, *rope_tables(spec, at))
    assert ours.dtype == torch.float32
    assert (ours - reference).abs().max() <= 4 * EPS * bound
    # In float64 only the rounding of the float32 tables is left.
    double = apply_rope(content.double(), spec, *rope_tables(spec, at))
    assert double.dtype == torch.float64
    assert (double - reference).abs().max() <= 2 * EPS * bound


@given(specs(factors=(1.0,)), positions, seeds)
@settings(deadline=None)
def test_the_norm_is_preserved(spec, at, seed):
    content = random_content(seed, len(at), spec)
    rotated = apply_rope(content, spec, *rope_tables(spec, torch.tensor(at)))
    torch.testing.assert_close(rotated.norm(dim=-1), content.norm(dim=-1), rtol=8 * EPS, atol=0)


@given(specs(), st.integers(0, 4096), st.integers(0, 4096), seeds)
@settings(deadline=None)
def test_strip_at_p_then_apply_at_q_rotates_by_q_minus_p(spec, p, q, seed):
    content = random_content(seed, 1, spec)
    at_p, at_q = rope_tables(spec, torch.tensor([p])), rope_tables(spec, torch.tensor([q]))
    moved = apply_rope(strip_rope(content, spec, *at_p), spec, *at_q)
    plain = RopeSpec(**{**vars(spec), "attention_factor": 1.0})
    expected = apply_rope(content, plain, *rope_tables(plain, torch.tensor([q - p])))
    # The three angles are rounded to float32 on their own, each by half an ulp of at most 4096.
    angle_error = 3 * 4096 * EPS / 2
    assert (moved - expected).abs().max() <= (angle_error + 8 * EPS) * content.abs().max() * 2**0.5


@given(specs(), positions, seeds, st.floats(-4, 4))
@settings(deadline=None)
def test_rotation_is_linear(spec, at, seed, scale):
    tables = rope_tables(spec, torch.tensor(at))
    x, y = random_content(seed, len(at), spec), random_content(seed + 1, len(at), spec)
    together = strip_rope(x + scale * y, spec, *tables)
    apart = strip_rope(x, spec, *tables) + scale * strip_rope(y, spec, *tables)
    bound = (x.abs().max() + abs(scale) * y.abs().max()) / spec.attention_factor
    assert (together - apart).abs().max() <= 8 * EPS * bound


@given(specs(), positions, seeds)
@settings(deadline=None, max_examples=25)
def test_low_precision_input_is_computed_in_float32(spec, at, seed):
    tables = rope_tables(spec, torch.tensor(at))
    for dtype in (torch.bfloat16, torch.float16):
        keys = random_content(seed, len(at), spec).to(dtype)
        assert torch.equal(strip_rope(keys, spec, *tables), strip_rope(keys.float(), spec, *tables))


def test_tables_hold_the_float32_product_and_no_attention_factor():
    spec = RopeSpec("yarn", 4, 4, (1.0, 0.8659643530845642), 1.5, False)
    at = torch.tensor([0, 131071])
    cos, sin = rope_tables(spec, at)
    angle = torch.tensor(131071.0) * torch.tensor(0.8659643530845642)
    assert cos.shape == sin.shape == (2, 2)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[0].tolist() == [1.0, 1.0]
    assert sin[1, 1].item() == pytest.approx(angle.double().sin().item(), abs=EPS)
    exact = 131071 * 0.8659643530845642
    assert abs(angle.item() - exact) > 1e-3  # so exact angles would not undo an engine's rotation


@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_input_is_left_alone_and_gives_the_same(interleaved):
    spec = RopeSpec("default", 6, 4, (1.0, 0.1), 1.25, interleaved)
    pool = torch.randn(5, 2, 3, 6)  # [T, layers, H, D], as a page-first pool holds it
    view = pool.transpose(0, 1)
    kept = pool.clone()
    tables = rope_tables(spec, torch.arange(5))
    assert torch.equal(apply_rope(view, spec, *tables), apply_rope(view.clone(), spec, *tables))
    assert torch.equal(pool, kept)
    assert apply_rope(view, spec, *tables).data_ptr() != pool.data_ptr()
