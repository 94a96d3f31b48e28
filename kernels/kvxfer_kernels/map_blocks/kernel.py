# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors
# Triton reads these signatures, not a type checker; capitals are compile-time constants.
"""Gather, un-rotate, multiply, add the bias, rotate, write: one pass, nothing in between.

A tile is `BLOCK` tokens of one head of one component (keys or values) of one target layer. Layers
run fastest, then tokens, then heads, then components: the programs of one moment share the maps of
one head (16 MiB for 64 layers of 128 x 1024 numbers) and a few source tiles, all in the L2 cache,
so that device memory sees every source number once.

Within a tile the loop goes over steps of dimensions, then over source entries (a layer and a
head). The packed maps lie in exactly that order, padded with zeros to whole steps.

Keys come un-rotated (`multiply_plain`) or are un-rotated in registers (`multiply_stripped`). The
second saves a pass over memory and repeats the work for every target layer that reads the key.
"""

import triton
import triton.language as tl

from kvxfer_kernels.tiles import from_e4m3, load_angles, load_pairs, pair_dims


@triton.jit
def entry_place(source, entries, index, head_shift, source_heads, stride_layer, stride_head):
    """Where a source entry (a layer and a head) starts, and its number."""
    entry = tl.load(entries + index) + head_shift
    layer = (entry // source_heads).to(tl.int64)
    head = (entry % source_heads).to(tl.int64)
    return source + layer * stride_layer + head * stride_head, entry


@triton.jit
def multiply_plain(
    source,
    rows,
    weights,
    entries,
    entry_count,
    head_shift,
    scales,
    source_heads,
    stride_layer,
    stride_head,
    stride_dim,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The fp32 product ``[BLOCK, COLUMNS]`` of one tile with its map, inputs as they lie."""
    product = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    columns = tl.arange(0, COLUMNS)
    weight_rows = weights + tl.arange(0, STEP)[:, None] * COLUMNS + columns[None, :]
    for start in range(0, WIDTH, STEP):
        dim = start + tl.arange(0, STEP)
        offsets = rows[:, None] + (dim * stride_dim)[None, :]
        for index in range(entry_count):
            place, entry = entry_place(
                source, entries, index, head_shift, source_heads, stride_layer, stride_head
            )
            if WIDTH % STEP == 0:
                content = tl.load(place + offsets)
            else:
                content = tl.load(place + offsets, mask=(dim < WIDTH)[None, :], other=0)
            if FP8:
                content = from_e4m3(content) * tl.load(scales + entry)
            weight = tl.load(weight_rows)
            product = tl.dot(
                content.to(COMPUTE).to(DOT), weight.to(DOT), product, input_precision="ieee"
            )
            weight_rows += STEP * COLUMNS
    return product


@triton.jit
def multiply_stripped(
    source,
    rows,
    token,
    table,
    weights,
    entries,
    entry_count,
    head_shift,
    scales,
    source_heads,
    stride_layer,
    stride_head,
    stride_dim,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    DOT: tl.constexpr,
):
    """As `multiply_plain`, for keys that are un-rotated in registers on their way.

    The angles of a step stay in registers for all entries; a pair's members are two operands.
    """
    PAIRS: tl.constexpr = WIDTH // 2
    CHUNK: tl.constexpr = STEP // 2
    product = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    columns = tl.arange(0, COLUMNS)
    weight_rows = weights + tl.arange(0, CHUNK)[:, None] * COLUMNS + columns[None, :]
    for start in range(0, PAIRS, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        cos, sin = load_angles(table, token, pair, PAIRS)
        for index in range(entry_count):
            place, entry = entry_place(
                source, entries, index, head_shift, source_heads, stride_layer, stride_head
            )
            first, second = load_pairs(
                place + rows, pair, stride_dim, False, HALF, PAIRS, CHUNK, BLOCK
            )
            if FP8:
                scale = tl.load(scales + entry)
                first = from_e4m3(first) * scale
                second = from_e4m3(second) * scale
            first, second = first.to(tl.float32), second.to(tl.float32)
            turned = (first * cos + second * sin).to(COMPUTE).to(DOT)
            other = (second * cos - first * sin).to(COMPUTE).to(DOT)
            upper = tl.load(weight_rows).to(DOT)
            lower = tl.load(weight_rows + CHUNK * COLUMNS).to(DOT)
            product = tl.dot(turned, upper, product, input_precision="ieee")
            product = tl.dot(other, lower, product, input_precision="ieee")
            weight_rows += STEP * COLUMNS
    return product


@triton.jit
def halves(product, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(product, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def store_keys(
    product,
    rows,
    token,
    table,
    stride_dim,
    START: tl.constexpr,
    PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate and write, one part of the columns after the other.

    All angles at once next to the whole product would not fit into the registers.
    """
    if PARTS == 1:
        store_rotated(
            product,
            rows,
            token,
            table,
            stride_dim,
            START,
            INTERLEAVED,
            HALF,
            PAIRS,
            COLUMNS,
            BLOCK,
        )
    else:
        left, right = halves(product, BLOCK, COLUMNS)
        PART: tl.constexpr = COLUMNS // 2
        store_keys(
            left,
            rows,
            token,
            table,
            stride_dim,
            START,
            PARTS // 2,
            INTERLEAVED,
            HALF,
            PAIRS,
            PART,
            BLOCK,
        )
        store_keys(
            right,
            rows,
            token,
            table,
            stride_dim,
            START + PART // 2,
            PARTS // 2,
            INTERLEAVED,
            HALF,
            PAIRS,
            PART,
            BLOCK,
        )


@triton.jit
def store_rotated(
    product,
    rows,
    token,
    table,
    stride_dim,
    start,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Columns come as pairs (2 i, 2 i + 1), which one thread holds; the first pair is `start`."""
    first, second = tl.split(tl.reshape(product, (BLOCK, WIDTH // 2, 2)))
    pair = start + tl.arange(0, WIDTH // 2)
    cos, sin = load_angles(table, token, pair, PAIRS)
    turned = first * cos - second * sin
    other = second * cos + first * sin
    dtype: tl.constexpr = rows.dtype.element_ty
    if INTERLEAVED:
        dim = 2 * start + tl.arange(0, WIDTH)
        both = tl.reshape(tl.join(turned.to(dtype), other.to(dtype)), (BLOCK, WIDTH))
        inside = (dim < 2 * PAIRS)[None, :]
        tl.store(rows[:, None] + (dim * stride_dim)[None, :], both, mask=inside)
    else:
        first_dim, second_dim = pair_dims(pair, HALF, PAIRS, WIDTH // 2)
        inside = (pair < PAIRS)[None, :]
        tl.store(rows[:, None] + (first_dim * stride_dim)[None, :], turned.to(dtype), mask=inside)
        tl.store(rows[:, None] + (second_dim * stride_dim)[None, :], other.to(dtype), mask=inside)


@triton.jit
def map_tile(
    source,
    source_rows,
    weights,
    bias,
    entries,
    first_entry,
    scales,
    strip_table,
    source_layer,
    source_head,
    source_dim,
    token,
    layer,
    head,
    shift,
    heads,
    source_heads,
    STRIP: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    DOT: tl.constexpr,
    SOURCE_VECTOR: tl.constexpr,
):
    """The mapped numbers of one tile, fp32 with the bias."""
    rows = tl.multiple_of(tl.load(source_rows + token), SOURCE_VECTOR)
    first = tl.load(first_entry + layer)
    count = tl.load(first_entry + layer + 1) - first
    entry_size: tl.constexpr = (WIDTH + STEP - 1) // STEP * STEP * COLUMNS
    weights += (first.to(tl.int64) * heads + head * count) * entry_size
    entries += first
    if STRIP:
        product = multiply_stripped(
            source,
            rows,
            token,
            strip_table,
            weights,
            entries,
            count,
            shift,
            scales,
            source_heads,
            source_layer,
            source_head,
            source_dim,
            HALF,
            WIDTH,
            STEP,
            COLUMNS,
            BLOCK,
            FP8,
            COMPUTE,
            DOT,
        )
    else:
        product = multiply_plain(
            source,
            rows,
            weights,
            entries,
            count,
            shift,
            scales,
            source_heads,
            source_layer,
            source_head,
            source_dim,
            WIDTH,
            STEP,
            COLUMNS,
            BLOCK,
            FP8,
            COMPUTE,
            DOT,
        )
    column = tl.arange(0, COLUMNS)
    product += tl.load(bias + (layer * heads + head) * COLUMNS + column)[None, :]
    return product


@triton.jit
def tile_rows(
    target, target_rows, token, layer, head, target_layer, target_head, VECTOR: tl.constexpr
):
    """Where the rows of a tile are written."""
    rows = tl.multiple_of(tl.load(target_rows + token), VECTOR)
    return target + layer.to(tl.int64) * target_layer + head.to(tl.int64) * target_head + rows


@triton.jit(do_not_specialize=["tokens", "first_layer", "layers"])
def map_blocks_kernel(
    key_source,
    key_source_rows,
    key_target,
    key_target_rows,
    key_weights,
    key_bias,
    key_entries,
    key_first_entry,
    key_scales,
    strip_table,
    apply_table,
    value_source,
    value_source_rows,
    value_target,
    value_target_rows,
    value_weights,
    value_bias,
    value_entries,
    value_first_entry,
    value_scales,
    head_shift,
    key_source_layer,
    key_source_head,
    key_source_dim,
    key_target_layer,
    key_target_head,
    key_target_dim,
    value_source_layer,
    value_source_head,
    value_source_dim,
    value_target_layer,
    value_target_head,
    value_target_dim,
    tokens,
    first_layer,
    layers,
    heads,
    source_heads,
    STRIP: tl.constexpr,
    SOURCE_HALF: tl.constexpr,
    TARGET_INTERLEAVED: tl.constexpr,
    TARGET_HALF: tl.constexpr,
    KEY_SOURCE_WIDTH: tl.constexpr,
    KEY_TARGET_WIDTH: tl.constexpr,
    KEY_STEP: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    VALUE_SOURCE_WIDTH: tl.constexpr,
    VALUE_TARGET_WIDTH: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_FP8: tl.constexpr,
    VALUE_FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    DOT: tl.constexpr,
    SOURCE_VECTOR: tl.constexpr,
    TARGET_VECTOR: tl.constexpr,
):
    token_tiles = tl.cdiv(tokens, BLOCK)
    per_component = heads * token_tiles * layers
    for tile in tl.range(
        tl.program_id(0), 2 * per_component, tl.num_programs(0), disable_licm=True
    ):
        place = tile % per_component
        layer = first_layer + place % layers
        place = place // layers
        head = place // token_tiles
        token = (place % token_tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        # Tokens past the end are the last one again, read and written with the same result, so
        # that nothing needs a mask for them.
        token = tl.minimum(token, tokens - 1)
        shift = tl.load(head_shift + head)
        if tile < per_component:
            keys = map_tile(
                key_source,
                key_source_rows,
                key_weights,
                key_bias,
                key_entries,
                key_first_entry,
                key_scales,
                strip_table,
                key_source_layer,
                key_source_head,
                key_source_dim,
                token,
                layer,
                head,
                shift,
                heads,
                source_heads,
                STRIP,
                SOURCE_HALF,
                KEY_SOURCE_WIDTH,
                KEY_STEP,
                KEY_COLUMNS,
                BLOCK,
                KEY_FP8,
                COMPUTE,
                DOT,
                SOURCE_VECTOR,
            )
            key_rows = tile_rows(
                key_target,
                key_target_rows,
                token,
                layer,
                head,
                key_target_layer,
                key_target_head,
                TARGET_VECTOR,
            )
            store_keys(
                keys,
                key_rows,
                token,
                apply_table,
                key_target_dim,
                0,
                KEY_PARTS,
                TARGET_INTERLEAVED,
                TARGET_HALF,
                KEY_TARGET_WIDTH // 2,
                KEY_COLUMNS,
                BLOCK,
            )
        else:
            values = map_tile(
                value_source,
                value_source_rows,
                value_weights,
                value_bias,
                value_entries,
                value_first_entry,
                value_scales,
                strip_table,
                value_source_layer,
                value_source_head,
                value_source_dim,
                token,
                layer,
                head,
                shift,
                heads,
                source_heads,
                False,
                0,
                VALUE_SOURCE_WIDTH,
                VALUE_STEP,
                VALUE_COLUMNS,
                BLOCK,
                VALUE_FP8,
                COMPUTE,
                DOT,
                SOURCE_VECTOR,
            )
            mapped = values.to(value_target.dtype.element_ty)
            value_rows = tile_rows(
                value_target,
                value_target_rows,
                token,
                layer,
                head,
                value_target_layer,
                value_target_head,
                TARGET_VECTOR,
            )
            dim = tl.arange(0, VALUE_COLUMNS)
            inside = (dim < VALUE_TARGET_WIDTH)[None, :]
            tl.store(value_rows[:, None] + (dim * value_target_dim)[None, :], mapped, mask=inside)
