"""The gate on the trained pair: it lets the honest mapper through and nothing else."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvstore_xfer.errors import ModelError, TextError
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.record import GateRecord, Thresholds, refusal, subject
from kvstore_xfer.outcome import Reason

PREFIX = 192


def zeroed(mapper):
    def nothing(layer):
        return replace(
            layer, weight=torch.zeros_like(layer.weight), bias=torch.zeros_like(layer.bias)
        )

    return replace(
        mapper, keys=tuple(map(nothing, mapper.keys)), values=tuple(map(nothing, mapper.values))
    )


def identity_like(mapper):
    """Every target layer takes the source layer at its relative place as it is."""
    width = mapper.target.key_dim

    def plain(index, layer):
        weight = torch.zeros_like(layer.weight)
        first = index * len(layer.source_layers) // mapper.target.layers * width
        weight[:, first : first + width] = torch.eye(width, dtype=weight.dtype)
        return replace(layer, weight=weight, bias=torch.zeros_like(layer.bias))

    return replace(
        mapper,
        keys=tuple(plain(n, layer) for n, layer in enumerate(mapper.keys)),
        values=tuple(plain(n, layer) for n, layer in enumerate(mapper.values)),
    )


SPOILED = {
    "layers in reverse": lambda m: replace(m, keys=m.keys[::-1], values=m.values[::-1]),
    "heads shifted by one": lambda m: replace(
        m, head_assignment=(*m.head_assignment[1:], m.head_assignment[0])
    ),
    "nothing": zeroed,
    "the sibling's cache as it is": identity_like,
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


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_mapper_is_rejected(family_mapper, name):
    artifact = replace(family_mapper.artifact, mapper=SPOILED[name](family_mapper.artifact.mapper))
    passages = family_mapper.passages[::2]
    limits = Thresholds(min_passages=8)
    record = check(
        artifact, family_mapper.source, family_mapper.target, passages, PREFIX, thresholds=limits
    )
    assert record.verdict == "rejected"
    assert record.reason.startswith(("kl_share.", "top1:"))


def test_the_models_must_be_those_of_the_mapper(family_mapper):
    f = family_mapper
    with pytest.raises(ModelError, match=r"not the source this mapper was fitted for .*--source"):
        check(f.artifact, f.target, f.source, f.passages, PREFIX)
    with pytest.raises(ModelError, match=r"not the target this mapper was fitted for .*--target"):
        check(f.artifact, f.source, f.source, f.passages, PREFIX)
    other = replace(f.target, model=SimpleNamespace(dtype=torch.bfloat16))
    with pytest.raises(ModelError, match="one dtype; give --dtype"):
        check(f.artifact, f.source, other, f.passages, PREFIX)


def test_text_of_the_fit_is_not_used(family_mapper):
    f = family_mapper
    with pytest.raises(TextError, match="every document was used in the fit"):
        check(f.artifact, f.source, f.target, f.sequences, PREFIX)
    with pytest.raises(TextError, match="3 passages of "):
        check(f.artifact, f.source, f.target, [*f.sequences, *f.passages[:3]], PREFIX)


def test_too_little_or_too_long_text_decides_nothing(family_mapper):
    f = family_mapper
    with pytest.raises(TextError, match=r"15 passages of .* give more text"):
        check(f.artifact, f.source, f.target, f.passages[:15], PREFIX)
    one = [p for p in f.passages if p.document == f.passages[0].document]
    limits = Thresholds(min_passages=1, min_documents=1)
    with pytest.raises(TextError, match="give more text"):
        check(f.artifact, f.source, f.target, one, PREFIX, thresholds=limits)
    long = [replace(p, tokens=p.tokens * 17) for p in f.passages]
    with pytest.raises(TextError, match="longer than the target's 4096"):
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
    updated = replace(target, weights_digest="x")
    assert refusal(family_mapper.record, mapper, updated) is Reason.FINGERPRINT
