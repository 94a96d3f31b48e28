"""Prints the tables of docs/eval.md: drift over ten hand-offs between the shipped models.

python tests/bench/bench_handoffs.py
"""

import tempfile
from pathlib import Path

import torch

from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import Side, fit
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.handoff import run_handoffs
from kvstore_xfer.mapper.convert_select import make_converter
from kvxfer_transformers.model import load_model

FAMILY = Path(__file__).parents[1] / "data" / "family"
SEQUENCES, TOKENS, CONVERSATIONS, HANDOFFS, TURN = 300, 256, 24, 10, 23


def fitted(source, target, folder: Path):
    text = FAMILY / "text" / "calibration.jsonl"
    sequences = cut_sequences(text, source.tokenize, tokens=TOKENS, count=SEQUENCES)
    sides = (Side(model.description, model.capture) for model in (source, target))
    artifact = fit(*sides, sequences, folder, FitOptions(ridge=1e-3))
    return make_converter(artifact.mapper, torch.float32, "cpu")


def table(names, models, converters, passages) -> None:
    print(f"\n{names[0]} begins, {TURN} tokens a turn\n")
    print("| hand-offs | speaker | KL | top-1 | loss over own cache |\n|---|---|---|---|---|")
    for drift in run_handoffs(models, converters, passages, TURN):
        cells = (
            "{mean:.4f} [{low:.4f}, {high:.4f}]".format(**cell)
            for cell in (drift.kl, drift.top1, drift.excess_loss)
        )
        print(f"| {drift.handoffs} | {names[drift.handoffs % 2]} | {' | '.join(cells)} |")


def main() -> None:
    torch.set_num_threads(1)
    small, large = (load_model(FAMILY / n, dtype=torch.float32) for n in ("small", "large"))
    held_out = FAMILY / "text" / "heldout.jsonl"
    passages = cut_sequences(
        held_out, small.tokenize, tokens=TURN * (HANDOFFS + 1), count=CONVERSATIONS
    )
    with tempfile.TemporaryDirectory() as folder:
        up = fitted(small, large, Path(folder) / "up")
        down = fitted(large, small, Path(folder) / "down")
    table(("small", "large"), (small, large), (up, down), passages)
    table(("large", "small"), (large, small), (down, up), passages)


if __name__ == "__main__":
    main()
