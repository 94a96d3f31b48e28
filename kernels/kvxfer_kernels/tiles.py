# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors
# Triton reads these signatures, not a type checker; capitals are compile-time constants.
"""Device functions that both kernels use."""

import triton
import triton.language as tl


@triton.jit
def pair_dims(pair, HALF: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr):
    """Dimensions of the two members of pairs that are split in halves.

    `HALF` pairs are rotated, the rest passes. When a chunk never straddles the border the choice
    is made once per chunk, which leaves the dimensions contiguous for wide accesses.
    """
    if HALF == PAIRS:
        return pair, pair + PAIRS
    turned = tl.min(pair, 0) < HALF if HALF % CHUNK == 0 else pair < HALF
    return pair + tl.where(turned, 0, HALF), pair + tl.where(turned, HALF, PAIRS)


@triton.jit
def from_e4m3(codes):
    """Float32 values of e4m3 codes given as uint8.

    Moving the bits into place gives an fp16 number that is 2^-8 of the value, subnormals included.
    Done by hand because compute capability 80 and gfx942 have no such type.
    """
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def load_pairs(
    rows,
    pair,
    stride_dim,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Two tiles ``[BLOCK, CHUNK]``: the first and second members; zero beyond the width."""
    if INTERLEAVED:
        dim = 2 * tl.min(pair, 0) + tl.arange(0, 2 * CHUNK)
        both = tl.load(
            rows[:, None] + (dim * stride_dim)[None, :], mask=(dim < 2 * PAIRS)[None, :], other=0
        )
        return tl.split(tl.reshape(both, (BLOCK, CHUNK, 2)))
    first_dim, second_dim = pair_dims(pair, HALF, PAIRS, CHUNK)
    if PAIRS % CHUNK == 0:
        first = tl.load(rows[:, None] + (first_dim * stride_dim)[None, :])
        second = tl.load(rows[:, None] + (second_dim * stride_dim)[None, :])
    else:
        inside = (pair < PAIRS)[None, :]
        first = tl.load(rows[:, None] + (first_dim * stride_dim)[None, :], mask=inside, other=0)
        second = tl.load(rows[:, None] + (second_dim * stride_dim)[None, :], mask=inside, other=0)
    return first, second


@triton.jit
def load_angles(table, token, pair, PAIRS: tl.constexpr):
    """Cosines and sines ``[BLOCK, pairs]``; beyond the width an angle of zero."""
    place = table + token[:, None] * (2 * PAIRS) + pair[None, :]
    inside = (pair < PAIRS)[None, :]
    return tl.load(place, mask=inside, other=1.0), tl.load(place + PAIRS, mask=inside, other=0.0)
