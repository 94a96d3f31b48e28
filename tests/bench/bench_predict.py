"""Prints the table of docs/fidelity.md: the forecast beside the gate's verdict, for all pairs.

The bed is every ordered pair of the shipped small and large model, a fine-tune of small, an
unrelated model of the same tokenizer, large with scrambled tokens, and large untrained; with --real
the three models of tests/bench/smol.py.

    python tests/bench/bench_predict.py [--real FOLDER] [SOURCE:TARGET ...]

Without pairs every ordered one of the bed.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import torch
from models import FAMILY, fine_tune, from_scratch, scrambled, untrained

from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import fit
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.predict import LIKELY, methods_of, predict
from kvxfer_transformers.model import load_model
from kvxfer_transformers.remembered import RememberedModel

TOKENS, SEQUENCES, TRIAL, PASSAGES = 128, 120, 36, 20
PREFIX = TOKENS * 3 // 4


BED = {
    "small": lambda out: FAMILY / "small",
    "large": lambda out: FAMILY / "large",
    "tuned": lambda out: fine_tune(FAMILY / "small", out),
    "scrambled": lambda out: scrambled(FAMILY / "large", out),
    "untrained": lambda out: untrained(FAMILY / "large", out),
    "unrelated": lambda out: from_scratch(FAMILY / "small", out),
}
REAL = ("base", "pruned", "tuned")


def bed(names: list[str], real: Path | None, work: Path) -> dict:
    folders = {name: real / name if real else BED[name](work / name) for name in names}
    return {
        name: RememberedModel(load_model(folder, dtype=torch.float32), work / "said" / name)
        for name, folder in folders.items()
    }


def gate(source, target, passages, layers: dict, work: Path):
    """The records of real fits, smallest method first, up to the first that is accepted."""
    text = FAMILY / "text" / "calibration.jsonl"
    sequences = cut_sequences(text, source.tokenize, tokens=TOKENS, count=SEQUENCES)
    records = []
    for method in methods_of(source.description, target.description):
        options = FitOptions(method, layers.get(method.value), 1e-3)
        artifact = fit(source.side, target.side, sequences, work / "mapper", options)
        records.append((method.value, check(artifact, source, target, passages, PREFIX)))
        if records[-1][1].accepted:
            break
    return records


def row(names, models, passages, work: Path) -> bool:
    source, target = (models[name] for name in names)
    text = FAMILY / "text" / "calibration.jsonl"
    few = cut_sequences(text, source.tokenize, tokens=TOKENS, count=TRIAL)
    started = time.perf_counter()
    forecast = predict(source, target, few, planned=SEQUENCES, passages=PASSAGES)
    seconds = time.perf_counter() - started
    layers = {m.method: m.layers for m in forecast.methods}
    records = gate(source, target, passages, layers, work)
    method, last = records[-1]
    best = min(forecast.methods, key=lambda m: m.expected_kl, default=None)
    right = (forecast.verdict == LIKELY) == last.accepted
    said = f"{forecast.verdict}, {forecast.method}" if forecast.verdict == LIKELY else "unlikely"
    found = f"accepted, {method}" if last.accepted else f"rejected: {last.reason.split(':')[0]}"
    expected = "" if best is None else f"{best.expected_kl:.4f}"
    measured = f"{last.arms['mapped']['kl']['mean']:.4f}" if last.arms else ""
    print(
        f"| {names[0]} -> {names[1]} | {said} | {expected} | {found} | {measured} "
        f"| {'yes' if right else 'NO'} | {seconds:.0f} |",
        flush=True,
    )
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", metavar="SOURCE:TARGET")
    parser.add_argument("--real", type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    everything = itertools.permutations(REAL if chosen.real else BED, 2)
    pairs = [tuple(pair.split(":")) for pair in chosen.pairs] or list(everything)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        models = bed(
            list(dict.fromkeys(name for pair in pairs for name in pair)), chosen.real, work
        )
        passages = cut_sequences(
            FAMILY / "text" / "heldout.jsonl",
            next(iter(models.values())).tokenize,
            tokens=TOKENS,
            count=PASSAGES,
        )
        print("| pair | forecast | KL expected | gate | KL | right | s |")
        print("|---|---|---|---|---|---|---|", flush=True)
        right = sum(row(names, models, passages, work) for names in pairs)
    print(f"\n{right} of {len(pairs)} forecasts are the gate's verdict")


if __name__ == "__main__":
    main()
