"""Times on a GPU: the kernels, what they replace, and the device's ceilings in the same run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvxfer_kernels import shapes
from kvxfer_kernels.launch import architecture, tuning_for
from kvxfer_kernels.map_blocks import map_blocks
from kvxfer_kernels.pack import PackedMaps, pack_maps
from kvxfer_kernels.paged import Paged
from kvxfer_kernels.rotation import Rotation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvxfer_kernels.shapes import PairShape
    from kvxfer_kernels.tuning import Tuning

TITLE = "milliseconds on the device, bf16, medians; predictions from counted bytes and operations"
COLUMNS = (
    "pair",
    "tokens",
    "what",
    "ms",
    "predicted",
    "TFLOP/s",
    "of peak",
    "GB/s",
    "of copy",
)
WARM_UP = 3
REPEATS = 10


@dataclass(frozen=True)
class Affine:
    """Maps as torch applies them: `weight` and `bias` as in `kvxfer_kernels.pack.AffineMap`."""

    source_layers: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor


class Workload:
    """Random blocks and maps of one pair on one device."""

    def __init__(self, pair: PairShape, tokens: int, device: torch.device) -> None:
        self.pair = pair
        self.tokens = tokens
        self.device = device
        self.positions = torch.arange(tokens, device=device)
        self.keys, self.values = (
            self._random(pair.source_layers, tokens, pair.source_heads, pair.source_width)
            for _ in range(2)
        )
        self.key_targets, self.value_targets = (
            torch.empty(
                (pair.target_layers, tokens, pair.target_heads, pair.target_width),
                dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(2)
        )

    def rotation(self, width: int) -> Rotation:
        return Rotation(1e6 ** -(torch.arange(0, width, 2, dtype=torch.float32) / width), width)

    def maps(self, *, full: bool) -> list[Affine]:
        """One map per target layer; keys and values share them, which no time depends on."""
        pair = self.pair
        rows = pair.chosen * pair.source_width * (pair.source_heads if full else 1)
        heads, width = pair.target_heads, pair.target_width
        shape = (rows, heads * width) if full else (heads, rows, width)
        return [
            Affine(
                shapes.nearest_layers(layer, pair.target_layers, pair.source_layers, pair.chosen),
                self._random(*shape).div_(rows**0.5),
                torch.zeros(heads, width, device=self.device),
            )
            for layer in range(pair.target_layers)
        ]

    def pack(self, maps: list[Affine], tuning: Tuning, *, full: bool) -> PackedMaps:
        pair = self.pair
        heads = [head * pair.source_heads // pair.target_heads for head in range(pair.target_heads)]
        return pack_maps(
            maps,
            maps,
            source_heads=pair.source_heads,
            source_rotation=self.rotation(pair.source_width),
            target_rotation=self.rotation(pair.target_width),
            compute=torch.bfloat16,
            tuning=tuning,
            device=self.device,
            head_assignment=None if full else heads,
        )

    def kernels(self, packed: PackedMaps) -> Callable[[], None]:
        keys, values = Paged.from_views([self.keys]), Paged.from_views([self.values])
        key_targets = Paged.from_views([self.key_targets])
        value_targets = Paged.from_views([self.value_targets])
        return lambda: map_blocks(packed, keys, values, self.positions, key_targets, value_targets)

    def torch_method(self, maps: list[Affine], *, full: bool, compiled: bool) -> Callable[[], None]:
        """Strip, map layer by layer, rotate, in torch."""
        pair = self.pair
        strip = self.rotation(pair.source_width).strip_table(self.positions)
        turn = self.rotation(pair.target_width).apply_table(self.positions)
        layer_step = _full_head_layer if full else _head_local_layer
        if compiled:
            layer_step = torch.compile(layer_step, dynamic=False)

        def run() -> None:
            stripped = _turn(self.keys, strip, -1)
            for layer, item in enumerate(maps):
                chosen = slice(item.source_layers[0], item.source_layers[-1] + 1)
                keys, values = layer_step(
                    stripped[chosen], self.values[chosen], item.weight, item.bias, turn
                )
                self.key_targets[layer] = keys
                self.value_targets[layer] = values

        return run

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)


def _turn(keys: torch.Tensor, table: torch.Tensor, sign: int) -> torch.Tensor:
    """Rotate ``[..., N, H, D]`` by a table ``[N, 2, D / 2]``, backwards for sign -1."""
    cos, sin = table[:, None, 0], table[:, None, 1] * sign
    half = keys.shape[-1] // 2
    first, second = keys[..., :half], keys[..., half:]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    result: torch.Tensor = turned.to(keys.dtype)
    return result


def _full_head_layer(
    keys: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    turn: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    mapped = [
        (chosen.permute(1, 0, 2, 3).flatten(1) @ weight).view(-1, *bias.shape)
        + bias.to(weight.dtype)
        for chosen in (keys, values)
    ]
    return _turn(mapped[0], turn, 1), mapped[1]


def _head_local_layer(
    keys: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    turn: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    mapped = [
        torch.bmm(chosen.permute(2, 1, 0, 3).flatten(2), weight).transpose(0, 1)
        + bias.to(weight.dtype)
        for chosen in (keys, values)
    ]
    return _turn(mapped[0], turn, 1), mapped[1]


def prefill_layer(pair: PairShape, tokens: int, device: torch.device) -> Callable[[], None]:
    """One layer of the target over a whole prompt, with flash attention."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).div_(shape[0] ** 0.5)

    width, queries, heads = pair.target_width, pair.query_heads, pair.target_heads
    hidden = random(tokens, pair.hidden)
    project = random(pair.hidden, (queries + 2 * heads) * width)
    output = random(queries * width, pair.hidden)
    gate, up = (random(pair.hidden, pair.intermediate) for _ in range(2))
    down = random(pair.intermediate, pair.hidden)

    def run() -> None:
        mixed = (hidden @ project).view(1, tokens, -1, width).transpose(1, 2)
        query = mixed[:, :queries]
        key, value = mixed[:, queries:].chunk(2, dim=1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        state = hidden + attended.transpose(1, 2).reshape(tokens, -1) @ output
        _ = state + (torch.nn.functional.silu(state @ gate) * (state @ up)) @ down

    return run


def milliseconds(work: Callable[[], object]) -> float:
    """Median on the device over `REPEATS` runs, by events."""
    for _ in range(WARM_UP):
        work()
    events = [(_event(), _event()) for _ in range(REPEATS)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    times = [float(start.elapsed_time(end)) for start, end in events]
    return sorted(times)[REPEATS // 2]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def matrix_peak(device: torch.device) -> float:
    """Operations per second of a large plain bf16 product."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return float(2 * 8192**3 / milliseconds(lambda: torch.mm(a, b)) * 1e3)


def copy_peak(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy on the device."""
    a = torch.randn(1 << 30, device=device)
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / milliseconds(lambda: b.copy_(a)) * 1e3


def rows(
    pairs: list[PairShape], lengths: list[int], device: torch.device
) -> Iterator[tuple[Any, ...]]:
    """Cells of `COLUMNS` for every pair, length and method."""
    matrix, copy = matrix_peak(device), copy_peak(device)
    chip = shapes.DEVICES.get(architecture(device))
    for pair in pairs:
        for tokens in lengths:
            yield from _pair_rows(Workload(pair, tokens, device), matrix, copy, chip)
            torch.cuda.empty_cache()


def _pair_rows(
    work: Workload, matrix: float, copy: float, chip: shapes.Device | None
) -> Iterator[tuple[Any, ...]]:
    pair, tokens = work.pair, work.tokens
    for full in (False, True):
        maps = work.maps(full=full)
        table = tuning_for(work.device, full=full, compute=torch.bfloat16)
        operations = pair.operations(tokens, full=full)
        moved = pair.source_bytes(tokens) + pair.target_bytes(tokens) + pair.map_bytes(full=full)
        predicted = shapes.predict(pair, tokens, table, chip, full=full).total if chip else None
        ours = work.kernels(work.pack(maps, table, full=full))
        theirs = work.torch_method(maps, full=full, compiled=not full)
        name = "kernels, full-head" if full else "kernels, head-local"
        other = "eager torch, full-head" if full else "torch.compile, head-local"
        methods = ((name, ours), (other, theirs))
        for what, method in methods:
            ms = milliseconds(method)
            forecast = f"{predicted * 1e3:.2f}" if predicted and what == name else ""
            rate, speed = operations / ms * 1e3, moved / ms * 1e3
            yield (
                pair.name,
                tokens,
                what,
                ms,
                forecast,
                rate / 1e12,
                f"{rate / matrix:.0%}",
                speed / 1e9,
                f"{speed / copy:.0%}",
            )
        del maps, methods, ours, theirs  # gigabytes, before the next are made
    ms = milliseconds(prefill_layer(pair, tokens, work.device)) * pair.target_layers
    rate = pair.prefill_operations(tokens) / ms * 1e3
    share = f"{rate / matrix:.0%}"
    yield (pair.name, tokens, "prefill of the target", ms, "", rate / 1e12, share, "", "")
