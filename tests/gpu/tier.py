"""The tier end to end with a given converter: small model stored, large model served, in bf16."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import Side, fit
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.record import GateRecord, subject
from kvstore_xfer.mapper.artifact import load, record_gate
from kvstore_xfer.outcome import Outcome
from kvstore_xfer.tier.open import open_tier
from kvxfer_transformers.cache import page_of_cache
from kvxfer_transformers.model import load_model
from kvxfer_transformers.session import Session, engine_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.mapper.convert import Converter
    from kvstore_xfer.mapper.maps import Mapper

    MakeConverter = Callable[[Mapper, torch.dtype], Converter]

FAMILY = Path(__file__).parents[1] / "data" / "family"
BLOCK_TOKENS = 16
PREFIX_TOKENS = 160


class StoredPrefix:
    """A prompt whose blocks the small model has stored, for the large model to ask for.

    `mapper` is a folder with an accepted float32 record. The maps are the same in bf16, so that
    record is taken over: this is about how blocks are converted, not whether they should be.
    """

    def __init__(self, work: Path, mapper: Path, device: str) -> None:
        shutil.copytree(mapper, work / "mapper")
        artifact = load(work / "mapper")
        accepted = GateRecord.from_json(artifact.gate["float32"])
        about = subject(artifact.mapper, "bfloat16")
        record_gate(work / "mapper", "bfloat16", replace(accepted, **about).to_json())
        self._manifest = work / "family.yaml"
        self._manifest.write_text(
            'family: tiny\nstore: "local:store?min_free=0"\n'
            "models: {small: {path: small}, large: {path: large}}\n"
            "pairs: [{source: small, target: large, mapper: mapper}]\n"
        )
        self._large = load_model(FAMILY / "large", dtype=torch.bfloat16, device=device)
        small = load_model(FAMILY / "small", dtype=torch.bfloat16, device=device)
        text = FAMILY / "text" / "heldout.jsonl"
        passages = cut_sequences(text, small.tokenize, tokens=PREFIX_TOKENS + 8, count=1)
        self._prompt = list(next(iter(passages)).tokens)
        tier = open_tier(self._manifest, "small", engine_of(small, BLOCK_TOKENS))
        try:
            Session(small, tier).prefill(self._prompt)
        finally:
            tier.close()

    def served(self, make_converter: MakeConverter) -> KvPage:
        """The prefix as the large model gets it; AssertionError if any block was not converted."""
        engine = engine_of(self._large, BLOCK_TOKENS)
        tier = open_tier(self._manifest, "large", engine, make_converter=make_converter)
        try:
            prefill = Session(self._large, tier).prefill(self._prompt)
            tier.flush()
            tier.clear()  # or the next converter's turn would find these as derived blocks
        finally:
            tier.close()
        assert prefill.tokens[Outcome.CONVERTED] == PREFIX_TOKENS, prefill.tokens
        return page_of_cache(prefill.cache, 0, PREFIX_TOKENS)


def fit_mapper(folder: Path, device: str) -> Path:
    """A quickly fitted mapper of the trained pair with its float32 record."""
    source, target = (
        load_model(FAMILY / name, dtype=torch.float32, device=device) for name in ("small", "large")
    )
    text = FAMILY / "text"
    sequences = cut_sequences(text / "calibration.jsonl", source.tokenize, tokens=256, count=64)
    sides = (Side(model.description, model.capture) for model in (source, target))
    artifact = fit(*sides, sequences, folder, FitOptions(layers=6, ridge=1e-3), device=device)
    passages = cut_sequences(text / "heldout.jsonl", source.tokenize, tokens=256, count=20)
    record = check(artifact, source, target, passages, 192)
    record_gate(folder, record.dtype, record.to_json())
    return folder
