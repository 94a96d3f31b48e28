"""Hand-offs back and forth between two models."""

from types import SimpleNamespace

import pytest
import torch

from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.handoff import run_handoffs


class Copying:
    """Converts by copying: exact between two runs of one model."""

    def convert(self, sources, first_tokens, targets):
        for source, target in zip(sources, targets, strict=True):
            target.copy_from(source)


class Forgetting:
    """Converts to zeros."""

    def convert(self, sources, first_tokens, targets):
        for target in targets:
            target.keys.zero_()
            target.values.zero_()


@pytest.fixture(scope="module")
def passages(family_models):
    tokenize = family_models.source.tokenize
    return cut_sequences(family_models.heldout, tokenize, tokens=96, count=6)


def test_a_model_that_talks_to_itself_does_not_drift(family_models, passages):
    models = (family_models.source, family_models.source)
    drifts = run_handoffs(models, (Copying(), Copying()), passages, 24)
    assert [drift.handoffs for drift in drifts] == [1, 2, 3]
    for drift in drifts:
        assert drift.kl["mean"] == pytest.approx(0, abs=1e-9)
        assert drift.top1["mean"] == 1.0
        assert abs(drift.excess_loss["mean"]) < 1e-5


def test_what_is_lost_at_a_hand_off_shows_in_the_turn_after_it(family_models, passages):
    models = (family_models.source, family_models.target)
    drifts = run_handoffs(models, (Forgetting(), Forgetting()), passages, 24)
    names = [model.description.name for model in models]
    assert [drift.speaker for drift in drifts] == [names[1], names[0], names[1]]
    assert min(drift.kl["mean"] for drift in drifts) > 0.05


def test_a_turn_is_converted_once_and_from_where_it_stands(family_models, passages):
    """Blocks that were converted are never the source of a conversion."""
    calls = []

    class Recording(Copying):
        def convert(self, sources, first_tokens, targets):
            calls.append((first_tokens, [page.keys.shape[1] for page in sources]))
            super().convert(sources, first_tokens, targets)

    models = (family_models.source, family_models.source)
    run_handoffs(models, (Recording(), Recording()), passages[:1], 24)
    assert calls == [([start], [24]) for start in (0, 24, 48, 72)]


def test_extending_a_cache_is_reading_on(family_models, passages):
    model, tokens = family_models.source, passages[0].tokens
    first, _ = model.extend(None, tokens[:40])
    added, logits = model.extend(first, tokens[40:])
    whole = model.capture(tokens)
    joined = torch.cat([first.keys, added.keys], 1)
    torch.testing.assert_close(joined, whole.keys, atol=1e-4, rtol=1e-4)
    page = SimpleNamespace(**vars(first))
    torch.testing.assert_close(logits, model.read_after(page, tokens[40:]))
