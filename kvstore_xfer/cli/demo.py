"""`kvxfer demo`: the whole way on two models over an empty store, and a table of what happened."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.table import Table
from transformers import DynamicCache

from kvstore_xfer.blocks.chain import chain_hashes
from kvstore_xfer.cli.check import EXIT_REJECTED
from kvstore_xfer.cli.common import progress
from kvstore_xfer.cli.models import add_model_options, load_pair
from kvstore_xfer.cli.output import open_console
from kvstore_xfer.cli.show_record import print_record
from kvstore_xfer.errors import ConfigError, TextError
from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import Side, fit
from kvstore_xfer.fit.text import cut_sequences, read_documents
from kvstore_xfer.gate.check import check
from kvstore_xfer.mapper.artifact import record_gate
from kvstore_xfer.outcome import Outcome
from kvstore_xfer.tier.open import open_tier
from kvxfer_transformers.session import Session, engine_of, greedy

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from kvstore_xfer.gate.record import GateRecord
    from kvstore_xfer.tier.tier import Tier
    from kvxfer_transformers.model import LoadedModel

BLOCK_TOKENS = 16
SEQUENCE_TOKENS = 256
PREFIX_TOKENS = 2048
CONTINUED_TOKENS = 192  # within the context that the shipped models were trained on
NEW_TOKENS = 24
ROUNDS = 3
_MIN_DOCUMENTS = 8


@dataclass(frozen=True)
class Texts:
    """Two files of documents: to fit on, and held out."""

    calibration: Path
    held_out: Path


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="the whole way on two small models: fit, check, store, convert, decode",
        description=(
            "Fit and check a mapper, store the source's blocks in an empty store, and let the "
            "target ask for the same prompt twice. Without --models: on the two small models of "
            "the source tree."
        ),
    )
    parser.add_argument("--models", nargs=2, metavar=("S", "T"), help="source and target model")
    parser.add_argument(
        "--text", type=Path, help="documents for your own models (.jsonl, .parquet)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add_model_options(parser)
    # Not every CPU multiplies bf16 in hardware; a demo should not depend on it.
    parser.set_defaults(run=run, dtype="float32")


def run(options: argparse.Namespace) -> int:
    if (options.models is None) != (options.text is None):
        raise ConfigError("--models and --text go together: your own models need your own text")
    if options.json and not os.access(options.json.absolute().parent, os.W_OK):
        raise ConfigError(f"--json {options.json}: its folder cannot be written; give another")
    console = open_console()
    with tempfile.TemporaryDirectory(prefix="kvxfer-demo-") as folder:
        work = Path(folder)
        paths, texts = _inputs(options, work)
        source, target = load_pair(paths[0], paths[1], options)
        record = _fit_and_check(source, target, texts, work / "mapper")
        print_record(record, console)
        figures = _serve(source, target, texts, _manifest(work, paths))
    figures |= _gate_figures(record)
    _print(figures, console)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if record.accepted else EXIT_REJECTED


def _inputs(options: argparse.Namespace, work: Path) -> tuple[list[str], Texts]:
    if options.models is not None:
        return options.models, _split(options.text, work)
    family = Path(__file__).parents[2] / "tests" / "data" / "family"
    if not family.is_dir():
        raise ConfigError(
            "demo: the small models are part of the source tree, not of the package; "
            "run it in a clone or give --models S T --text FILE"
        )
    texts = Texts(family / "text" / "calibration.jsonl", family / "text" / "heldout.jsonl")
    return [str(family / "small"), str(family / "large")], texts


def _split(text: Path, work: Path) -> Texts:
    """Every fourth document is held out."""
    documents = list(read_documents(text))
    if len(documents) < _MIN_DOCUMENTS:
        raise TextError(
            f"{text}: {len(documents)} documents; the demo fits on some and checks on others, "
            f"give at least {_MIN_DOCUMENTS} (one JSON object with a text field per line)"
        )
    texts = Texts(work / "calibration.jsonl", work / "held_out.jsonl")
    for path, held in ((texts.calibration, False), (texts.held_out, True)):
        rows = [{"text": d} for i, d in enumerate(documents) if (i % 4 == 3) is held]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return texts


def _fit_and_check(
    source: LoadedModel, target: LoadedModel, texts: Texts, folder: Path
) -> GateRecord:
    sequences = cut_sequences(texts.calibration, source.tokenize, tokens=SEQUENCE_TOKENS, count=300)
    with progress("fitting the mapper") as update:
        artifact = fit(
            Side(source.description, source.capture),
            Side(target.description, target.capture),
            sequences,
            folder,
            FitOptions(),
            device=str(target.device),
            progress=update,
        )
    passages = cut_sequences(texts.held_out, target.tokenize, tokens=SEQUENCE_TOKENS, count=60)
    with progress("checking the mapper") as update:
        record = check(
            artifact, source, target, passages, SEQUENCE_TOKENS * 3 // 4, progress=update
        )
    record_gate(folder, record.dtype, record.to_json())
    return record


def _manifest(work: Path, paths: list[str]) -> Path:
    source, target = (str(Path(path).absolute()) if Path(path).is_dir() else path for path in paths)
    pair: dict[str, Any] = {"source": "source", "target": "target", "mapper": "mapper"}
    # What is timed is longer than these models can read: nothing is said of its quality.
    pair["policy"] = {"max_beyond_checked": 2.0 * PREFIX_TOKENS / CONTINUED_TOKENS}
    file = work / "family.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "family": "demo",
                "store": "local:store?min_free=0",
                "models": {"source": {"path": source}, "target": {"path": target}},
                "pairs": [pair],
            }
        ),
        encoding="utf-8",
    )
    return file


def _serve(
    source: LoadedModel, target: LoadedModel, texts: Texts, manifest: Path
) -> dict[str, Any]:
    """The source prefills and stores; the target asks, converts, decodes, and asks again."""
    prompt = _prompt(target, texts)
    # One tier after the other on one store: the source's process may be gone when the target asks.
    tier = open_tier(manifest, "source", engine_of(source, BLOCK_TOKENS))
    try:
        Session(source, tier).prefill(prompt)
        Session(source, tier).prefill(prompt[:CONTINUED_TOKENS])
    finally:
        tier.close()
    tier = open_tier(manifest, "target", engine_of(target, BLOCK_TOKENS))
    try:
        figures = _time_to_first_token(target, tier, prompt)
        return figures | _continuations(target, tier, prompt[: CONTINUED_TOKENS + 1])
    finally:
        tier.close()


def _prompt(model: LoadedModel, texts: Texts) -> list[int]:
    """A whole number of blocks of held-out text and half a block, which is always prefilled."""
    limit = model.description.max_positions or PREFIX_TOKENS + BLOCK_TOKENS
    wanted = min(PREFIX_TOKENS, limit - NEW_TOKENS - BLOCK_TOKENS)
    wanted = wanted // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS // 2
    tokens: list[int] = []
    for document in read_documents(texts.held_out):
        tokens += model.tokenize(document)
        if len(tokens) >= wanted:
            return tokens[:wanted]
    raise TextError(
        f"--text: the held-out documents have {len(tokens)} tokens, the demo's prompt takes "
        f"{wanted}; give more text"
    )


def _time_to_first_token(model: LoadedModel, tier: Tier, prompt: list[int]) -> dict[str, Any]:
    """Median of `ROUNDS` rounds each: natively, through conversion, from derived blocks."""
    session = Session(model, tier)
    times: dict[str, list[float]] = {"native": [], "converted": [], "derived": []}
    lookups: list[dict[str, int]] = []
    model.read(prompt, DynamicCache(), keep=1)  # the first pass of a process pays for set-up
    for _ in range(ROUNDS):
        started = time.perf_counter()
        model.read(prompt, DynamicCache(), keep=1)
        times["native"].append(time.perf_counter() - started)
        tier.clear()
        for what in ("converted", "derived"):
            prefill = session.prefill(prompt)
            tier.flush()
            times[what].append(prefill.seconds)
            lookups.append({outcome.value: prefill.tokens[outcome] for outcome in Outcome})
    hashes = chain_hashes(prompt, BLOCK_TOKENS)
    finds = []
    for _ in range(10 * ROUNDS):
        started = time.perf_counter()
        tier.find(hashes)
        finds.append(time.perf_counter() - started)
    medians = {f"ttft_{what}_s": statistics.median(row) for what, row in times.items()}
    facts = {"prompt_tokens": len(prompt), "blocks": len(hashes)}
    return {**facts, "lookups": lookups[:2], **medians, "find_s": statistics.median(finds)}


def _continuations(model: LoadedModel, tier: Tier, prompt: list[int]) -> dict[str, Any]:
    """The same prompt continued from the target's own cache and through the tier."""
    cache = DynamicCache()
    logits = model.read(prompt, cache, keep=1)[-1]
    native = greedy(model, cache, logits, NEW_TOKENS)
    converted, _ = Session(model, tier).generate(prompt, NEW_TOKENS)
    decode = model.tokenizer.decode
    return {
        "continuation_prompt": decode(prompt[-NEW_TOKENS:]),
        "continuation_native": decode(native),
        "continuation_converted": decode(converted),
    }


def _gate_figures(record: GateRecord) -> dict[str, Any]:
    mapped = record.arms.get("mapped", {})
    gap = record.gap_recovered
    return {
        "verdict": record.verdict,
        "retention": record.retention.get("mean"),
        "gap_recovered": None if gap is None else gap["mean"],
        "top1_agreement": mapped.get("top1", {}).get("mean"),
        "kl": mapped.get("kl", {}).get("mean"),
        "identity_max_abs_diff": record.identity_max_abs_diff,
    }


def _print(figures: dict[str, Any], console: Console) -> None:
    table = Table(
        "target asks", *(o.value for o in Outcome), "first token after", title="tokens by origin"
    )
    seconds = (figures["ttft_converted_s"], figures["ttft_derived_s"])
    for name, lookup, took in zip(("first", "again"), figures["lookups"], seconds, strict=True):
        table.add_row(name, *(f"{lookup[o.value]:,}" for o in Outcome), f"{took * 1e3:.0f} ms")
    native = figures["ttft_native_s"]
    table.add_row(
        "without the tier", *["-"] * 4, f"{figures['prompt_tokens']:,}", f"{native * 1e3:.0f} ms"
    )
    console.print(table)
    if not figures["lookups"][0]["converted"]:
        console.print("nothing was converted: the gate or the policy declined it")
        return
    console.print(
        f"first token {native / seconds[0]:.1f}x sooner through conversion, "
        f"{native / seconds[1]:.1f}x from derived blocks; finding {figures['blocks']} blocks took "
        f"{figures['find_s'] * 1e3:.2f} ms",
        highlight=False,
    )
    pair = Table(title=f"...{figures['continuation_prompt']}", title_justify="left")
    pair.add_column("target, own cache")
    pair.add_column("target, converted cache")
    pair.add_row(figures["continuation_native"], figures["continuation_converted"])
    console.print(pair)
    sys.stdout.flush()
