"""Prints the tables of docs/fidelity.md for real released weights, every ordered pair.

    python tests/bench/bench_real.py [FOLDER]    # FOLDER as tests/bench/smol.py builds it (.real)

Fits on passages of 256 tokens, speeches and a share of short notes; checks with prefixes of 192, 48
and 960 tokens, the next 64 read natively, on documents that no fit has seen, and with questions
about facts in the prefix; float32. Every model runs every text once for all methods and pairs: two
hours on one idle core, and 15 GB under the folder of temporary files, or under --kept, which a
later run goes on from.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
from bench_fidelity import FAMILY
from facts import write_facts
from notes import write_notes

from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import fit
from kvstore_xfer.fit.text import cut_sequences, read_documents
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.decide import record_failure
from kvstore_xfer.gate.lengths import CALIBRATION, SHORT, cut_lengths
from kvstore_xfer.gate.record import GateRecord, Thresholds
from kvstore_xfer.gate.tasks import read_tasks
from kvstore_xfer.mapper.maps import Method
from kvxfer_transformers.model import load_model
from kvxfer_transformers.remembered import RememberedModel

MODELS = ("base", "pruned", "tuned")
PREFIX, TAIL = 192, 64
HEAD_LOCAL_LAYERS = 6
HEAD_LOCAL = f"head-local, k = {HEAD_LOCAL_LAYERS}"
SMALL = "head-local, k = 1"  # about as many parameters as residual
WEIGHTED = f"head-local, attention weights, k = {HEAD_LOCAL_LAYERS}"
FULL_HEAD = "full-head, k = 2"  # three heads each: as many parameters
WEIGHTED_FULL = "full-head, attention weights, k = 2"
WIDE = "full-head, k = 6"
LOW_RANK = "low-rank"
LARGE = "low-rank, four times the rank"
JOINT = "low-rank-residual, all layers"
RESIDUAL = "residual"
METHODS = (
    HEAD_LOCAL,
    FULL_HEAD,
    WIDE,
    LOW_RANK,
    SMALL,
    RESIDUAL,
    WEIGHTED,
    WEIGHTED_FULL,
    LARGE,
    JOINT,
)
# Everything is measured whatever it is; the verdict is asked for afterwards.
MEASURE = Thresholds(
    min_cosine=-1,
    min_layer_cosine=-1,
    max_kl_share=1e9,
    min_top1=0,
    max_perplexity_ratio=1e9,
    max_behind_both=1e9,
    max_growth=1e9,
    min_task_retention=-1e9,
)
LENGTHS = (CALIBRATION, SHORT, "fourfold")


def options(name: str, source: RememberedModel, target: RememberedModel) -> FitOptions:
    """Low-rank with as many parameters as head-local; `LARGE` with four times as many."""
    if name in (LOW_RANK, LARGE, JOINT):
        layers = source.description.layers
        width = source.description.kv_heads * 2 * source.description.key_dim
        outputs = target.description.layers * target.description.kv_heads * 2
        budget = outputs * target.description.key_dim**2 * HEAD_LOCAL_LAYERS
        rank = budget // (layers * width + outputs * target.description.key_dim)
        method = Method.LOW_RANK_RESIDUAL if name == JOINT else Method.LOW_RANK
        # Each ridge that is tried solves for 11,520 numbers anew.
        return FitOptions(method, layers, 1e-3, 4 * rank if name == LARGE else rank)
    return {
        HEAD_LOCAL: FitOptions(Method.HEAD_LOCAL, HEAD_LOCAL_LAYERS),
        WEIGHTED: FitOptions(Method.HEAD_LOCAL, HEAD_LOCAL_LAYERS, weighted=True),
        FULL_HEAD: FitOptions(Method.FULL_HEAD, 2),
        WEIGHTED_FULL: FitOptions(Method.FULL_HEAD, 2, weighted=True),
        SMALL: FitOptions(Method.HEAD_LOCAL, 1),
        WIDE: FitOptions(Method.FULL_HEAD, 6),
        RESIDUAL: FitOptions(Method.RESIDUAL),
    }[name]


@dataclass(frozen=True)
class Texts:
    """What to fit on, and what to check with: passages by length, and questions."""

    sequences: list
    checked: list
    tasks: list


def measure(
    name: str, source: RememberedModel, target: RememberedModel, text: Texts, holds: list[int]
) -> Iterator[tuple[str, GateRecord]]:
    """One fit, and a check of it for each number of tokens that are held back."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = options(name, source, target)
        fitted = fit(source.side, target.side, text.sequences, Path(folder), chosen)
    first, *more = text.checked
    about = {"lengths": more, "tasks": text.tasks, "thresholds": MEASURE}
    for hold in holds:
        title = f"{name}; {hold} held back" if hold else name
        yield title, check(fitted, source, target, first.passages, PREFIX, hold_back=hold, **about)


def interval(cell: dict | None, digits: int = 3) -> str:
    if cell is None:
        return "not defined"
    return "{mean:.{d}f} [{low:.{d}f}, {high:.{d}f}]".format(d=digits, **cell)


def text_row(name: str, arm: str, record: GateRecord) -> str:
    """One arm at all lengths."""
    here = {CALIBRATION: record.to_json(), **record.lengths}
    arms = {length: here[length]["arms"] for length in LENGTHS if "arms" in here[length]}
    kl = [interval(arms[length][arm]["kl"], 4) if length in arms else "" for length in LENGTHS]
    first, short = arms[CALIBRATION], arms[SHORT]
    loss = {which: short[which]["loss"]["mean"] for which in (arm, "native", "source")}
    behind = f"{loss[arm] - max(loss['native'], loss['source']):+.3f}"
    mapped = arm == "mapped"
    if mapped:
        behind += " [{low:+.3f}, {high:+.3f}]".format(**here[SHORT]["behind_both"])
    cells = [
        f"{record.mapper_parameters:,}" if mapped else "",
        kl[0],
        interval(first[arm]["top1"]),
        interval(record.retention) if mapped else "",
        interval(record.gap_recovered) if mapped else "",
        kl[1],
        behind,
        kl[2],
        (record_failure(record, Thresholds(), ()) or "accepted") if mapped else "",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def task_row(name: str, arm: str, record: GateRecord) -> str:
    figures = record.tasks
    ratios = ("retention", "floor_normalised", "gap_recovered")
    kept = [interval(figures[ratio], 2) if arm == "mapped" else "" for ratio in ratios]
    cells = [interval(figures["arms"][arm], 2), *kept]
    return f"| {name} | {' | '.join(cells)} |"


CONTROLS = {"none": "no context", "source": "source alone", "wrong": "wrong document, head-local"}


def table(
    names: tuple[str, str], models: dict, chosen: list[str], text: Texts, holds: list[int]
) -> None:
    source, target = (models[name] for name in names)
    print(f"\n{names[0]} -> {names[1]}\n")
    print(
        "| cache of the prefix | parameters | KL | top-1 | retention | gap recovered "
        "| KL, 48 tokens | behind both | KL, 960 tokens | gate |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    answers = []
    started = time.perf_counter()
    for name, record in (
        row for method in chosen for row in measure(method, source, target, text, holds)
    ):
        if not record.arms:
            print(f"| {name} | {record.reason} |", flush=True)
            continue
        if not answers:
            for arm, title in CONTROLS.items():
                print(text_row(title, arm, record))
            answers = [task_row("target's own", "native", record)]
            answers += [task_row(title, arm, record) for arm, title in CONTROLS.items()]
        print(text_row(name, "mapped", record), flush=True)
        answers.append(task_row(name, "mapped", record))
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        started = time.perf_counter()
    print("\n| questions | right | retention | floor-normalised | gap recovered |")
    print("|---|---|---|---|---|", *answers, sep="\n", flush=True)
    for model in (source, target):
        model.forget_reads()


def texts(tokenize, work: Path, sequences: int, notes: int, passages: int, questions: int) -> Texts:
    tokens, heldout = PREFIX + TAIL, FAMILY / "text" / "heldout.jsonl"
    calibration = FAMILY / "text" / "calibration.jsonl"
    sizes = {"prefix": PREFIX, "tail": TAIL, "count": passages, "longest": 0, "wanted": LENGTHS}
    write_facts(work / "facts.jsonl", list(read_documents(heldout)), questions)
    write_notes(work / "notes.jsonl", notes)
    return Texts(
        [
            *cut_sequences(calibration, tokenize, tokens=tokens, count=sequences),
            *cut_sequences(work / "notes.jsonl", tokenize, tokens=tokens, count=notes),
        ],
        cut_lengths(heldout, tokenize, **sizes),
        read_tasks(work / "facts.jsonl", tokenize),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".real"))
    parser.add_argument("--source", choices=MODELS)
    parser.add_argument("--target", choices=MODELS)
    parser.add_argument("--only", nargs="+", choices=METHODS)
    parser.add_argument("--sequences", type=int, default=160, help="speeches to fit on")
    parser.add_argument("--notes", type=int, default=48, help="and notes (notes.py)")
    parser.add_argument("--passages", type=int, default=16)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument(
        "--hold-back", type=int, nargs="+", default=[0], help="newest tokens, native"
    )
    parser.add_argument("--kept", type=Path, help="where to keep what the models said")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        work, kept = Path(temporary), chosen.kept or Path(temporary)
        models = {
            name: RememberedModel(
                load_model(chosen.folder / name, dtype=torch.float32), kept / name
            )
            for name in MODELS
        }
        sizes = (chosen.sequences, chosen.notes, chosen.passages, chosen.questions)
        text = texts(models["base"].tokenize, work, *sizes)
        for pair in PAIRS:
            if chosen.source in (None, pair[0]) and chosen.target in (None, pair[1]):
                table(pair, models, chosen.only or methods_of(pair), text, chosen.hold_back)


def methods_of(pair: tuple[str, str]) -> list[str]:
    fine_tune = () if "pruned" in pair else (SMALL, RESIDUAL, JOINT)
    return [HEAD_LOCAL, FULL_HEAD, WEIGHTED, *fine_tune]


# The pair of the target figure first.
PAIRS = sorted(permutations(MODELS, 2), key=lambda pair: pair != ("pruned", "base"))

if __name__ == "__main__":
    main()
