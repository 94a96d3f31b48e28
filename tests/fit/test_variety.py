"""Texts that teach nothing are told from texts that do, whatever their size and vocabulary."""

import random
from pathlib import Path

import pytest

from kvstore_xfer.fit.text import TokenSequence, cut_sequences
from kvstore_xfer.fit.variety import monotony

VOCABULARY = 2048
ROOT = Path(__file__).parents[2]


def cut(ids, tokens):
    starts = range(0, len(ids) - tokens + 1, tokens)
    return [TokenSequence("d", tuple(ids[start : start + tokens])) for start in starts]


@pytest.mark.parametrize(("tokens", "count"), [(32, 8), (64, 500), (256, 8), (256, 500)])
@pytest.mark.parametrize("split", ["calibration", "heldout"])
def test_prose_of_any_size_is_left_alone(family_models, split, tokens, count):
    file = getattr(family_models, split)
    sequences = cut_sequences(file, family_models.source.tokenize, tokens=tokens, count=count)
    assert monotony(sequences, VOCABULARY) == ""


def test_source_code_is_left_alone(family_models):
    """It repeats far more than prose does."""
    files = sorted((ROOT / "kvstore_xfer").rglob("*.py"))
    ids = family_models.source.tokenize("\n".join(file.read_text() for file in files))
    assert monotony(cut(ids, 256), VOCABULARY) == ""


def test_prose_in_bytes_is_left_alone(family_models):
    ids = list(family_models.calibration.read_bytes())
    assert monotony(cut(ids, 1024), 256) == ""


@pytest.mark.parametrize("tokens", [32, 1024])
def test_one_sentence_over_and_over(tokens):
    found = monotony(cut(list(range(10)) * 2000, tokens), VOCABULARY)
    assert found == "99.9% of its passages of 13 tokens repeat earlier ones"


def test_a_few_documents_over_and_over():
    ids = random.Random(0).choices(range(VOCABULARY), k=1000)
    assert "repeat earlier ones" in monotony(cut(ids * 10, 100), VOCABULARY)
    assert monotony(cut(ids * 2, 100), VOCABULARY) == ""


@pytest.mark.parametrize("count", [256, 20_000])
def test_few_words_in_ever_new_order(count):
    ids = random.Random(0).choices(range(5), k=count)
    found = monotony(cut(ids, 32), VOCABULARY)
    assert found == f"only 5 different tokens among its {count:,}"


def test_sequences_shorter_than_a_passage_have_none_that_repeat():
    ids = random.Random(0).choices(range(VOCABULARY), k=1000)
    assert monotony(cut(ids, 4), VOCABULARY) == ""
