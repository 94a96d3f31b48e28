"""Mapping blocks that lie in host memory: copy in, map and copy out at the same time.

Blocks of one length form batches that fit into a slot of device memory; two slots alternate.
Within a batch, work goes by groups of target layers: the source layers that a group needs first
are copied in on one stream, un-rotated in place and mapped on a second, and the finished layers
are copied out on a third. Streams wait for one another by events only, and never for, nor on, the
stream of the caller. Device memory is allocated once, within the budget.

Host memory that is not pinned passes through a pinned mirror of the slot.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from kvxfer_kernels.clock import Clock
from kvxfer_kernels.map_blocks import Prepared, map_layers
from kvxfer_kernels.paged import Paged
from kvxfer_kernels.strip_keys import strip_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvxfer_kernels.pack import PackedMaps

    _Shapes = list[tuple[int, int, int]]

DEFAULT_BUDGET = 256 << 20
SLOTS = 2
LAYER_GROUPS = 8


@dataclass(frozen=True)
class Block:
    """Source and target of some tokens: keys and values ``[layers, T, heads, dim]`` each."""

    sources: tuple[torch.Tensor, torch.Tensor]
    first_token: int
    targets: tuple[torch.Tensor, torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.sources[0].shape[1]

    @property
    def strides(self) -> list[tuple[int, ...]]:
        return [tensor.stride() for tensor in (*self.sources, *self.targets)]

    def cut(self, start: int, stop: int) -> Block:
        """The tokens ``[start, stop)`` of this block."""
        keys, values = (tensor[:, start:stop] for tensor in self.sources)
        key_targets, value_targets = (tensor[:, start:stop] for tensor in self.targets)
        return Block((keys, values), self.first_token + start, (key_targets, value_targets))


@dataclass(frozen=True)
class _Group:
    """Target layers, and the source layers that no earlier group has needed."""

    targets: range
    sources: list[int]
    stripped: torch.Tensor


class Staging:
    """Device memory, streams and the plan for one pair of models.

    Parameters
    ----------
    maps
        The packed maps. Their memory comes on top of the budget.
    dtype
        The KV dtype of sources and targets: bf16, fp16 or fp32.
    source_layers
        Layers of a source block.
    budget
        Bytes of device memory for blocks on their way. Raises ValueError when it does not hold
        two slots of one token.
    """

    def __init__(
        self,
        maps: PackedMaps,
        dtype: torch.dtype,
        source_layers: int,
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        self._maps = maps
        self._dtype = dtype
        read, heads = (source_layers, maps.source_heads), (maps.layers, maps.heads)
        keys, values = maps.keys, maps.values
        self._shapes: _Shapes = [
            (*read, keys.source_width),
            (*read, values.source_width),
            (*heads, keys.target_width),
            (*heads, values.target_width),
        ]
        per_token = sum(a * b * c for a, b, c in self._shapes) * dtype.itemsize
        # Two tables of two float32 per pair and up to four int64 rows go with every token.
        per_token += 4 * (keys.source_width + keys.target_width) + 5 * 8
        self.capacity = budget // (SLOTS * per_token)
        if self.capacity < 1:
            raise ValueError(
                f"budget: {budget} bytes do not hold {SLOTS} tokens of {per_token} bytes"
            )
        self._groups = _plan(maps)
        self._streams = Streams(maps.device)
        self._slots: list[_Slot] = []
        self.clock = Clock()

    def run(self, blocks: Sequence[Block]) -> None:
        """Fill the targets of all blocks; returns when they are filled."""
        if not self._slots:
            like = torch.empty(0, dtype=self._dtype, device=self._maps.device)
            self._slots = [_Slot(self._shapes, self.capacity, like) for _ in range(SLOTS)]
        try:
            for index, batch in enumerate(batches(blocks, self.capacity)):
                slot = self._slots[index % SLOTS]
                slot.finish()
                self._start(slot, batch)
            for slot in self._slots:
                slot.finish()
        finally:
            self._streams.synchronize()
            for slot in self._slots:
                slot.forget()

    def _start(self, slot: _Slot, batch: list[Block]) -> None:
        """Issue all work of a batch; only copies from unpinned memory happen before return."""
        maps, streams = self._maps, self._streams
        sources, targets = slot.lanes(batch)
        with streams.on(streams.compute):
            prepared = self._prepare(sources, batch)
            keys, values = (_paged(component) for component in targets)
        for group in self._groups:
            with streams.on(streams.copy_in), self.clock.on("copy_in", streams.copy_in):
                for lane in (*sources[0], *sources[1]):
                    lane.copy_in(group.sources)
            arrived = streams.record(streams.copy_in)
            with streams.on(streams.compute):
                streams.wait(streams.compute, arrived)
                with self.clock.on("map", streams.compute):
                    if maps.strip_first and group.sources:
                        strip_keys(
                            prepared.keys,
                            prepared.keys,
                            maps.source_rotation,
                            prepared.strip_table,
                            group.stripped,
                        )
                    map_layers(maps, prepared, keys, values, group.targets)
            mapped = streams.record(streams.compute)
            with streams.on(streams.copy_out):
                streams.wait(streams.copy_out, mapped)
                with self.clock.on("copy_out", streams.copy_out):
                    for lane in (*targets[0], *targets[1]):
                        lane.copy_out(group.targets)
        slot.started(streams.record(streams.copy_out))

    def _prepare(self, sources: list[list[_Lane]], batch: list[Block]) -> Prepared:
        maps = self._maps
        positions = token_positions(batch, maps.device)
        return Prepared(
            keys=_paged(sources[0]),
            values=_paged(sources[1]),
            key_scales=None,
            value_scales=None,
            strip_table=maps.source_rotation.strip_table(positions),
            apply_table=maps.target_rotation.apply_table(positions),
        )


def token_positions(batch: list[Block], device: torch.device) -> torch.Tensor:
    """Absolute positions of the tokens of blocks of one length, int64."""
    starts = torch.tensor([block.first_token for block in batch])
    return (starts[:, None] + torch.arange(batch[0].tokens)).flatten().to(device)


def _paged(lanes: list[_Lane]) -> Paged:
    return Paged.from_views([lane.device for lane in lanes])


def _plan(maps: PackedMaps) -> list[_Group]:
    size = -(-maps.layers // LAYER_GROUPS)
    groups, seen = [], set[int]()
    for start in range(0, maps.layers, size):
        targets = range(start, min(start + size, maps.layers))
        new = [layer for layer in maps.source_layers(targets) if layer not in seen]
        seen.update(new)
        stripped = torch.tensor(new, dtype=torch.int32, device=maps.device)
        groups.append(_Group(targets, new, stripped))
    return groups


def batches(blocks: Sequence[Block], capacity: int) -> Iterator[list[Block]]:
    """Runs of blocks of one length and layout, together at most `capacity` tokens."""
    pieces = [
        block.cut(start, min(start + capacity, block.tokens))
        for block in blocks
        for start in range(0, block.tokens, capacity)
    ]
    for (tokens, _), run in groupby(pieces, key=lambda piece: (piece.tokens, piece.strides)):
        equal = list(run)
        count = capacity // tokens
        for start in range(0, len(equal), count):
            yield equal[start : start + count]


@dataclass(frozen=True)
class _Lane:
    """One component of one block: its host memory, a pinned mirror if needed, device memory."""

    host: torch.Tensor
    mirror: torch.Tensor | None
    device: torch.Tensor

    def copy_in(self, layers: list[int]) -> None:
        for layer in layers:
            source = self.host[layer]
            if self.mirror is not None:
                source = self.mirror[layer].copy_(source)
            self.device[layer].copy_(source, non_blocking=True)

    def copy_out(self, layers: range) -> None:
        final = self.host if self.mirror is None else self.mirror
        for layer in layers:
            final[layer].copy_(self.device[layer], non_blocking=True)

    def finish(self) -> None:
        if self.mirror is not None:
            self.host.copy_(self.mirror)


class _Slot:
    """Device memory for one batch, with mirrors in pinned host memory once they are needed."""

    def __init__(self, shapes: _Shapes, capacity: int, like: torch.Tensor) -> None:
        self._shapes = shapes
        sizes = [capacity * layers * heads * dim for layers, heads, dim in shapes]
        self._flats = [like.new_empty(size) for size in sizes]
        self._mirrors: list[torch.Tensor] = []
        self._outputs: list[_Lane] = []
        self._done: torch.cuda.Event | None = None

    def lanes(self, batch: list[Block]) -> tuple[list[list[_Lane]], list[list[_Lane]]]:
        """Lanes of source keys, source values; of target keys, target values; one per block."""
        tokens = batch[0].tokens
        device = self._views(self._flats, len(batch), tokens)
        hosts = [
            [block.sources[0] for block in batch],
            [block.sources[1] for block in batch],
            [block.targets[0] for block in batch],
            [block.targets[1] for block in batch],
        ]
        mirrors: list[torch.Tensor] | None = None
        if not all(tensor.is_pinned() for component in hosts for tensor in component):
            mirrors = self._views(self._host_flats(), len(batch), tokens)
        lanes = [
            [
                _Lane(
                    host, None if mirrors is None else mirrors[place][index], device[place][index]
                )
                for index, host in enumerate(component)
            ]
            for place, component in enumerate(hosts)
        ]
        self._outputs = lanes[2] + lanes[3]
        return lanes[:2], lanes[2:]

    def started(self, done: torch.cuda.Event | None) -> None:
        """All work of the batch is issued; `done` follows the last copy."""
        self._done = done

    def finish(self) -> None:
        """Wait for the batch, if there is one, and hand its results over."""
        if self._done is not None:
            self._done.synchronize()
        for lane in self._outputs:
            lane.finish()
        self.forget()

    def forget(self) -> None:
        self._done = None
        self._outputs = []

    def _host_flats(self) -> list[torch.Tensor]:
        if not self._mirrors:
            self._mirrors = [
                torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
                for flat in self._flats
            ]
        return self._mirrors

    def _views(self, flats: list[torch.Tensor], count: int, tokens: int) -> list[torch.Tensor]:
        """``[count, layers, tokens, heads, dim]`` of every flat tensor."""
        return [
            flat[: count * layers * tokens * heads * dim].view(count, layers, tokens, heads, dim)
            for flat, (layers, heads, dim) in zip(flats, self._shapes, strict=True)
        ]


class Streams:
    """Three streams of our own, or, on the CPU, none: everything then happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self.copy_in, self.compute, self.copy_out = (
            torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
            for _ in range(3)
        )
        self.follow_caller()

    def follow_caller(self) -> None:
        """Let our streams wait for what the caller's stream has been given so far."""
        for stream in (self.copy_in, self.compute, self.copy_out):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))

    def on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def record(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        return None if stream is None else stream.record_event()

    def wait(self, stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
        if stream is not None and event is not None:
            stream.wait_event(event)

    def synchronize(self) -> None:
        for stream in (self.copy_in, self.compute, self.copy_out):
            if stream is not None:
                stream.synchronize()
