"""Prints the table of docs/fidelity.md for real released weights, every ordered pair.

python tests/bench/bench_real.py [FOLDER]    # FOLDER as tests/bench/smol.py builds it (.real)

Prefix 192 tokens, the next 64 read natively, passages of documents that no fit has seen; float32.
Fitting is minutes to an hour a pair on two cores: models of this size prefill 450 tokens a second.
"""

import argparse
from itertools import permutations
from pathlib import Path

from bench_fidelity import ARMS, FAMILY, measured, row

MODELS = ("base", "pruned", "tuned")
METHODS = {
    "head-local, k = 6": ("--method", "head-local", "--layers", "6"),
    "full-head, k = 2": ("--method", "full-head", "--layers", "2"),
    "low-rank, k = 8": ("--method", "low-rank", "--layers", "8"),
}
SAME_GEOMETRY = {"residual": ("--method", "residual")}


def table(folder: Path, source: str, target: str, sequences: int) -> None:
    print(f"\n{source} -> {target}\n")
    print("| cache of the prefix | parameters | loss | KL | top-1 |\n|---|---|---|---|---|")
    fine_tune = "pruned" not in (source, target)
    for number, (name, options) in enumerate(
        {**METHODS, **(SAME_GEOMETRY if fine_tune else {})}.items()
    ):
        size = ("--sequences", str(sequences), "--sequence-tokens", "256")
        fitted, record = measured(
            str(folder / source), str(folder / target), FAMILY / "text", (*options, *size)
        )
        if not number:
            print(row("target's own", "", record["arms"]["native"]))
            for arm, title in ARMS:
                print(row(title, "", record["arms"][arm]))
        title = f"{name}: {record['verdict']}"
        print(row(title, f"{fitted['parameters']:,}", record["arms"]["mapped"]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".real"))
    parser.add_argument("--sequences", type=int, default=160)
    parser.add_argument("--source", choices=MODELS)
    parser.add_argument("--target", choices=MODELS)
    chosen = parser.parse_args()
    for source, target in permutations(MODELS, 2):
        if chosen.source in (None, source) and chosen.target in (None, target):
            table(chosen.folder, source, target, chosen.sequences)
