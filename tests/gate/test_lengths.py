"""Other lengths than the calibration's: cutting them, leaving them out, judging them."""

from types import SimpleNamespace

import pytest

from kvstore_xfer.errors import TextError
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.lengths import Length, cut_lengths
from kvstore_xfer.gate.record import Thresholds

LIMITS = Thresholds(min_passages=4, min_documents=4)


def cut(f, **fields):
    given = {"prefix": 192, "tail": 64, "count": 8, "longest": 0, **fields}
    return {length.name: length for length in cut_lengths(f.heldout, f.source.tokenize, **given)}


def test_lengths_are_multiples_of_the_calibration_length(family_models):
    lengths = cut(family_models)
    sizes = {name: (len(n.passages[0].tokens), n.prefix_tokens) for name, n in lengths.items()}
    assert sizes == {
        "calibration": (256, 192),
        "short": (112, 48),
        "double": (512, 448),
        "fourfold": (1024, 960),
    }
    assert list(cut(family_models, wanted=("calibration", "double"))) == ["calibration", "double"]


def test_what_the_models_cannot_read_is_left_out_and_what_the_text_lacks_is_asked_for(
    family_models, tmp_path
):
    lengths = cut(family_models, longest=512)
    assert lengths["fourfold"].skipped == "1024 tokens are more than the models' 512"
    assert not lengths["double"].skipped
    short = SimpleNamespace(source=family_models.source, heldout=tmp_path / "short.txt")
    short.heldout.write_text(family_models.heldout.read_text()[:1400])
    with pytest.raises(
        TextError, match=r"length '(double|fourfold)'; give longer documents, or leave it out"
    ):
        cut(short)


def test_every_length_is_measured_and_recorded(family_mapper):
    """The family cannot use more than 256 tokens: it reads better without the context there."""
    f = family_mapper
    lengths = cut(f, longest=512)
    first = lengths.pop("calibration")
    record = check(
        f.artifact,
        f.source,
        f.target,
        first.passages,
        192,
        lengths=list(lengths.values()),
        thresholds=LIMITS,
    )
    assert record.verdict == "accepted", record.reason
    short = record.lengths["short"]
    assert (short["prefix_tokens"], short["tail_tokens"], short["passages"]) == (48, 64, 8)
    assert set(short["arms"]) == {"native", "mapped", "wrong", "none", "source"}
    assert short["arms"]["mapped"]["kl"]["mean"] < short["arms"]["none"]["kl"]["mean"] / 3
    assert "reads better without these 448 tokens" in record.lengths["double"]["skipped"]
    assert "more than the models' 512" in record.lengths["fourfold"]["skipped"]
    assert record.longest_prefix_tokens == 192


def test_a_length_that_fails_is_named(family_mapper):
    f = family_mapper
    lengths = cut(f)
    short = Length("short", 48, lengths["short"].passages)
    strict = Thresholds(min_passages=4, min_documents=4, max_growth=1e-3)
    record = check(
        f.artifact,
        f.source,
        f.target,
        lengths["calibration"].passages,
        192,
        lengths=[short, Length("double", 200, lengths["calibration"].passages)],
        thresholds=strict,
    )
    assert (record.verdict, record.stage) == ("rejected", "lengths")
    assert record.reason.startswith("lengths.double.growth: KL is ")
    assert record.longest_prefix_tokens == 192
