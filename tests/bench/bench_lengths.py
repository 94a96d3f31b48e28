"""Prints quality by length for maps fitted on passages of 64 tokens, on the shipped pair.

python tests/bench/bench_lengths.py

The target reads 64 tokens after prefixes of 32 to 192 tokens, so of 48 (as in the fit) to four
times that. "Behind both" is the mapped loss less that of the worse of the two models.
"""

import tempfile
from pathlib import Path

import torch
from bench_fidelity import FAMILY

from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import fit
from kvstore_xfer.fit.text import TokenSequence, cut_sequences
from kvstore_xfer.gate.arms import run_arms
from kvstore_xfer.gate.figures import arm_figures
from kvstore_xfer.gate.score import bootstrap
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.mapper.maps import Method
from kvxfer_transformers.model import load_model
from kvxfer_transformers.remembered import RememberedModel

PREFIXES, TAIL, FITTED = (32, 48, 64, 96, 192), 64, 64
SEQUENCES, PASSAGES = 1000, 60
METHODS = {
    "head-local": FitOptions(Method.HEAD_LOCAL),
    "head-local, attention weights": FitOptions(Method.HEAD_LOCAL, weighted=True),
    "low-rank": FitOptions(Method.LOW_RANK),
}
ARMS = ("native", "mapped", "wrong", "none", "source")


def cell(interval: dict, digits: int) -> str:
    return "{mean:.{d}f} [{low:.{d}f}, {high:.{d}f}]".format(d=digits, **interval)


def behind(scores) -> str:
    """Mapped loss over that of the worse model, with its interval."""
    arms = [[score.loss for score in scores.scores[a]] for a in ("mapped", "native", "source")]
    rows = list(zip(*arms, strict=True))
    return cell(vars(bootstrap(scores.documents, rows, lambda m: m[0] - max(m[1], m[2]))), 3)


def rows(name: str, source, target, converter, passages: list) -> None:
    first = None
    for prefix in PREFIXES:
        cut = [TokenSequence(p.document, p.tokens[: prefix + TAIL]) for p in passages]
        scores = run_arms(source, target, converter, cut, prefix, ARMS)
        arms = arm_figures(scores)["arms"]
        kl = arms["mapped"]["kl"]
        first = kl["mean"] if prefix == FITTED * 3 // 4 else first
        growth = "" if first is None else f"{kl['mean'] / first:.2f}"
        cells = [
            cell(kl, 4),
            growth,
            *(f"{arms[a]['loss']['mean']:.3f}" for a in ARMS),
            behind(scores),
        ]
        print(f"| {name} | {prefix} | {' | '.join(cells)} |", flush=True)


def table(source: RememberedModel, target: RememberedModel) -> None:
    print(f"\n{source.description.name} -> {target.description.name}\n".replace(str(FAMILY), ""))
    losses = " | ".join(f"loss {arm}" for arm in ARMS)
    print(f"| method | prefix | KL | over KL at 48 | {losses} | behind both |")
    print("|---" * (len(ARMS) + 5) + "|", flush=True)
    calibration, held_out = (FAMILY / "text" / f"{n}.jsonl" for n in ("calibration", "heldout"))
    sequences = cut_sequences(calibration, source.tokenize, tokens=FITTED, count=SEQUENCES)
    passages = cut_sequences(held_out, source.tokenize, tokens=PREFIXES[-1] + TAIL, count=PASSAGES)
    for name, options in METHODS.items():
        with tempfile.TemporaryDirectory() as folder:
            made = fit(source.side, target.side, sequences, Path(folder), options)
        converter = make_converter(made.mapper, torch.float32, "cpu")
        rows(name, source, target, converter, passages)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as kept:
        small, large = (
            RememberedModel(load_model(FAMILY / name, dtype=torch.float32), Path(kept) / name)
            for name in ("small", "large")
        )
        table(small, large)
        table(large, small)


if __name__ == "__main__":
    main()
