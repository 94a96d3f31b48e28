"""Prints the table of docs/fidelity.md: every ordered pair and method on the shipped family.

python tests/bench/bench_fidelity.py
"""

import contextlib
import io
import json
import tempfile
from pathlib import Path

from kvstore_xfer.cli.main import main

FAMILY = Path(__file__).parents[1] / "data" / "family"
ARMS = (("none", "no context"), ("source", "source alone"), ("wrong", "wrong document"))


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


def table(source: str, target: str) -> None:
    print(f"\n{source} -> {target}\n")
    print("| cache of the prefix | parameters | loss | KL | top-1 |\n|---|---|---|---|---|")
    for method in ("head-local", "full-head"):
        with tempfile.TemporaryDirectory() as folder:
            models = ("--source", str(FAMILY / source), "--target", str(FAMILY / target))
            text = ("--text", str(FAMILY / "text" / "calibration.jsonl"), "--out", folder)
            size = ("--sequences", "300", "--sequence-tokens", "256", "--method", method)
            fitted = run("fit", *models, *text, *size)
            record = run("check", folder, "--text", str(FAMILY / "text" / "heldout.jsonl"))
        if method == "head-local":
            print(row("target's own", "", record["arms"]["native"]))
            for arm, name in ARMS:
                print(row(name, "", record["arms"][arm]))
        name = f"{method}, k = {fitted['k']}: {record['verdict']}"
        print(row(name, f"{fitted['parameters']:,}", record["arms"]["mapped"]))
        gap = record["gap_recovered"]
        print(
            f"| | | retention {record['retention']['mean']:.4f} | gap recovered "
            f"{'not defined' if gap is None else format(gap['mean'], '.3f')} | |"
        )


if __name__ == "__main__":
    table("small", "large")
    table("large", "small")
