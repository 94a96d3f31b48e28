"""Block keys: injective, and nothing but a key is one."""

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore_xfer.blocks.key import MAX_KEY_BYTES, NATIVE, BlockKey, Shard, derived_kind
from kvstore_xfer.errors import BlockFormatError

PARTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.=@+:-]{0,40}", fullmatch=True)
KEYS = st.builds(BlockKey, PARTS, PARTS, PARTS, PARTS)


def test_golden():
    shard = Shard(0, 8, 0, 40)
    key = BlockKey("q3-14b.0f", str(shard), derived_kind("9a"), "c0ffee")
    assert str(key) == "v1/q3-14b.0f/h0-8.l0-40/derived-9a/c0ffee"
    assert BlockKey.parse(str(key)) == key
    assert Shard.parse(key.shard) == shard


@given(KEYS)
def test_a_key_is_read_back(key):
    assert BlockKey.parse(str(key)) == key


@given(KEYS, KEYS)
@example(BlockKey("a", "b", "c", "d-e"), BlockKey("a", "b", "c-d", "e"))
def test_two_keys_have_two_texts(first, second):
    assert (first == second) == (str(first) == str(second))


@given(KEYS, PARTS)
def test_a_derived_key_is_no_native_key(key, mapper):
    derived = BlockKey(key.identity, key.shard, derived_kind(mapper), key.chain_hash)
    native = BlockKey(key.identity, key.shard, NATIVE, key.chain_hash)
    assert str(derived) != str(native)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "v1",
        "v1/a/b/c",
        "v1/a/b/c/d/e",
        "v2/a/b/c/d",
        "v1//b/c/d",
        "v1/a/../c/d",
        "v1/a/b/c/.hidden",
        "v1/a/b/c/d\n",
        "v1/a/b/c/d\0",
        "v1/a/b/c/\u00e9",
        "v1/a/b/c/\u0663",
        "v1/a b/b/c/d",
        "/v1/a/b/c/d",
        "v1/a/b/c/" + "d" * MAX_KEY_BYTES,
    ],
)
def test_hostile_text_is_refused(text):
    with pytest.raises(BlockFormatError, match="block key"):
        BlockKey.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_a_key_or_a_typed_error(text):
    with contextlib.suppress(BlockFormatError):
        assert str(BlockKey.parse(text)) == text


@pytest.mark.parametrize("text", ["", "h0-8", "h0-8.l0", "h-1-8.l0-4", "h0-8.l0-4\n", "h0-8.l0-4x"])
def test_a_wrong_shard_is_refused(text):
    with pytest.raises(BlockFormatError, match="shard"):
        Shard.parse(text)
