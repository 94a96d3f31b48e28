# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors
# Triton reads these signatures, not a type checker; capitals are compile-time constants.
"""Un-rotate keys once, for maps in which every target head reads every source head."""

import triton
import triton.language as tl

from kvxfer_kernels.tiles import from_e4m3, load_angles, load_pairs, pair_dims


@triton.jit
def strip_keys_kernel(
    source,
    source_rows,
    target,
    target_rows,
    layers,
    table,
    scales,
    source_layer,
    source_head,
    source_dim,
    target_layer,
    target_head,
    tokens,
    heads,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    SOURCE_VECTOR: tl.constexpr,
    TARGET_VECTOR: tl.constexpr,
):
    """Program (token tile, index into `layers` * heads + head).

    Dimensions keep their order. Source and target may be the same memory: a program reads all it
    needs before it writes. Tokens past the end are the last one again.
    """
    index = tl.program_id(1)
    layer = tl.load(layers + index // heads).to(tl.int64)
    head = (index % heads).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = tl.minimum(token, tokens - 1)
    pair = tl.arange(0, WIDTH)
    rows = tl.multiple_of(tl.load(source_rows + token), SOURCE_VECTOR)
    rows = source + layer * source_layer + head * source_head + rows
    first, second = load_pairs(rows, pair, source_dim, INTERLEAVED, HALF, PAIRS, WIDTH, BLOCK)
    if FP8:
        scale = tl.load(scales + layer * heads + head)
        first = from_e4m3(first) * scale
        second = from_e4m3(second) * scale
    first, second = first.to(tl.float32), second.to(tl.float32)
    cos, sin = load_angles(table, token, pair, PAIRS)
    dtype: tl.constexpr = target.dtype.element_ty
    turned = (first * cos + second * sin).to(dtype)
    other = (second * cos - first * sin).to(dtype)
    out = tl.multiple_of(tl.load(target_rows + token), TARGET_VECTOR)
    out = (target + layer * target_layer + head * target_head + out)[:, None]
    if INTERLEAVED:
        dim = tl.arange(0, 2 * WIDTH)[None, :]
        both = tl.reshape(tl.join(turned, other), (BLOCK, 2 * WIDTH))
        tl.store(out + dim, both, mask=dim < 2 * PAIRS)
    else:
        first_dim, second_dim = pair_dims(pair, HALF, PAIRS, WIDTH)
        inside = (pair < PAIRS)[None, :]
        tl.store(out + first_dim[None, :], turned, mask=inside)
        tl.store(out + second_dim[None, :], other, mask=inside)
