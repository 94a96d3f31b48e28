"""The forecast before a fit: right on the trained pair, and on pairs that cannot pass."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvstore_xfer.errors import TextError
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.predict import _failure, _Measured, methods_of, predict
from kvstore_xfer.gate.record import Thresholds


@pytest.fixture(scope="module")
def sequences(family_models):
    text, tokenize = family_models.calibration, family_models.source.tokenize
    return cut_sequences(text, tokenize, tokens=128, count=40)


def test_the_trained_pair_is_likely_to_pass(family_models, sequences):
    forecast = predict(family_models.source, family_models.target, sequences, planned=300)
    assert (forecast.verdict, forecast.reason) == ("likely", "")
    (method,) = forecast.methods  # a larger one need not be tried
    assert forecast.method == method.method == "head-local"
    assert method.kl / 2 <= method.expected_kl <= method.kl
    assert method.worst_cosine <= method.cosine < 1
    assert dict(forecast.controls).keys() == {"wrong", "none", "source"}


def test_a_target_that_shares_nothing_with_its_source_is_unlikely(family_models, sequences):
    """The same weights behind another numbering of the tokens: the caches have nothing in common
    that a linear map of few inputs could find."""
    target = family_models.target
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))

    def scrambled(tokens):
        return order[torch.tensor(list(tokens))].tolist()

    other = SimpleNamespace(
        description=target.description,
        dtype=target.dtype,
        capture=lambda tokens: target.capture(scrambled(tokens)),
        read_after=lambda page, tokens: target.read_after(page, scrambled(tokens)),
        attention_after=lambda page, tokens: target.attention_after(page, scrambled(tokens)),
    )
    forecast = predict(family_models.source, other, sequences)
    assert forecast.verdict == "unlikely"
    assert forecast.reason
    assert [method.method for method in forecast.methods] == ["head-local", "full-head"]


def test_what_no_fit_can_mend_is_said_at_once(family_models, sequences):
    stranger = replace(family_models.target.description, tokenizer_digest="another")
    forecast = predict(
        family_models.source, replace(family_models.target, description=stranger), sequences
    )
    assert (forecast.verdict, forecast.methods) == ("unlikely", ())
    assert forecast.reason.startswith("pair: ")


def test_a_fine_tune_is_tried_with_a_residual_first(family_models):
    small, large = family_models.source.description, family_models.target.description
    assert next(method.value for method in methods_of(small, small)) == "residual"
    assert [method.value for method in methods_of(small, large)] == ["head-local", "full-head"]


def test_too_little_text_is_asked_for(family_models, sequences):
    models = (family_models.source, family_models.target)
    with pytest.raises(TextError, match=r"a forecast needs 16 to fit on .* text of 8 documents"):
        predict(*models, sequences[:8])
    with pytest.raises(TextError, match=r"give more text, a larger --sequences or a smaller"):
        predict(*models, sequences[:20])


def measured(kl, cosine):
    def point(value):
        return {"mean": value, "low": value, "high": value}

    arms = {
        arm: {"loss": point(3.0), "kl": point(k), "top1": point(0.9)}
        for arm, k in (("native", 0.0), ("mapped", kl), ("wrong", 0.2), ("none", 0.2))
    }
    arms["source"] = arms["none"]
    shares = {arm: point(kl / 0.2) for arm in ("wrong", "none", "source")}
    figures = {"arms": arms, "kl_share": shares, "perplexity_ratio": point(1.0)}
    attention = {"worst_layer": 0, "mean": point(cosine), "by_layer": [point(cosine)]}
    return _Measured(1, 1, figures, attention, None)


@pytest.mark.parametrize(
    ("kl", "cosine", "scale", "reason"),
    [
        (0.05, 0.95, 1.0, ""),
        (0.12, 0.95, 1.0, "kl_share.wrong"),
        (0.12, 0.95, 0.6, ""),
        (0.05, 0.85, 1.0, "attention.mean"),
        (0.05, 0.85, 0.6, ""),
    ],
)
def test_what_a_real_fit_will_have_is_held_against_the_gates_thresholds(kl, cosine, scale, reason):
    found = _failure(measured(kl, cosine), scale, 1.0, Thresholds())
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_intervals_are_as_wide_as_the_gates_will_be():
    """A share of 0.25 that may be 0.75 after few passages, and 0.45 after six times as many."""
    few = measured(0.05, 0.99)
    few.figures["kl_share"]["none"]["high"] = 0.75
    assert _failure(few, 1.0, 1.0, Thresholds()).startswith("kl_share.none")
    assert _failure(few, 1.0, 0.4, Thresholds()) == ""
