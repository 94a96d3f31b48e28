"""Near-copies are found though no document is the same, and ordinary text is not taken for one."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_xfer.fit import overlap
from kvstore_xfer.fit.overlap import NGRAM, repeats, sketch
from kvstore_xfer.fit.text import cut_sequences


@pytest.fixture
def draw():
    return random.Random(1)


def text(draw, tokens=256):
    return [draw.randrange(50_000) for _ in range(tokens)]


_WORDS = st.lists(st.integers(0, 99_999), min_size=NGRAM + 1, max_size=60, unique=True)


@given(st.integers(0, 40), _WORDS)
def test_any_part_of_what_was_fitted_is_found(cut, tokens):
    part = tokens[min(cut, len(tokens) - NGRAM - 1) :]
    assert repeats(part, sketch([tokens]))


def test_a_copy_with_changed_words_is_found(draw):
    seen = [text(draw) for _ in range(8)]
    changed = list(seen[3])
    for at in range(20, 256, 40):
        changed[at] = 7
    assert repeats(changed[5:], sketch(seen))


def test_other_text_with_a_common_phrase_is_not(draw):
    phrase = text(draw, 40)
    seen = [text(draw) + phrase for _ in range(8)]
    assert not repeats(text(draw) + phrase, sketch(seen))


def test_a_sketch_of_much_text_still_finds_its_parts(draw, monkeypatch):
    monkeypatch.setattr(overlap, "_KEPT", 512)
    seen = [text(draw) for _ in range(64)]
    kept = sketch(seen)
    assert sum(repeats(passage, kept) for passage in seen) > 0.9 * len(seen)
    assert not any(repeats(text(draw), kept) for _ in range(64))


def test_texts_shorter_than_an_n_gram_say_nothing(draw):
    assert not repeats(text(draw, NGRAM - 1), sketch([text(draw, NGRAM - 1)]))
    assert not repeats(text(draw), sketch([]))


def test_the_shipped_texts_do_not_repeat_each_other(family_models):
    f = family_models
    seen, held_out = (
        cut_sequences(file, f.source.tokenize, tokens=256, count=count)
        for file, count in ((f.calibration, 300), (f.heldout, 60))
    )
    kept = sketch([sequence.tokens for sequence in seen])
    assert not any(repeats(passage.tokens, kept) for passage in held_out)
    assert len(kept) < 50_000
