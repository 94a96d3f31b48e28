"""Prints the table of docs/eval.md: drift over ten hand-offs between the shipped models.

python tests/bench/bench_handoffs.py
"""

import tempfile
from pathlib import Path

import torch
from bench_fidelity import FAMILY

from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import fit
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.handoff import run_handoffs
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.mapper.maps import Method
from kvxfer_transformers.model import load_model
from kvxfer_transformers.remembered import RememberedModel

SEQUENCES, TOKENS, CONVERSATIONS, HANDOFFS, TURN = 300, 256, 24, 10, 23
METHODS = (Method.HEAD_LOCAL, Method.LOW_RANK)


def fitted(source, target, method: Method):
    text = FAMILY / "text" / "calibration.jsonl"
    sequences = cut_sequences(text, source.tokenize, tokens=TOKENS, count=SEQUENCES)
    with tempfile.TemporaryDirectory() as folder:
        made = fit(source.side, target.side, sequences, Path(folder), FitOptions(method))
    return make_converter(made.mapper, torch.float32, "cpu")


def rows(method: Method, names, models, converters, passages) -> None:
    for drift in run_handoffs(models, converters, passages, TURN):
        cells = (
            "{mean:.4f} [{low:.4f}, {high:.4f}]".format(**cell)
            for cell in (drift.kl, drift.top1, drift.excess_loss)
        )
        speaker = names[drift.handoffs % 2]
        print(
            f"| {method.value} | {drift.handoffs} | {speaker} | {' | '.join(cells)} |", flush=True
        )


def main() -> None:
    torch.set_num_threads(1)
    small, large = (load_model(FAMILY / n, dtype=torch.float32) for n in ("small", "large"))
    held_out = FAMILY / "text" / "heldout.jsonl"
    passages = cut_sequences(
        held_out, small.tokenize, tokens=TURN * (HANDOFFS + 1), count=CONVERSATIONS
    )
    with tempfile.TemporaryDirectory() as kept:
        remembered = [
            RememberedModel(model, Path(kept) / name)
            for name, model in (("small", small), ("large", large))
        ]
        up = {method: fitted(*remembered, method) for method in METHODS}
        down = {method: fitted(*remembered[::-1], method) for method in METHODS}
    for names, models in (
        (("small", "large"), (small, large)),
        (("large", "small"), (large, small)),
    ):
        print(f"\n{names[0]} begins, {TURN} tokens a turn\n")
        print("| method | hand-offs | speaker | KL | top-1 | loss over own cache |")
        print("|---|---|---|---|---|---|")
        for method in METHODS:
            there, back = (up, down) if names[0] == "small" else (down, up)
            rows(method, names, models, (there[method], back[method]), passages)


if __name__ == "__main__":
    main()
