"""The gate on the trained pair: it lets the honest mapper through and nothing else."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvstore_xfer.errors import ModelError, TextError
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.record import GateRecord, Thresholds, refusal, subject
from kvstore_xfer.outcome import Reason

PREFIX = 192
SINCE_PROTOCOL_2 = {  # a record of protocol 1 did not name its protocol, nor hold these
    "protocol",
    "stage",
    "longest_prefix_tokens",
    "structure",
    "attention",
    "perplexity_ratio",
    "behind_both",
    "hold_back_tokens",
    "lengths",
    "tasks",
    "mapper_parameters",
}


def test_an_honest_mapper_is_accepted(family_mapper):
    record = family_mapper.record
    assert (record.verdict, record.reason) == ("accepted", "")
    assert record.identity_max_abs_diff == 0.0
    assert (record.passages, record.prefix_tokens, record.tail_tokens) == (20, PREFIX, 64)
    kl = {arm: cells["kl"]["mean"] for arm, cells in record.arms.items()}
    assert kl["native"] == kl["identity"] == 0
    assert 0 < kl["mapped"] < 0.04
    assert min(kl["wrong"], kl["none"], kl["source"]) > 2 * kl["mapped"]
    about = subject(family_mapper.artifact.mapper, "float32")
    assert {name: getattr(record, name) for name in about} == about
    assert record.attention["mean"]["low"] > 0.94
    assert len(record.attention["by_layer"]) == len(record.structure["r2"]["keys"]) == 9
    assert {len(row) for rows in record.structure["layer_r2"].values() for row in rows} == {6}
    assert record.longest_prefix_tokens == PREFIX


def test_the_models_must_be_those_of_the_mapper(family_mapper):
    """Not a verdict on the mapper: the caller keeps an earlier record."""
    f = family_mapper
    for source, target, role in ((f.target, f.source, "source"), (f.source, f.source, "target")):
        record = check(f.artifact, source, target, f.passages, PREFIX)
        assert (record.verdict, record.stage, record.concerns_mapper) == (
            "rejected",
            "models",
            False,
        )
        assert re.match(rf"models.{role}: .* not the {role} .*--{role}", record.reason)
    other = replace(f.target, model=SimpleNamespace(dtype=torch.bfloat16))
    with pytest.raises(ModelError, match="one dtype; give --dtype"):
        check(f.artifact, f.source, other, f.passages, PREFIX)


def test_text_of_the_fit_is_not_used(family_mapper):
    f = family_mapper
    for passages in (f.sequences, [*f.sequences, *f.passages[:3]]):
        record = check(f.artifact, f.source, f.target, passages, PREFIX)
        documents = len({p.document for p in passages})
        seen = len({p.document for p in f.sequences})
        assert (record.verdict, record.stage, record.concerns_mapper) == (
            "rejected",
            "held_out",
            False,
        )
        assert record.reason.startswith(
            f"held_out: {seen} of the text's {documents} documents were used in the fit"
        )
    few = [*f.sequences[:4], *f.passages[:16]]
    limits = Thresholds(min_documents=2)
    record = check(f.artifact, f.source, f.target, few, PREFIX, thresholds=limits)
    assert record.passages == 16


def test_too_little_or_too_long_text_decides_nothing(family_mapper):
    f = family_mapper
    with pytest.raises(
        TextError, match=r"15 passages of .* give more text, or smaller --prefix-tokens and"
    ):
        check(f.artifact, f.source, f.target, f.passages[:15], PREFIX)
    one = [p for p in f.passages if p.document == f.passages[0].document]
    limits = Thresholds(min_passages=1, min_documents=1)
    with pytest.raises(TextError, match=r"give text of more documents \(a \.txt is one\)"):
        check(f.artifact, f.source, f.target, one, PREFIX, thresholds=limits)
    long = [replace(p, tokens=p.tokens * 17) for p in f.passages]
    with pytest.raises(TextError, match=r"--max-tokens: .*longer than the models' 4096"):
        check(f.artifact, f.source, f.target, long, PREFIX)


def test_models_that_say_no_numbers_are_rejected(family_mapper):
    """Full of nan, both arms would agree everywhere."""
    f = family_mapper

    def read_after(page, tokens):
        return torch.full((len(tokens), 2048), torch.nan)

    broken = SimpleNamespace(
        description=f.target.description,
        dtype=torch.float32,
        capture=f.target.capture,
        read_after=read_after,
    )
    limits = Thresholds(min_passages=2, min_documents=2)
    record = check(f.artifact, f.source, broken, f.passages[:6], PREFIX, thresholds=limits)
    assert record.verdict == "rejected"
    assert record.reason == "logits: the native arm gave values that are not numbers"


def test_a_record_survives_json(family_mapper):
    record = family_mapper.record
    assert GateRecord.from_json(record.to_json()) == record
    assert GateRecord.from_json(family_mapper.artifact.gate["float32"]) == record
    with pytest.raises(TypeError):
        GateRecord.from_json({**record.to_json(), "surprise": 1})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"verdict": "rejected"}, Reason.GATE_REJECTED),
        ({"mapper_digest": "x"}, Reason.FINGERPRINT),
        ({"source_fingerprint": "x"}, Reason.FINGERPRINT),
        ({"target_fingerprint": "x"}, Reason.FINGERPRINT),
        ({"source_rope": "x"}, Reason.FINGERPRINT),
        ({"target_rope": "x"}, Reason.FINGERPRINT),
    ],
)
def test_each_refusal_has_its_reason(family_mapper, changes, reason):
    mapper, target = family_mapper.artifact.mapper, family_mapper.target.description
    assert refusal(replace(family_mapper.record, **changes), mapper, target) is reason
    assert refusal(None, mapper, target) is Reason.GATE_MISSING
    old = {k: v for k, v in family_mapper.record.to_json().items() if k not in SINCE_PROTOCOL_2}
    assert refusal(GateRecord.from_json(old), mapper, target) is Reason.GATE_OUTDATED
    updated = replace(target, weights_digest="x")
    assert refusal(family_mapper.record, mapper, updated) is Reason.FINGERPRINT
