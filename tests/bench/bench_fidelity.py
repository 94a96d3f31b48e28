"""Prints the tables of docs/fidelity.md: every ordered pair and method on the shipped family.

python tests/bench/bench_fidelity.py [--source small --target large] [--only METHOD ...]
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from kvstore_xfer.cli.main import main

FAMILY = Path(__file__).parents[1] / "data" / "family"
ARMS = (("none", "no context"), ("source", "source alone"), ("wrong", "wrong document"))
# What each idea gave: name, options of `kvxfer fit`.
METHODS = {
    "head-local": ("--method", "head-local"),
    "head-local, attention weights": ("--method", "head-local", "--weights", "attention"),
    "full-head": ("--method", "full-head"),
    "low-rank": ("--method", "low-rank"),
    "low-rank, rank 230": ("--method", "low-rank", "--rank", "230"),
}


def run(*arguments: str) -> dict:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main([*arguments, "--dtype", "float32", "--json"])
    return json.loads(output.getvalue())


def row(name: str, parameters: str, arm: dict) -> str:
    cells = [f"{arm['loss']['mean']:.3f}"]
    for figure in ("kl", "top1"):
        digits = 4 if figure == "kl" else 3
        cells.append("{mean:.{d}f} [{low:.{d}f}, {high:.{d}f}]".format(d=digits, **arm[figure]))
    return f"| {name} | {parameters} | " + " | ".join(cells) + " |"


def measured(source: str, target: str, text: Path, options: tuple[str, ...]) -> tuple[dict, dict]:
    """What `fit` and `check` say of one mapper between two model folders."""
    with tempfile.TemporaryDirectory() as folder:
        calibration = ("--text", str(text / "calibration.jsonl"), "--out", folder)
        fitted = run("fit", "--source", source, "--target", target, *calibration, *options)
        return fitted, run("check", folder, "--text", str(text / "heldout.jsonl"))


def table(source: str, target: str, methods: list[str]) -> None:
    print(f"\n{source} -> {target}\n")
    print("| cache of the prefix | parameters | loss | KL | top-1 |\n|---|---|---|---|---|")
    size = ("--sequences", "300", "--sequence-tokens", "256")
    for number, name in enumerate(methods):
        models = (str(FAMILY / source), str(FAMILY / target))
        fitted, record = measured(*models, FAMILY / "text", (*METHODS[name], *size))
        if not number:
            print(row("target's own", "", record["arms"]["native"]))
            for arm, title in ARMS:
                print(row(title, "", record["arms"][arm]))
        title = f"{name}, k = {fitted['k']}: {record['verdict']}"
        print(row(title, f"{fitted['parameters']:,}", record["arms"]["mapped"]))
        gap = record["gap_recovered"]
        print(
            f"| | | retention {record['retention']['mean']:.4f} | gap recovered "
            f"{'not defined' if gap is None else format(gap['mean'], '.3f')} | |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", choices=("small", "large"))
    parser.add_argument("--target", choices=("small", "large"))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    chosen = parser.parse_args()
    for source, target in (("small", "large"), ("large", "small")):
        if chosen.source in (None, source) and chosen.target in (None, target):
            table(source, target, chosen.only)
