"""What tests of several folders share: the trained family, and made-up models and pages."""

import os

# Triton reads it when it is imported, and transformers imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# Two small cores shared with other work: more threads than cores make every test wait.
torch.set_num_threads(1)

FAMILY = Path(__file__).parent / "data" / "family"


def _fail_if_skipped(report):
    """In CI everything a test needs is there: a skip hides a fault of the set-up."""
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _fail_if_skipped((yield))


@pytest.fixture(scope="session")
def make_description():
    """A made-up model: only geometry, RoPE and digests."""
    from kvstore_xfer.models.attention import AttentionKind
    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.rope.spec import RopeSpec

    def make(name="model", layers=2, kv_heads=2, key_dim=8, value_dim=None, **fields):
        half = key_dim // 2
        theta = fields.pop("theta", 10_000.0)
        frequencies = torch.tensor([theta ** (-i / half) for i in range(half)]).tolist()
        given = {
            "model_type": "llama",
            "query_heads": 2 * kv_heads,
            "hidden_size": 64,
            "vocab_size": 100,
            "max_positions": 4096,
            "parameters": 1000 * layers,
            "dtype": "float32",
            "rope": RopeSpec("default", key_dim, key_dim, tuple(frequencies), 1.0, False),
            "tokenizer_digest": "tokenizer",
            "weights_digest": f"weights-of-{name}",
            "attention": AttentionKind.FULL,
            "refusal": None,
        }
        return ModelDescription(
            name=name,
            layers=layers,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=key_dim if value_dim is None else value_dim,
            **{**given, **fields},
        )

    return make


@pytest.fixture(scope="session")
def random_page():
    """A page of random numbers with a model's geometry, the same for the same seed."""
    from kvstore_xfer.blocks.page import KvPage

    def make(model, tokens, seed, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        keys, values = (
            torch.randn(model.layers, tokens, model.kv_heads, width, generator=generator)
            for width in (model.key_dim, model.value_dim)
        )
        return KvPage(keys.to(dtype), values.to(dtype))

    return make


@pytest.fixture(scope="session")
def family_models(tmp_path_factory):
    """The trained pair in float32: `source` (small), `target` (large), and its texts."""
    from kvxfer_transformers.model import load_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVXFER_CACHE_DIR", str(tmp_path_factory.mktemp("digests")))
        source, target = (
            load_model(FAMILY / name, dtype=torch.float32) for name in ("small", "large")
        )
    return SimpleNamespace(
        source=source,
        target=target,
        calibration=FAMILY / "text" / "calibration.jsonl",
        heldout=FAMILY / "text" / "heldout.jsonl",
    )


@pytest.fixture(scope="session")
def family_mapper(family_models, tmp_path_factory):
    """A quickly fitted, accepted mapper of the pair: `folder`, `artifact`, `record`, `passages`."""
    from kvstore_xfer.fit.accumulate import FitOptions
    from kvstore_xfer.fit.run import Side, fit
    from kvstore_xfer.fit.text import cut_sequences
    from kvstore_xfer.gate.check import check
    from kvstore_xfer.mapper.artifact import load, record_gate

    source, target = family_models.source, family_models.target
    sequences = cut_sequences(family_models.calibration, source.tokenize, tokens=256, count=64)
    folder = tmp_path_factory.mktemp("family") / "mapper"
    sides = (Side(model.description, model.capture) for model in (source, target))
    fitted = fit(*sides, sequences, folder, FitOptions(layers=6, ridge=1e-3))
    passages = cut_sequences(family_models.heldout, source.tokenize, tokens=256, count=20)
    record = check(fitted, source, target, passages, 192)
    record_gate(folder, record.dtype, record.to_json())
    return SimpleNamespace(
        folder=folder,
        artifact=load(folder),
        record=record,
        passages=passages,
        sequences=sequences,
        **vars(family_models),
    )
