"""The header of a block: golden bytes, and no damage that goes unnoticed."""

import json
import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore_xfer.blocks.header import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    BlockHeader,
    Provenance,
    decode,
    encode,
    header_bytes,
    payload_checksum,
    seal,
)
from kvstore_xfer.errors import BlockFormatError

PAYLOAD = bytes(range(256))
HEADER = BlockHeader(
    key="v1/model/h0-1.l0-2/derived-9a/c0ffee",
    payload_bytes=256,
    tokens=4,
    layers=2,
    heads=1,
    key_dim=8,
    value_dim=8,
    dtype="bfloat16",
    first_token=64,
    provenance=Provenance("sibling", "9a"),
    created=1.5,
    checksum=payload_checksum([memoryview(PAYLOAD)]),
)
GOLDEN_TEXT = (
    b'{"checksum":"f1f8a93f50849ac39408a4433b952d71","created":1.5,"dtype":"bfloat16",'
    b'"first_token":64,"heads":1,"key":"v1/model/h0-1.l0-2/derived-9a/c0ffee","key_dim":8,'
    b'"layers":2,"payload_bytes":256,"provenance":{"mapper_digest":"9a",'
    b'"source_identity":"sibling"},"tokens":4,"value_dim":8}'
)


def raw_header(text, magic=b"KVXBLK01", length=None, checksum=None):
    length = len(text) if length is None else length
    checksum = xxhash.xxh3_64_intdigest(text) if checksum is None else checksum
    return struct.pack("<8sIQ", magic, length, checksum) + text


def with_field(**fields):
    return raw_header(json.dumps(json.loads(GOLDEN_TEXT) | fields).encode())


def test_golden_bytes():
    raw = encode(HEADER)
    assert raw[:12] == b"KVXBLK01" + struct.pack("<I", len(GOLDEN_TEXT))
    assert raw[12:20] == struct.pack("<Q", xxhash.xxh3_64_intdigest(GOLDEN_TEXT))
    assert raw[20 : 20 + len(GOLDEN_TEXT)] == GOLDEN_TEXT
    assert raw[20 + len(GOLDEN_TEXT) :] == bytes(ALIGNMENT - 20 - len(GOLDEN_TEXT))


def test_a_header_is_read_back():
    raw = encode(HEADER)
    assert decode(raw) == HEADER
    assert decode(memoryview(raw + PAYLOAD)) == HEADER
    assert header_bytes(raw[:20]) == len(raw) == ALIGNMENT
    assert HEADER.block_key.kind == "derived-9a"


def test_a_long_header_takes_more_than_one_page():
    header = replace(HEADER, dtype="x" * 5000)
    assert len(encode(header)) == header_bytes(encode(header)) == 2 * ALIGNMENT
    assert decode(encode(header)) == header


def test_a_seal_covers_all_runs_in_order():
    runs = [memoryview(PAYLOAD[:100]), memoryview(PAYLOAD[100:])]
    assert seal(replace(HEADER, checksum=""), runs) == HEADER
    assert payload_checksum(reversed(runs)) != HEADER.checksum
    assert payload_checksum([]) == xxhash.xxh3_128_hexdigest(b"")


def test_every_truncation_is_refused():
    raw = encode(HEADER)[: 20 + len(GOLDEN_TEXT)]
    assert decode(raw) == HEADER
    for length in range(len(raw)):
        with pytest.raises(BlockFormatError):
            decode(raw[:length])


def test_every_flipped_bit_is_refused():
    raw = bytearray(encode(HEADER)[: 20 + len(GOLDEN_TEXT)])
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlockFormatError):
            decode(raw)
        raw[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("length", [0, MAX_HEADER_BYTES + 1, 2**31, 2**32 - 1])
def test_an_impossible_length_is_refused_before_anything_is_read(length):
    raw = raw_header(GOLDEN_TEXT, length=length)
    for parse in (decode, header_bytes):
        with pytest.raises(BlockFormatError, match="impossible length"):
            parse(raw)


@pytest.mark.parametrize("length", [1, len(GOLDEN_TEXT) - 1, len(GOLDEN_TEXT) + 1])
def test_a_length_that_lies_is_refused(length):
    with pytest.raises(BlockFormatError, match="checksum"):
        decode(raw_header(GOLDEN_TEXT, length=length))


@pytest.mark.parametrize(
    "raw",
    [
        with_field(payload_bytes=-1),
        with_field(payload_bytes=1 << 40),
        with_field(payload_bytes=1.0),
        with_field(payload_bytes=True),
        with_field(tokens="4"),
        with_field(layers=None),
        with_field(key_dim=[8]),
        with_field(first_token=-1),
        with_field(first_token=0.5),
        with_field(key="../../etc/passwd"),
        with_field(key=7),
        with_field(dtype=None),
        with_field(checksum=1),
        with_field(created="yesterday"),
        with_field(created=None),
        with_field(created=10**400),
        with_field(created=float("nan")),
        with_field(unknown=1),
        with_field(provenance=1),
        with_field(provenance={"mapper_digest": "9a"}),
        with_field(provenance={"mapper_digest": "9a", "source_identity": 1}),
        raw_header(b"[]"),
        raw_header(b"null"),
        raw_header(b"{}"),
        raw_header(b'{"provenance":null}'),
        raw_header(b"\xff\xfe"),
        raw_header(b"[" * 60_000),
        raw_header(GOLDEN_TEXT, magic=b"KVXBLK02"),
    ],
)
def test_a_checksummed_lie_is_a_typed_error(raw):
    with pytest.raises(BlockFormatError):
        decode(raw)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_typed_error(noise):
    with pytest.raises(BlockFormatError):
        decode(noise)
    with pytest.raises(BlockFormatError):
        decode(raw_header(noise))
