"""`map_blocks`: source blocks in, target blocks out, one launch for all layers and heads.

`prepare` makes what all target layers share (angles and, for full-head maps, un-rotated keys);
`map_layers` maps a range of target layers. `map_blocks` does both.

Tokens with maps of their own (the first positions, when an artifact has such maps) need no code
here: a call handles whatever tokens its rows name, so that they are a second call with other maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from kvxfer_kernels.launch import (
    FP8,
    TRITON_DTYPES,
    as_codes,
    check_runnable,
    check_scales,
    dot_dtype,
    programs,
)
from kvxfer_kernels.map_blocks.kernel import map_blocks_kernel
from kvxfer_kernels.paged import Paged
from kvxfer_kernels.strip_keys import strip_keys

if TYPE_CHECKING:
    from kvxfer_kernels.pack import PackedComponent, PackedMaps

SOURCE_DTYPES = (*TRITON_DTYPES, FP8)


@dataclass(frozen=True)
class Prepared:
    """Source tokens with what all target layers share."""

    keys: Paged
    values: Paged
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    strip_table: torch.Tensor
    apply_table: torch.Tensor


def map_blocks(
    maps: PackedMaps,
    keys: Paged,
    values: Paged,
    positions: torch.Tensor,
    key_targets: Paged,
    value_targets: Paged,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Fill the targets, in place, for all layers and heads of `maps`.

    Parameters
    ----------
    keys, values
        ``[L_s, N, H_s, d_s]``: bf16, fp16, fp32, or fp8 (e4m3) with scales.
    positions
        int64 ``[N]``, absolute.
    key_targets, value_targets
        ``[L_t, N, H_t, d_t]``: bf16, fp16 or fp32, disjoint from the sources.
    key_scales, value_scales
        float32 ``[L_s, H_s]``, for fp8 only: a stored number times its scale is the value.

    Raises ValueError when a shape, dtype, device or token count does not fit.
    """
    prepared = prepare(
        maps, keys, values, positions, key_scales=key_scales, value_scales=value_scales
    )
    map_layers(maps, prepared, key_targets, value_targets, range(maps.layers))


def prepare(
    maps: PackedMaps,
    keys: Paged,
    values: Paged,
    positions: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> Prepared:
    """The angles of all tokens and, for full-head maps, their un-rotated keys."""
    check_runnable(map_blocks_kernel, maps.device)
    for name, part, paged in (("keys", maps.keys, keys), ("values", maps.values, values)):
        _check_source(name, maps, part, paged, positions)
    key_scales = check_scales("keys", keys.base, key_scales)
    value_scales = check_scales("values", values.base, value_scales)
    strip_table = maps.source_rotation.strip_table(positions)
    apply_table = maps.target_rotation.apply_table(positions)
    if maps.strip_first:
        layers, _, heads, width = keys.base.shape
        shape = (layers, keys.tokens, heads, width)
        out = Paged.from_views([torch.empty(shape, dtype=maps.compute, device=maps.device)])
        read = torch.tensor(maps.source_key_layers(), dtype=torch.int32, device=maps.device)
        strip_keys(keys, out, maps.source_rotation, strip_table, read, key_scales)
        keys, key_scales = out, None
    return Prepared(keys, values, key_scales, value_scales, strip_table, apply_table)


def map_layers(
    maps: PackedMaps,
    prepared: Prepared,
    key_targets: Paged,
    value_targets: Paged,
    layers: range,
) -> None:
    """Map the target layers `layers` (step 1); the targets hold all layers."""
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= maps.layers:
        raise ValueError(f"layers: {layers} of {maps.layers}")
    for name, part, paged in (
        ("key targets", maps.keys, key_targets),
        ("value targets", maps.values, value_targets),
    ):
        _check_target(name, maps, part, paged, prepared)
    tokens = prepared.keys.tokens
    tuning = maps.tuning
    tiles = 2 * triton.cdiv(tokens, tuning.block) * len(layers) * maps.heads
    if not tiles:
        return
    grid = (programs(maps.device, tuning.programs, tiles),)
    map_blocks_kernel[grid](
        **_component("key", maps.keys, prepared.keys, key_targets, prepared.key_scales),
        **_component("value", maps.values, prepared.values, value_targets, prepared.value_scales),
        strip_table=prepared.strip_table,
        apply_table=prepared.apply_table,
        head_shift=maps.head_shift,
        tokens=tokens,
        first_layer=layers.start,
        layers=len(layers),
        heads=maps.heads,
        source_heads=maps.source_heads,
        **constants(maps),
        DOT=dot_dtype(map_blocks_kernel, maps.compute),
        BLOCK=tuning.block,
        SOURCE_VECTOR=min(prepared.keys.vector, prepared.values.vector),
        TARGET_VECTOR=min(key_targets.vector, value_targets.vector),
        KEY_FP8=prepared.keys.base.dtype is FP8,
        VALUE_FP8=prepared.values.base.dtype is FP8,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )


def constants(maps: PackedMaps) -> dict[str, Any]:
    """The compile-time arguments that follow from the maps alone."""
    source, target = maps.source_rotation, maps.target_rotation
    return {
        "STRIP": not maps.strip_first,
        "SOURCE_HALF": source.rotated_pairs,
        "TARGET_INTERLEAVED": target.interleaved,
        "TARGET_HALF": target.rotated_pairs,
        "KEY_SOURCE_WIDTH": maps.keys.source_width,
        "KEY_TARGET_WIDTH": maps.keys.target_width,
        "KEY_STEP": maps.keys.step,
        "KEY_COLUMNS": maps.keys.columns,
        "KEY_PARTS": maps.tuning.parts(maps.keys.columns),
        "VALUE_SOURCE_WIDTH": maps.values.source_width,
        "VALUE_TARGET_WIDTH": maps.values.target_width,
        "VALUE_STEP": maps.values.step,
        "VALUE_COLUMNS": maps.values.columns,
        "COMPUTE": TRITON_DTYPES[maps.compute],
    }


def _component(
    name: str,
    part: PackedComponent,
    source: Paged,
    target: Paged,
    scales: torch.Tensor | None,
) -> dict[str, Any]:
    arguments = {
        "source": as_codes(source.base),
        "source_rows": source.rows,
        "target": target.base,
        "target_rows": target.rows,
        "weights": part.weights,
        "bias": part.bias,
        "entries": part.entries,
        "first_entry": part.first_entry,
        "scales": part.bias if scales is None else scales,
        "source_layer": source.base.stride(0),
        "source_head": source.base.stride(2),
        "source_dim": source.base.stride(3),
        "target_layer": target.base.stride(0),
        "target_head": target.base.stride(2),
        "target_dim": target.base.stride(3),
    }
    return {f"{name}_{argument}": value for argument, value in arguments.items()}


def _check_source(
    name: str, maps: PackedMaps, part: PackedComponent, paged: Paged, positions: torch.Tensor
) -> None:
    base = paged.base
    if base.dtype not in SOURCE_DTYPES:
        raise ValueError(f"{name}: {base.dtype} is not bf16, fp16, fp32 or e4m3")
    if base.device != maps.device or positions.device != maps.device:
        raise ValueError(
            f"{name}: on {base.device}, positions on {positions.device}, maps on {maps.device}"
        )
    if positions.shape != (paged.tokens,) or positions.dtype is not torch.int64:
        raise ValueError(
            f"positions: {positions.dtype} {tuple(positions.shape)}, expected int64 of "
            f"{paged.tokens} tokens"
        )
    if base.shape[2:] != (maps.source_heads, part.source_width):
        raise ValueError(
            f"{name}: heads and width {tuple(base.shape[2:])}, maps read "
            f"{(maps.source_heads, part.source_width)}"
        )
    if base.shape[0] < part.source_layer_count:
        raise ValueError(f"{name}: {base.shape[0]} layers, maps read {part.source_layer_count}")


def _check_target(
    name: str, maps: PackedMaps, part: PackedComponent, paged: Paged, prepared: Prepared
) -> None:
    base = paged.base
    if base.dtype not in TRITON_DTYPES:
        raise ValueError(f"{name}: {base.dtype} is not bf16, fp16 or fp32")
    if base.device != maps.device:
        raise ValueError(f"{name}: on {base.device}, maps on {maps.device}")
    if paged.tokens != prepared.keys.tokens:
        raise ValueError(f"{name}: {paged.tokens} tokens, sources have {prepared.keys.tokens}")
    expected = (maps.layers, maps.heads, part.target_width)
    if (base.shape[0], *base.shape[2:]) != expected:
        raise ValueError(f"{name}: {tuple(base.shape)}, maps fill {expected}")
