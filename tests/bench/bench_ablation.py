"""Prints what each idea gave, kept or dropped, on the shipped pair in both directions.

python tests/bench/bench_ablation.py [--sequences 150] [--passages 40]

As in bench_fidelity.py, 192 tokens from the cache and the next 64 read after them, but with fewer
calibration sequences. Both models run every text once.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from bench_fidelity import FAMILY
from second_round import SecondRound

from kvstore_xfer.fit import attention
from kvstore_xfer.fit.accumulate import Accumulator, FitOptions
from kvstore_xfer.fit.low_rank import LowRankAccumulator
from kvstore_xfer.fit.run import fit
from kvstore_xfer.fit.solve import r_squared, solve_ridge
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.arms import converted, run_arms
from kvstore_xfer.gate.score import bootstrap, score_passage
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method
from kvxfer_transformers.model import load_model
from kvxfer_transformers.remembered import RememberedModel

PREFIX, TAIL, HELD_BACK = 192, 64, 32
RIDGE = 1e-4


class Bench:
    """One ordered pair: fits on `sequences`, prints rows measured on `passages`."""

    def __init__(self, source, target, sequences, passages) -> None:
        self.source, self.target = source, target
        self._sequences, self._passages = sequences, passages

    def fitted(self, options: FitOptions) -> Mapper:
        with tempfile.TemporaryDirectory() as folder:
            sides = (self.source.side, self.target.side)
            return fit(*sides, self._sequences, Path(folder), options).mapper

    def accumulated(self, accumulator):
        for index, sequence in enumerate(self._sequences):
            pages = (model.capture(sequence.tokens) for model in (self.source, self.target))
            accumulator.add(index, *pages)
        return accumulator

    def show(self, name: str, mapper: Mapper, convert=None, parameters: int = 0) -> None:
        converter = convert or make_converter(mapper, torch.float32, "cpu")
        scores = run_arms(
            self.source, self.target, converter, self._passages, PREFIX, ("native", "mapped")
        )
        self.row(name, parameters or mapper.parameters, scores.scores["mapped"])

    def row(self, name: str, parameters: int, scores: list) -> None:
        documents = [passage.document for passage in self._passages]
        kl = bootstrap(documents, [[score.kl] for score in scores], lambda mean: float(mean[0]))
        print(
            f"| {name} | {parameters:,} | {kl.mean:.4f} [{kl.low:.4f}, {kl.high:.4f}] |", flush=True
        )

    def own_first(self, mapper: Mapper):
        """A converter that adds to position 0 the mean of what the maps miss there."""
        inner = make_converter(mapper, torch.float32, "cpu")
        missed = []
        for sequence in self._sequences[::2]:
            start = sequence.tokens[:8]
            page = converted(inner, self.source.capture(start), self.target.description)
            own = self.target.capture(start)
            missed.append((own.keys[:, 0] - page.keys[:, 0], own.values[:, 0] - page.values[:, 0]))
        keys, values = (torch.stack(parts).mean(0) for parts in zip(*missed, strict=True))

        def convert(sources, firsts, targets):
            inner.convert(sources, firsts, targets)
            for first, page in zip(firsts, targets, strict=True):
                if first == 0:
                    page.keys[:, 0] += keys
                    page.values[:, 0] += values

        return mock.Mock(convert=convert)

    def second_round(self, mapper: Mapper, model) -> SecondRound:
        accumulator = SecondRound(mapper, model, PREFIX)
        for sequence in self._sequences:
            accumulator.add(self.source.capture(sequence.tokens), sequence.tokens)
        return accumulator

    def held_back(self, name: str, mapper: Mapper, model) -> None:
        """The newest tokens of the prefix read natively after the mapped ones."""
        converter = make_converter(mapper, torch.float32, "cpu")
        scores = []
        for passage in self._passages:
            cut = PREFIX - HELD_BACK
            head, rest, tail = (
                passage.tokens[:cut],
                passage.tokens[cut:],
                passage.tokens[PREFIX:],
            )
            page = converted(converter, self.source.capture(head), model.description)
            native = self.target.read_after(self.target.capture(passage.tokens[:PREFIX]), tail)
            said = model.read_after(page, rest)[HELD_BACK:]
            scores.append(score_passage(said, native, torch.tensor(tail[1:])))
        self.row(name, mapper.parameters, scores)


def greedy(bench: Bench, count: int) -> tuple[Mapper, int]:
    """Every target head reads the `count` source heads, of any layer, that explain it best.

    As a full-head mapper whose other weights are zero; the number is that of the rest.
    """
    source, target = bench.source.description, bench.target.description
    full = Accumulator(source, target, FitOptions(Method.FULL_HEAD))
    moments = bench.accumulated(full).moments
    width, units = source.key_dim, source.layers * source.kv_heads
    every = tuple(range(source.layers))
    maps = []
    for name in ("keys", "values"):
        fitted, held_out = moments[f"{name}.fitted"], moments[f"{name}.held_out"]
        everything = fitted.plus(held_out)
        layers = []
        for layer in range(target.layers):
            weight = torch.zeros(units * width, target.kv_heads * width)
            bias = torch.zeros(target.kv_heads, width)
            for head in range(target.kv_heads):
                start = (layer * target.kv_heads + head) * width
                outputs = torch.arange(start, start + width)
                columns = _best(fitted, held_out, outputs, count, units, width)
                affine = solve_ridge(everything, columns, outputs, RIDGE)
                weight[columns, head * width : (head + 1) * width] = affine.weight[0].float()
                bias[head] = affine.bias[0].float()
            layers.append(LayerMap(every, weight, bias))
        maps.append(tuple(layers))
    heads = tuple(range(target.kv_heads))
    mapper = Mapper(Method.FULL_HEAD, source, target, heads, *maps)
    used = 2 * target.layers * target.kv_heads * (count * width + 1) * width
    return mapper, used


def _best(fitted, held_out, outputs, count: int, units: int, width: int) -> torch.Tensor:
    chosen: list[int] = []

    def columns(numbers: list[int]) -> torch.Tensor:
        return torch.cat([torch.arange(n * width, (n + 1) * width) for n in sorted(numbers)])

    for _ in range(count):
        tried = {
            unit: float(
                r_squared(
                    solve_ridge(fitted, columns([*chosen, unit]), outputs, RIDGE),
                    held_out,
                    columns([*chosen, unit]),
                    outputs,
                )
            )
            for unit in range(units)
            if unit not in chosen
        }
        chosen.append(max(tried, key=tried.__getitem__))
    return columns(chosen)


def table(bench: Bench, model) -> None:
    pair = (bench.source.description.name, bench.target.description.name)
    print(f"\n{Path(pair[0]).name} -> {Path(pair[1]).name}\n")
    print("| maps | parameters | KL |\n|---|---|---|", flush=True)
    plain, weighted = FitOptions(), FitOptions(weighted=True)
    low_rank = FitOptions(Method.LOW_RANK)
    bench.show("head-local, one ridge of 1e-3", bench.fitted(replace(plain, ridge=1e-3)))
    bench.show("head-local, ridge by layer and component", bench.fitted(plain))
    few = bench.fitted(replace(plain, layers=2))
    bench.show("head-local, k = 2", few)
    attended = bench.fitted(weighted)
    bench.show("head-local, attention weights", attended)
    with mock.patch.object(attention, "BOUNDARIES", 32):
        bench.show("the same, weights from 32 queries, not 128", bench.fitted(weighted))
    second = bench.second_round(attended, model)
    for strength in (1.0, 10.0, 100.0):
        name = f"the same, second round on attention outputs, {strength:g} : 1"
        bench.show(name, second.solve(strength))
    mapper, used = greedy(bench, bench.source.description.layers)
    bench.show("source heads picked for each head, greedily", mapper, parameters=used)
    bench.show("full-head", bench.fitted(FitOptions(Method.FULL_HEAD)))
    accumulator = LowRankAccumulator(bench.source.description, bench.target.description, low_rank)
    bench.show("low-rank, no sensitivity", bench.accumulated(accumulator).finish()[0])
    mapper = bench.fitted(low_rank)
    bench.show("low-rank", mapper)
    bench.show("the same, own bias at position 0", mapper, bench.own_first(mapper))
    bench.held_back(f"the same, newest {HELD_BACK} tokens native", mapper, model)
    bench.show(
        "low-rank, twice the rank", bench.fitted(replace(low_rank, rank=2 * accumulator.rank))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=150)
    parser.add_argument("--passages", type=int, default=40)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    calibration, held_out = (FAMILY / "text" / f"{n}.jsonl" for n in ("calibration", "heldout"))
    with tempfile.TemporaryDirectory() as kept:
        models = {n: load_model(FAMILY / n, dtype=torch.float32) for n in ("small", "large")}
        small, large = (RememberedModel(models[n], Path(kept) / n) for n in models)
        sequences, passages = (
            cut_sequences(file, small.tokenize, tokens=PREFIX + TAIL, count=count)
            for file, count in ((calibration, chosen.sequences), (held_out, chosen.passages))
        )
        table(Bench(small, large, sequences, passages), models["large"])
        table(Bench(large, small, sequences, passages), models["small"])


if __name__ == "__main__":
    main()
