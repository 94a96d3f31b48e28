"""A remembered model says what the model says, and runs it once."""

from types import SimpleNamespace

import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvxfer_transformers.remembered import RememberedModel

TOKENS, TAIL = tuple(range(40, 60)), tuple(range(70, 76))


@pytest.fixture
def counted(family_models):
    """The small model, and how often each of its functions was called."""
    model, calls = family_models.source, []

    def count(name):
        def call(*arguments):
            calls.append(name)
            return getattr(model, name)(*arguments)

        return call

    names = ("capture", "sensitivity", "read_after", "attention_after", "capture_queries")
    facts = {"description": model.description, "dtype": model.dtype, "device": model.device}
    return SimpleNamespace(**{name: count(name) for name in names}, **facts), calls


def test_what_was_asked_once_is_not_run_again(family_models, counted, tmp_path):
    model, calls = counted
    for _ in range(2):
        remembered = RememberedModel(model, tmp_path)  # also by another object
        page = remembered.capture(TOKENS)
        said = remembered.read_after(page, TAIL)
        alone = remembered.read_after(None, TAIL)
        attention = remembered.attention_after(page, TAIL)
        gradients = remembered.sensitivity(TOKENS, 3)
    expected = ["capture", "read_after", "read_after", "attention_after", "sensitivity"]
    assert calls == expected
    own = family_models.source.capture(TOKENS)
    assert torch.equal(page.keys, own.keys)
    assert torch.equal(page.values, own.values)
    assert torch.equal(said, family_models.source.read_after(own, TAIL))
    assert torch.equal(alone, family_models.source.read_after(None, TAIL))
    assert torch.equal(attention, family_models.source.attention_after(own, TAIL))
    assert torch.equal(gradients.keys, family_models.source.sensitivity(TOKENS, 3).keys)


def test_other_questions_have_other_answers(counted, tmp_path):
    model, calls = counted
    remembered = RememberedModel(model, tmp_path)
    page = remembered.capture(TOKENS)
    remembered.capture(TOKENS[:-1])
    remembered.sensitivity(TOKENS, 1)
    remembered.sensitivity(TOKENS, 2)
    remembered.read_after(page, TAIL)
    remembered.read_after(page, TAIL[:-1])
    converted = KvPage(page.keys * 2, page.values)
    first, second = (remembered.read_after(converted, TAIL) for _ in range(2))
    assert torch.equal(first, second)
    assert calls == ["capture"] * 2 + ["sensitivity"] * 2 + ["read_after"] * 4
    remembered.forget_reads()
    remembered.read_after(page, TAIL)
    assert calls[-1] == "read_after"
    assert len(calls) == 9
