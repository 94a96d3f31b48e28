"""``kvxfer bench map``: how fast blocks are mapped, beside what the machine could do.

On a GPU the kernels are compared with eager torch of the published full-head method, with
torch.compile of head-local maps and with the target's own prefill, on the CPU the converter with
a plain batched matmul of the same size. Ceilings are measured in the same run. Weights and blocks
are random: speed does not depend on them, unlike zeros, which some chips multiply faster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.cli.common import positive_int
from kvstore_xfer.cli.output import open_console
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads
from kvstore_xfer.models.attention import AttentionKind
from kvstore_xfer.models.description import ModelDescription
from kvstore_xfer.rope.spec import RopeSpec
from kvxfer_kernels import shapes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvxfer_kernels.shapes import PairShape

_PAGE = 256
_REPEATS = 9
_ENOUGH = 2.0  # seconds of repeats, after which no more are made


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``map`` to the ``bench`` command."""
    parser = subparsers.add_parser("map", help="time the mapping of blocks against its ceilings")
    parser.add_argument(
        "--pair", choices=list(shapes.PAIRS), action="append", help="default: all published pairs"
    )
    parser.add_argument(
        "--tokens", type=positive_int, action="append", help="default: 64 to 32,768"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--layers",
        type=positive_int,
        default=4,
        help="target layers to map on the CPU (default: 4; a GPU maps all)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU; use --device cpu")
    pairs = [shapes.PAIRS[name] for name in args.pair or shapes.PAIRS]
    lengths = args.tokens or list(shapes.LENGTHS)
    if device == "cuda":
        from kvxfer_kernels import bench

        rows: Iterator[tuple[Any, ...]] = bench.rows(pairs, lengths, torch.device("cuda"))
        _print(bench.TITLE, bench.COLUMNS, rows)
    else:
        rows = _cpu_rows(pairs, lengths, args.layers)
        title = f"{torch.get_num_threads()} CPU threads, bf16, {args.layers} target layers"
        _print(title, _CPU_COLUMNS, rows)
    return 0


def _print(title: str, columns: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("pair", "what") else "right")
    progress = open_console(stderr=True)
    try:
        for row in rows:
            cells = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row]
            progress.print("measured:", *cells)
            table.add_row(*cells)
    finally:  # also of a run that is interrupted
        open_console().print(table)


_CPU_COLUMNS = ("pair", "tokens", "ms", "GFLOP/s", "GB/s", "bmm ms", "of bmm")


def _cpu_rows(pairs: list[PairShape], lengths: list[int], layers: int) -> Iterator[tuple[Any, ...]]:
    for pair in pairs:
        work = CpuWork(pair, layers)
        for tokens in lengths:
            seconds, ceiling, share = work.measure(tokens)
            operations = work.operations(tokens)
            yield (
                pair.name,
                tokens,
                seconds * 1e3,
                operations / seconds / 1e9,
                work.bytes_moved(tokens) / seconds / 1e9,
                ceiling * 1e3,
                f"{share:.0%}",
            )


@dataclass(frozen=True)
class CpuWork:
    """The middle `layers` target layers of a pair, head-local, on the CPU."""

    pair: PairShape
    layers: int

    def operations(self, tokens: int) -> float:
        return self.pair.operations(tokens, full=False) * self.layers / self.pair.target_layers

    def bytes_moved(self, tokens: int) -> float:
        """Source layers that are read, each once, and target layers."""
        read = {source for layer in self._chosen() for source in layer}
        sources = self.pair.source_bytes(tokens) * len(read) / self.pair.source_layers
        return sources + self.pair.target_bytes(tokens) * self.layers / self.pair.target_layers

    def measure(self, tokens: int) -> tuple[float, float, float]:
        """Seconds of the converter and of the plain products, and the rate of one by the other's.

        Medians of pairs that are measured alternately, so that a processor whose speed varies
        serves both alike.
        """
        pair = self.pair
        converter = TorchConverter(self._mapper(), torch.bfloat16)
        sources = _pages(tokens, self._source_layers, pair.source_heads, pair.source_width)
        targets = _pages(tokens, self.layers, pair.target_heads, pair.target_width)
        first = [index * _PAGE for index in range(len(sources))]
        left = _random(pair.target_heads, tokens, pair.chosen * pair.source_width)
        right = _random(pair.target_heads, left.shape[2], pair.target_width)

        def convert() -> None:
            converter.convert(sources, first, targets)

        def products() -> None:
            for _ in range(2 * self.layers):
                torch.bmm(left, right)

        pairs = _alternately(convert, products)
        converter, ceiling = (median(side) for side in zip(*pairs, strict=True))
        return converter, ceiling, median(theirs / ours for ours, theirs in pairs)

    @property
    def _source_layers(self) -> int:
        """Those that are read; the others need no memory."""
        return 1 + max(source for layer in self._chosen() for source in layer)

    def _chosen(self) -> list[tuple[int, ...]]:
        """The k source layers around the same relative depth, counted from the first one read."""
        pair = self.pair
        first = (pair.target_layers - self.layers) // 2
        layers = [
            shapes.nearest_layers(layer, pair.target_layers, pair.source_layers, pair.chosen)
            for layer in range(first, first + self.layers)
        ]
        lowest = min(source for layer in layers for source in layer)
        return [tuple(source - lowest for source in layer) for layer in layers]

    def _mapper(self) -> Mapper:
        pair = self.pair
        maps = tuple(
            LayerMap(
                chosen,
                _random(pair.target_heads, len(chosen) * pair.source_width, pair.target_width),
                torch.randn(pair.target_heads, pair.target_width),
            )
            for chosen in self._chosen()
        )
        source = _describe(self._source_layers, pair.source_heads, pair.source_width)
        target = _describe(self.layers, pair.target_heads, pair.target_width)
        heads = assign_heads(pair.source_heads, pair.target_heads)
        return Mapper(Method.HEAD_LOCAL, source, target, heads, maps, maps)


def _pages(tokens: int, layers: int, heads: int, width: int) -> list[KvPage]:
    """Memory of its own for every page; drawing all numbers anew would take most of the time."""
    drawn = _random(layers, min(_PAGE, tokens), heads, width)
    counts = [min(_PAGE, tokens - start) for start in range(0, tokens, _PAGE)]
    return [KvPage(drawn[:, :count].clone(), drawn[:, :count].clone()) for count in counts]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _alternately(
    first: Callable[[], None], second: Callable[[], None]
) -> list[tuple[float, float]]:
    """Seconds of both, time after time, after a first time that does not count."""
    first()
    second()
    pairs: list[tuple[float, float]] = []
    while not pairs or (len(pairs) < _REPEATS and sum(map(sum, pairs)) < _ENOUGH):
        pairs.append((_seconds(first), _seconds(second)))
    return pairs


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _describe(layers: int, heads: int, width: int) -> ModelDescription:
    frequencies = tuple((1e6 ** -(torch.arange(0, width, 2) / width)).tolist())
    return ModelDescription(
        name="shape",
        model_type="shape",
        layers=layers,
        query_heads=heads,
        kv_heads=heads,
        key_dim=width,
        value_dim=width,
        hidden_size=heads * width,
        vocab_size=0,
        max_positions=0,
        parameters=0,
        dtype="bfloat16",
        rope=RopeSpec("default", width, width, frequencies, 1.0, False),
        tokenizer_digest="",
        weights_digest="",
        attention=AttentionKind.FULL,
        refusal=None,
    )
