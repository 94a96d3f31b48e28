"""Documents and sequences from files; every file that cannot be used is named in one line."""

import json
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from kvstore_xfer.errors import TextError
from kvstore_xfer.fit.text import (
    cut_sequences,
    document_digest,
    read_documents,
    sequences_digest,
)

DOCUMENTS = ["one two three", "", "vier fünf\nsechs", "7"]


def tokenize(text):
    return [len(word) for word in text.split()]


@pytest.fixture
def write(tmp_path):
    def make(name, content):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return make


def lines(*documents):
    return "".join(json.dumps({"id": 1, "text": document}) + "\n" for document in documents)


def write_table(tmp_path, **columns):
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


def test_a_txt_file_is_one_document(write):
    assert list(read_documents(write("a.txt", DOCUMENTS[2]))) == [DOCUMENTS[2]]


def test_a_jsonl_file_has_one_document_a_line(write):
    text = lines(*DOCUMENTS).replace("\n", "\n\n")
    assert list(read_documents(write("a.jsonl", text))) == DOCUMENTS


def test_a_parquet_file_has_one_document_a_row(tmp_path):
    file = write_table(tmp_path, n=[1, 2, 3, 4], text=DOCUMENTS)
    assert list(read_documents(file)) == DOCUMENTS


def test_a_parquet_row_without_text_is_an_empty_document(tmp_path):
    file = write_table(tmp_path, text=["a", None, "b"])
    assert list(read_documents(file)) == ["a", "", "b"]


BAD = {
    "a.csv": ("x", r"a\.csv: unknown kind of text file; give one of \.txt, \.jsonl, \.parquet"),
    "a.txt": (b"\xff\xfe", r"a\.txt: not UTF-8 \(invalid start byte\); convert the file"),
    "b.jsonl": (lines("x") + "{", r'b\.jsonl:2: field "text": expected .*; correct the line'),
    "c.jsonl": ('{"txt": "x"}', r'c\.jsonl:1: field "text"'),
    "d.jsonl": ('\n{"text": 7}', r'd\.jsonl:2: field "text"'),
    "e.jsonl": ("[1]", r'e\.jsonl:1: field "text"'),
    "f.jsonl": ('{"text": "\\ud800"}', r'f\.jsonl:1: field "text"'),
    "g.jsonl": ("[" * 100_000, r'g\.jsonl:1: field "text"'),
    "h.jsonl": (b'{"text": "\xe9"}', r"h\.jsonl: not UTF-8"),
    "i.parquet": ("no parquet", r"i\.parquet: not a readable Parquet file \(.*; write it anew"),
    "j.parquet": ("", r"j\.parquet: not a readable Parquet file \("),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_named_in_one_line(write, name):
    content, message = BAD[name]
    with pytest.raises(TextError, match=message) as caught:
        list(read_documents(write(name, content)))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(TextError, match=r"no\.txt: No such file or directory; give a readable"):
        list(read_documents(tmp_path / "no.txt"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(TextError, match=r"folder\.jsonl: Is a directory"):
        list(read_documents(tmp_path / "folder.jsonl"))
    with pytest.raises(TextError, match=r"no\.parquet: No such file"):
        list(read_documents(tmp_path / "no.parquet"))


def test_a_parquet_file_without_the_column_is_named(tmp_path):
    with pytest.raises(TextError, match=r't\.parquet: no column "text"; rename'):
        list(read_documents(write_table(tmp_path, content=["x"])))
    with pytest.raises(TextError, match=r't\.parquet: column "text": holds no text'):
        list(read_documents(write_table(tmp_path, text=[1, 2])))


def test_without_pyarrow_the_remedy_is_named(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TextError, match=r"pip install 'kvstore-xfer\[parquet\]'"):
        list(read_documents(write("a.parquet", "x")))


def test_sequences_are_cut_without_overlap_or_padding(write):
    words = " ".join("x" * n for n in range(1, 8))
    cut = cut_sequences(write("a.txt", words), tokenize, tokens=3, count=10)
    assert [sequence.tokens for sequence in cut] == [(1, 2, 3), (4, 5, 6)]
    assert {sequence.document for sequence in cut} == {document_digest(words)}


def test_sequences_are_spread_over_what_was_read(write):
    documents = [" ".join(["x" * (10 * n + i) for i in range(1, 7)]) for n in range(4)]
    cut = cut_sequences(write("a.jsonl", lines(*documents)), tokenize, tokens=2, count=4)
    assert [sequence.tokens for sequence in cut] == [(1, 2), (11, 12), (21, 22), (31, 32)]


def test_reading_stops_when_there_is_enough(write):
    text = lines("a b", "c", "dd ee", "fff ggg") + "not json"
    cut = cut_sequences(write("a.jsonl", text), tokenize, tokens=2, count=3)
    assert [sequence.tokens for sequence in cut] == [(1, 1), (2, 2), (3, 3)]


def test_a_repeated_document_counts_once(write):
    text = lines("a b", "a b", "cc dd", "a b")
    cut = cut_sequences(write("a.jsonl", text), tokenize, tokens=2, count=10)
    assert [sequence.tokens for sequence in cut] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("content", ["", "\n\n", lines("", "  ")])
def test_an_empty_file_is_named(write, content):
    with pytest.raises(TextError, match=r"a\.jsonl: holds no text; give a file with"):
        cut_sequences(write("a.jsonl", content), tokenize, tokens=2, count=3)


def test_a_text_shorter_than_one_sequence_is_named(write):
    message = r"longest document has 3 tokens, one sequence takes 4; .*--sequence-tokens"
    with pytest.raises(TextError, match=message):
        cut_sequences(write("a.jsonl", lines("a b", "c d e")), tokenize, tokens=4, count=3)


def test_the_digest_depends_on_every_token_and_their_order(write):
    file = write("a.txt", "a bb ccc dddd")
    one, two = cut_sequences(file, tokenize, tokens=2, count=2)
    digests = {sequences_digest(part) for part in ([one, two], [two, one], [one], [one, one])}
    assert len(digests) == 4
