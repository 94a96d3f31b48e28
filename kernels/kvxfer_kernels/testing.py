"""Random maps, blocks of any layout, and poisoned outputs, for tests and the GPU check."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from kvxfer_kernels.map_blocks import reference
from kvxfer_kernels.pack import PackedMaps, pack_maps
from kvxfer_kernels.rotation import Rotation
from kvxfer_kernels.tuning import INTERPRETER, Tuning

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Affine:
    source_layers: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class Side:
    """Geometry of one model."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    rotated: int
    interleaved: bool = False
    factor: float = 1.0
    theta: float = 10000.0

    def rotation(self) -> Rotation:
        exponent = torch.arange(0, self.rotated, 2, dtype=torch.float32) / self.rotated
        return Rotation(self.theta**-exponent, self.key_dim, self.factor, self.interleaved)

    def shapes(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of keys and values."""
        front = (self.layers, tokens, self.heads)
        return (*front, self.key_dim), (*front, self.value_dim)


@dataclass(frozen=True)
class Pair:
    """Maps between two sides, raw and packed."""

    source: Side
    target: Side
    keys: list[Affine]
    values: list[Affine]
    assignment: tuple[int, ...] | None
    packed: PackedMaps

    def expected(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference for dense CPU sources."""
        return reference.map_blocks(
            keys,
            values,
            positions,
            self.keys,
            self.values,
            self.source.rotation(),
            self.target.rotation(),
            self.assignment,
        )


def make_pair(
    source: Side,
    target: Side,
    *,
    full: bool = False,
    compute: torch.dtype = torch.bfloat16,
    strip_first: bool | None = None,
    seed: int = 0,
    tuning: Tuning = INTERPRETER,
    device: str = "cpu",
) -> Pair:
    """Maps with a different number of source layers for every layer and component."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randint(source.heads, (target.heads,), generator=generator).tolist()
    assignment = None if full else tuple(heads)
    keys = _affine(source, target, (source.key_dim, target.key_dim), full, compute, generator)
    values = _affine(source, target, (source.value_dim, target.value_dim), full, compute, generator)
    packed = pack_maps(
        keys,
        values,
        source_heads=source.heads,
        source_rotation=source.rotation(),
        target_rotation=target.rotation(),
        compute=compute,
        tuning=tuning,
        device=device,
        head_assignment=assignment,
        strip_first=strip_first,
    )
    return Pair(source, target, keys, values, assignment, packed)


def _affine(
    source: Side,
    target: Side,
    widths: tuple[int, int],
    full: bool,
    compute: torch.dtype,
    generator: torch.Generator,
) -> list[Affine]:
    layers = []
    for _ in range(target.layers):
        count = int(torch.randint(1, source.layers + 1, (1,), generator=generator))
        chosen = tuple(torch.randperm(source.layers, generator=generator)[:count].tolist())
        rows = count * widths[0] * (source.heads if full else 1)
        shape = (rows, target.heads * widths[1]) if full else (target.heads, rows, widths[1])
        weight = torch.randn(shape, generator=generator).div(rows**0.5).to(compute)
        bias = torch.randn((target.heads, widths[1]), generator=generator)
        layers.append(Affine(chosen, weight, bias))
    return layers


@dataclass(frozen=True)
class Layout:
    """How ``[layers, tokens, heads, dim]`` lies in memory.

    `order` lists the four dimensions from the outermost; every extent is `padding` longer than
    its dimension (none for `dim` when it is innermost and `padding` is 0); the whole starts
    `offset` numbers into its allocation.
    """

    order: tuple[int, int, int, int] = (0, 1, 2, 3)
    padding: int = 0
    offset: int = 0

    def place(self, shape: tuple[int, ...], flat: torch.Tensor) -> torch.Tensor:
        """A view of `shape` into `flat`."""
        extents = [shape[dim] + self.padding for dim in self.order]
        steps = [1, *accumulate(reversed(extents[1:]), lambda a, b: a * b)]
        strides = [0, 0, 0, 0]
        for dim, step in zip(reversed(self.order), steps, strict=True):
            strides[dim] = step
        return flat.as_strided(shape, strides, self.offset)

    def numbers(self, shape: tuple[int, ...]) -> int:
        """Size of an allocation with a guard band of 64 numbers on both sides of the view."""
        size = 1
        for extent in shape:
            size *= extent + self.padding
        return self.offset + size + 64


@dataclass(frozen=True)
class Guarded:
    """Blocks to be filled, each in an allocation of NaN."""

    flats: list[torch.Tensor]
    views: list[torch.Tensor]

    @classmethod
    def make(
        cls,
        shape: tuple[int, ...],
        counts: list[int],
        layout: Layout,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> Guarded:
        """Blocks of `counts` tokens with equal strides, made for the longest."""
        room = (shape[0], max(counts), *shape[2:])
        size = layout.numbers(room)
        flats = [torch.full((size,), float("nan"), dtype=dtype, device=device) for _ in counts]
        views = [
            layout.place(room, flat)[:, :count] for flat, count in zip(flats, counts, strict=True)
        ]
        return cls(flats, views)

    def result(self) -> torch.Tensor:
        return torch.cat([view.cpu() for view in self.views], dim=1)

    def stray_writes(self) -> int:
        """Numbers outside the views that are no longer NaN; poisons the views."""
        for view in self.views:
            view.fill_(float("nan"))
        return sum(int((~flat.isnan()).sum()) for flat in self.flats)


def scatter(dense: torch.Tensor, counts: list[int], layout: Layout) -> list[torch.Tensor]:
    """`dense` ``[layers, N, heads, dim]`` as blocks of `counts` tokens, NaN around them."""
    room = (dense.shape[0], max(counts), *dense.shape[2:])
    views, start = [], 0
    for count in counts:
        flat = torch.zeros(layout.numbers(room)).fill_(float("nan")).to(dense.device, dense.dtype)
        view = layout.place(room, flat)[:, :count]
        view.copy_(dense[:, start : start + count])
        views.append(view)
        start += count
    return views


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected numbers; NaN counts as infinite."""
    error = (result.double() - expected.double()).norm() / expected.double().norm()
    return float("inf") if error.isnan() else float(error)
