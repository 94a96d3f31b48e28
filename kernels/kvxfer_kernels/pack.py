"""Maps in the order in which the kernel reads them, made once per pair of models.

A packed component holds, for every target layer and head, the rows of the map as
``[step, entry, dimension in step]`` and its columns as pairs (2 i, 2 i + 1); both padded with
zeros, to whole steps and to a power of two. Where the kernel un-rotates keys itself, a step is the
first members of some pairs, then their second members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvxfer_kernels.tuning import Tuning, next_power_of_2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer_kernels.rotation import Rotation


class AffineMap(Protocol):
    """One component of one target layer: ``y = x W + b``.

    `weight` is ``[H_t, k * d_s, d_t]`` (head-local) or ``[k * H_s * d_s, H_t * d_t]`` (full-head)
    of any float dtype, `bias` is ``[H_t, d_t]``.
    """

    @property
    def source_layers(self) -> tuple[int, ...]: ...
    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def bias(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class PackedComponent:
    """The maps of keys or values of all target layers.

    `weights` is flat, `bias` float32 ``[L_t, H_t, columns]``; `entries` holds ``layer * H_s +
    head`` of what a layer reads, int32, from ``first_entry[layer]`` to ``first_entry[layer + 1]``.
    """

    weights: torch.Tensor
    bias: torch.Tensor
    entries: torch.Tensor
    first_entry: torch.Tensor
    source_width: int
    target_width: int
    step: int
    source_layer_count: int

    @property
    def columns(self) -> int:
        return self.bias.shape[-1]

    def source_layers(self, layers: range, source_heads: int) -> list[int]:
        """The source layers that these target layers read, ascending."""
        bounds = self.first_entry.tolist()
        read = self.entries[bounds[layers.start] : bounds[layers.stop]]
        return sorted(set((read // source_heads).tolist()))


@dataclass(frozen=True)
class PackedMaps:
    """Everything about an ordered pair that the kernels need, on one device.

    `head_shift` is int32 ``[H_t]``, added to an entry: the source head of a head-local map, 0 for
    a full-head map. `strip_first`: keys are un-rotated into memory before they are mapped,
    because each is read by many target heads.
    """

    keys: PackedComponent
    values: PackedComponent
    head_shift: torch.Tensor
    source_heads: int
    source_rotation: Rotation
    target_rotation: Rotation
    strip_first: bool
    compute: torch.dtype
    tuning: Tuning

    @property
    def layers(self) -> int:
        return self.keys.bias.shape[0]

    @property
    def heads(self) -> int:
        return self.keys.bias.shape[1]

    @property
    def device(self) -> torch.device:
        return self.keys.weights.device

    @property
    def device_bytes(self) -> int:
        parts = (self.keys, self.values)
        tensors = [t for p in parts for t in (p.weights, p.bias, p.entries, p.first_entry)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def source_key_layers(self) -> list[int]:
        """The source layers whose keys are read, ascending."""
        return self.keys.source_layers(range(self.layers), self.source_heads)

    def source_layers(self, layers: range) -> list[int]:
        """The source layers that these target layers read, ascending."""
        parts = (self.keys, self.values)
        return sorted({s for p in parts for s in p.source_layers(layers, self.source_heads)})


def pack_maps(
    keys: Sequence[AffineMap],
    values: Sequence[AffineMap],
    *,
    source_heads: int,
    source_rotation: Rotation,
    target_rotation: Rotation,
    compute: torch.dtype,
    tuning: Tuning,
    device: torch.device | str,
    head_assignment: Sequence[int] | None = None,
    strip_first: bool | None = None,
) -> PackedMaps:
    """Pack the maps of all target layers.

    Parameters
    ----------
    keys, values
        One map per target layer. The number of source layers may differ between them.
    head_assignment
        The source head of every target head for head-local maps; None for full-head maps.
    strip_first
        Whether keys are un-rotated into memory before they are mapped (see `PackedMaps`). By
        default yes when a key is read often enough, which the tuning table says; always with
        full-head maps and interleaved pairs.
    compute
        Dtype of the product's operands: bfloat16, float16 or float32.

    Raises
    ------
    ValueError
        A shape contradicts another, a width is odd or outside 32..256, or a head is unknown.
    TypeError
        `compute` is not one of the three dtypes.
    """
    if compute not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"compute: {compute} is not bfloat16, float16 or float32")
    if not keys or len(keys) != len(values):
        raise ValueError(f"maps: {len(keys)} layers of keys, {len(values)} of values")
    for item in (*keys, *values):
        if not item.source_layers or min(item.source_layers) < 0:
            raise ValueError(f"maps: source layers {item.source_layers}")
    heads = keys[0].bias.shape[0]
    local = head_assignment is not None
    assigned = list(head_assignment) if head_assignment is not None else [0] * heads
    if len(assigned) != heads or not all(0 <= head < source_heads for head in assigned):
        raise ValueError(f"head_assignment: {assigned} for {heads} of {source_heads} heads")
    key_width = _source_width(keys[0], local, source_heads)
    if key_width != source_rotation.head_dim:
        raise ValueError(f"keys: width {key_width}, rotation for {source_rotation.head_dim}")
    if keys[0].bias.shape[1] != target_rotation.head_dim:
        raise ValueError(
            f"keys: target width {keys[0].bias.shape[1]}, rotation for {target_rotation.head_dim}"
        )
    columns = max(next_power_of_2(item.bias.shape[1]) for item in (keys[0], values[0]))
    tuning = tuning.for_columns(columns)
    if strip_first is None:
        strip_first = _reuse(keys) > tuning.strip_reuse
    # A pair (2 i, 2 i + 1) would be loaded by 4 bytes to reach two operands in registers.
    strip_first = strip_first or not local or source_rotation.interleaved
    value_width = _source_width(values[0], local, source_heads)
    step = min(tuning.step, next_power_of_2(value_width))
    plain = _Packing(_natural(value_width, step), torch.arange(values[0].bias.shape[1]), step)
    step = min(tuning.step if strip_first else tuning.strip_step, next_power_of_2(key_width))
    rows = _natural(key_width, step) if strip_first else _paired(source_rotation, step)
    turned = _Packing(rows, torch.stack(target_rotation.pair_dims(), dim=1).flatten(), step)
    reader = _Reader(source_heads, local, compute, torch.device(device))
    packed = _pack(keys, turned, key_width, reader), _pack(values, plain, value_width, reader)
    return PackedMaps(
        keys=packed[0],
        values=packed[1],
        head_shift=torch.tensor(assigned, dtype=torch.int32, device=device),
        source_heads=source_heads,
        source_rotation=source_rotation,
        target_rotation=target_rotation,
        strip_first=strip_first,
        compute=compute,
        tuning=tuning,
    )


@dataclass(frozen=True)
class _Packing:
    """`rows` ``[steps, step]`` and `columns` index the dimensions of a head."""

    rows: torch.Tensor
    columns: torch.Tensor
    step: int


@dataclass(frozen=True)
class _Reader:
    source_heads: int
    local: bool
    compute: torch.dtype
    device: torch.device

    @property
    def read_heads(self) -> int:
        return 1 if self.local else self.source_heads


def _pack(
    maps: Sequence[AffineMap], packing: _Packing, source_width: int, reader: _Reader
) -> PackedComponent:
    target_width = packing.columns.numel()
    for width in (source_width, target_width):
        if not 32 <= width <= 256 or width % 2:
            raise ValueError(f"head width {width}: odd or not in 32..256")
    columns = torch.full((next_power_of_2(target_width),), target_width)
    columns[:target_width] = packing.columns
    weights, biases, entries, first_entry = [], [], [], [0]
    for layer, item in enumerate(maps):
        if item.bias.shape != maps[0].bias.shape:
            raise ValueError(f"layer {layer}: bias {tuple(item.bias.shape)}")
        blocks = _blocks(item, layer, source_width, reader).to(reader.device, reader.compute)
        padded = torch.nn.functional.pad(blocks, (0, 1, 0, 1))
        ordered = padded[:, :, packing.rows.to(reader.device)][..., columns.to(reader.device)]
        # [H, E, steps, step, columns] -> steps before entries
        weights.append(ordered.movedim(2, 1).contiguous().view(-1))
        bias = torch.nn.functional.pad(item.bias.float(), (0, 1))[:, columns.to(item.bias.device)]
        biases.append(bias.to(reader.device))
        entries += [
            source * reader.source_heads + head
            for source in item.source_layers
            for head in range(reader.read_heads)
        ]
        first_entry.append(len(entries))
    return PackedComponent(
        weights=torch.cat(weights),
        bias=torch.stack(biases),
        entries=torch.tensor(entries, dtype=torch.int32, device=reader.device),
        first_entry=torch.tensor(first_entry, dtype=torch.int32, device=reader.device),
        source_width=source_width,
        target_width=target_width,
        step=packing.step,
        source_layer_count=1 + max(s for item in maps for s in item.source_layers),
    )


def _blocks(item: AffineMap, layer: int, width: int, reader: _Reader) -> torch.Tensor:
    """The weight as ``[H_t, entries, d_s, d_t]``."""
    weight, (heads, target) = item.weight, item.bias.shape
    count = len(item.source_layers) * reader.read_heads
    if reader.local and weight.shape == (heads, count * width, target):
        return weight.view(heads, count, width, target)
    if not reader.local and weight.shape == (count * width, heads * target):
        return weight.view(count, width, heads, target).permute(2, 0, 1, 3)
    raise ValueError(
        f"layer {layer}: weight {tuple(weight.shape)} is not {count} entries of width {width}, "
        f"{heads} heads of width {target}"
    )


def _source_width(item: AffineMap, local: bool, source_heads: int) -> int:
    if local:
        return int(item.weight.shape[1]) // len(item.source_layers)
    return int(item.weight.shape[0]) // (len(item.source_layers) * source_heads)


def _reuse(maps: Sequence[AffineMap]) -> float:
    """How many target layers read a source layer, on average over those read."""
    read = [source for item in maps for source in item.source_layers]
    return len(read) / len(set(read))


def _natural(width: int, step: int) -> torch.Tensor:
    """``[steps, step]`` dimensions in their order; the width itself stands for padding."""
    steps = -(-width // step)
    return torch.arange(steps * step).clamp(max=width).view(steps, step)


def _paired(rotation: Rotation, step: int) -> torch.Tensor:
    """``[steps, step]``: first members of a step's pairs, then the second ones."""
    chunk = step // 2
    steps = -(-rotation.pairs // chunk)
    order = torch.full((2, steps * chunk), rotation.head_dim)
    order[0, : rotation.pairs], order[1, : rotation.pairs] = rotation.pair_dims()
    return order.view(2, steps, chunk).transpose(0, 1).flatten(1)
