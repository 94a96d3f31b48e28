"""The tokenizer digest changes with what ids mean, and with nothing else."""

from __future__ import annotations

import json

import pytest

from kvstore_xfer.errors import ModelError
from kvstore_xfer.models.tokenizer import tokenizer_digest


def digest_of(tmp_path, data, **other_files):
    folder = tmp_path / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    for name, content in other_files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return tokenizer_digest(folder)


def swap_ids(data):
    data["model"]["vocab"] |= {"a": 1, "b": 0}


def add_word(data):
    data["model"]["vocab"]["cab"] = 6


def reorder_merges(data):
    data["model"]["merges"].reverse()


def drop_merge(data):
    data["model"]["merges"].pop()


def move_added(data):
    data["added_tokens"][0]["id"] = 6


def rename_added(data):
    data["added_tokens"][0]["content"] = "<stop>"


def drop_added(data):
    data["added_tokens"].clear()


@pytest.mark.parametrize(
    "change",
    [swap_ids, add_word, reorder_merges, drop_merge, move_added, rename_added, drop_added],
)
def test_the_meaning_of_ids_changes_the_digest(tmp_path, tokenizer_json, change):
    before = digest_of(tmp_path, tokenizer_json)
    change(tokenizer_json)
    assert digest_of(tmp_path, tokenizer_json) != before


def other_order(data):
    data["model"]["vocab"] = dict(reversed(data["model"]["vocab"].items()))


def old_merges(data):
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]


def other_normalizer(data):
    data["normalizer"] = {"type": "NFC"}


def other_pre_tokenizer(data):
    data["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}


def other_template(data):
    data["post_processor"] = {"type": "ByteLevel"}
    data["padding"] = {"strategy": "BatchLongest"}


def other_flags(data):
    data["added_tokens"][0]["special"] = False


@pytest.mark.parametrize(
    "change",
    [other_order, old_merges, other_normalizer, other_pre_tokenizer, other_template, other_flags],
)
def test_what_leaves_ids_alone_leaves_the_digest_alone(tmp_path, tokenizer_json, change):
    before = digest_of(tmp_path, tokenizer_json)
    change(tokenizer_json)
    assert digest_of(tmp_path, tokenizer_json) == before


def test_a_chat_template_leaves_the_digest_alone(tmp_path, tokenizer_json):
    before = digest_of(tmp_path, tokenizer_json)
    settings = json.dumps({"chat_template": "{{ messages }}", "model_max_length": 7})
    after = digest_of(
        tmp_path, tokenizer_json, tokenizer_config__json=settings, chat_template__jinja="{{ m }}"
    )
    assert after == before


def test_tokens_that_transformers_adds_on_loading_count_as_added(tmp_path, tokenizer_json):
    before = digest_of(tmp_path, tokenizer_json)
    moved = tokenizer_json["added_tokens"].pop()
    settings = json.dumps({"added_tokens_decoder": {"5": moved}})
    assert digest_of(tmp_path, tokenizer_json, tokenizer_config__json=settings) == before


def test_unigram_pieces_and_scores_count(tmp_path, tokenizer_json):
    def digest(vocabulary):
        tokenizer_json["model"] = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary}
        return digest_of(tmp_path, tokenizer_json)

    plain = digest([["<unk>", 0.0], ["a", -1.5], ["b", -2.5]])
    assert digest([["<unk>", 0.0], ["b", -1.5], ["a", -2.5]]) != plain
    assert digest([["<unk>", 0.0], ["a", -1.25], ["b", -2.5]]) != plain
    assert digest([["<unk>", 0.0], ["a", -1.5], ["b", -2.5]]) == plain


def test_a_tokenizer_of_another_kind_is_read_through_transformers(tmp_path, tokenizer_json):
    """GPT-2's two files say the same as the tokenizer.json that transformers makes of them."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    tokenizer_json["model"]["vocab"] = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "<end>": 5}
    (folder / "vocab.json").write_text(json.dumps(tokenizer_json["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<end>")
    settings = {"tokenizer_class": "GPT2Tokenizer", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert tokenizer_digest(folder) == digest_of(tmp_path, tokenizer_json)


def test_a_tokenizer_that_cannot_be_read_is_told_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"cannot be read \(.*\); add the model's") as told:
        tokenizer_digest(tmp_path)
    assert "\n" not in str(told.value)
