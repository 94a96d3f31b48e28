"""Prints quality by length, and the drift of a conversation handed back and forth.

python tests/bench/bench_drift.py

Drift: the two shipped models take turns, 16 tokens of the text each. At every hand-off the whole
cache so far goes to the other model through the mapper, as it is: a model's own tokens, and those
that were mapped to it before. (A tier does better: it keeps each model's own blocks and never maps
a derived one.) KL is against the reading model on its own cache of the same tokens.
Length: maps fitted on passages of 64 tokens, at prefixes of 24 to 192 tokens.
"""

import tempfile
from pathlib import Path

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import Side, fit
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.score import bootstrap, score_passage
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.mapper.maps import Method
from kvxfer_transformers.cache import cache_of_page, page_of_cache
from kvxfer_transformers.model import load_model

FAMILY = Path(__file__).parents[1] / "data" / "family"
TURNS, TURN, START = 10, 16, 64


def load() -> dict:
    return {n: load_model(FAMILY / n, dtype=torch.float32) for n in ("small", "large")}


def fitted(models: dict, source: str, target: str, tokens: int, count: int):
    """A low-rank converter, fitted on `count` passages of `tokens` tokens."""
    text = FAMILY / "text" / "calibration.jsonl"
    sequences = cut_sequences(text, models[source].tokenize, tokens=tokens, count=count)
    sides = [
        Side(m.description, m.capture, m.capture_queries, m.sensitivity)
        for m in (models[source], models[target])
    ]
    with tempfile.TemporaryDirectory() as folder:
        made = fit(*sides, sequences, Path(folder), FitOptions(Method.LOW_RANK))
    return make_converter(made.mapper, torch.float32, "cpu")


def converted(converter, page: KvPage, model) -> KvPage:
    about = model.description
    shape = (about.layers, page.keys.shape[1], about.kv_heads, about.key_dim)
    target = KvPage(torch.empty(shape), torch.empty(shape))
    converter.convert([page], [0], [target])
    return target


def passages(models: dict, tokens: int, count: int) -> list:
    text = FAMILY / "text" / "heldout.jsonl"
    return cut_sequences(text, models["small"].tokenize, tokens=tokens, count=count)


def interval(documents: list, figures: list) -> str:
    kl = bootstrap(documents, [(f,) for f in figures], lambda mean: float(mean[0]))
    return f"{kl.mean:.4f} [{kl.low:.4f}, {kl.high:.4f}]"


def score(model, page: KvPage | None, native: KvPage, tail: list) -> float:
    following = torch.tensor(tail[1:])
    own = model.read_after(native, tail)
    return score_passage(model.read_after(page, tail), own, following).kl


@torch.inference_mode()
def drift(models: dict, converters: dict, first: str, count: int) -> None:
    print(f"\nHand-offs, {first} model first\n")
    print("| hand-off | to | prefix | KL |\n|---|---|---|---|")
    table = [[] for _ in range(TURNS)]
    documents = []
    for passage in passages(models, START + (TURNS + 1) * TURN, count):
        tokens, documents = list(passage.tokens), [*documents, passage.document]
        now, held = first, START
        page = models[now].capture(tokens[:START])
        for turn in range(TURNS):
            source, now = now, "large" if now == "small" else "small"
            page = converted(converters[source, now], page, models[now])
            tail = tokens[held : held + TURN]
            table[turn].append(score(models[now], page, models[now].capture(tokens[:held]), tail))
            cache = cache_of_page(page)
            models[now].read(tail, cache)
            page, held = page_of_cache(cache), held + TURN
    for turn, figures in enumerate(table):
        to = ("large", "small")[(turn + (first == "large")) % 2]
        print(f"| {turn + 1} | {to} | {START + turn * TURN} | {interval(documents, figures)} |")


@torch.inference_mode()
def lengths(models: dict, converter, source: str, target: str, count: int) -> None:
    print(f"\n{source} -> {target}, fitted on passages of 64 tokens\n")
    print("| prefix | KL mapped | KL source alone | KL no context |\n|---|---|---|---|")
    for prefix in (24, 48, 64, 128, 192):
        mapped, alone, none, documents = [], [], [], []
        for passage in passages(models, 256, count):
            head, tail = passage.tokens[:prefix], list(passage.tokens[prefix : prefix + 64])
            cache, own = models[source].capture(head), models[target].capture(head)
            page = converted(converter, cache, models[target])
            native = models[target].read_after(own, tail)
            following = torch.tensor(tail[1:])
            answers = (
                models[target].read_after(page, tail),
                models[source].read_after(cache, tail),
                models[target].read_after(None, tail),
            )
            for figures, logits in zip((mapped, alone, none), answers, strict=True):
                figures.append(score_passage(logits, native, following).kl)
            documents.append(passage.document)
        cells = " | ".join(interval(documents, figures) for figures in (mapped, alone, none))
        print(f"| {prefix} | {cells} |", flush=True)


if __name__ == "__main__":
    loaded = load()
    pairs = (("small", "large"), ("large", "small"))
    for pair in pairs:
        lengths(loaded, fitted(loaded, *pair, 64, 1200), *pair, 60)
    both = {pair: fitted(loaded, *pair, 256, 300) for pair in pairs}
    for name in ("small", "large"):
        drift(loaded, both, name, 40)
