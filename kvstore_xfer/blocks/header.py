"""The self-describing header in front of every payload, and the checksum over it.

Layout of a stored block, little-endian:

====== ============================================================
bytes  content
====== ============================================================
8      magic ``KVXBLK01``
4      length n of the header text
8      xxh3-64 of the header text
n      header text: UTF-8 JSON, the fields of `BlockHeader`
...    zero bytes up to a multiple of 4096
...    payload: keys ``[L, T, H, Dk]``, then values ``[L, T, H, Dv]``
====== ============================================================

Everything an index knows can be rebuilt from these bytes. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic_core import from_json

from kvstore_xfer.blocks.key import BlockKey, is_key
from kvstore_xfer.errors import BlockFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC = b"KVXBLK01"
ALIGNMENT = 4096
MAX_HEADER_BYTES = 64 * 1024
_LONGEST_ESCAPE = len(json.dumps("\U0001f600")) - 2  # of one character in JSON
_PREFIX = struct.Struct("<8sIQ")
_write_json = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


@dataclass(frozen=True)
class Provenance:
    """Where a derived block came from."""

    source_identity: str
    mapper_digest: str


@dataclass(frozen=True)
class BlockHeader:
    """Description of one block or record.

    `first_token` is the absolute position of the block's first token, None when it is not
    certain. `dtype` is torch's name without the prefix. A record has no shape (all zeros).
    """

    key: str
    payload_bytes: int
    tokens: int = 0
    layers: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    dtype: str = "uint8"
    first_token: int | None = None
    provenance: Provenance | None = None
    created: float = field(default_factory=time.time)
    checksum: str = ""

    @property
    def block_key(self) -> BlockKey:
        return BlockKey.parse(self.key)


_FIELDS = frozenset(item.name for item in fields(BlockHeader))


def payload_checksum(payload: Iterable[memoryview]) -> str:
    """xxh3-128 of the runs in order, as hex."""
    if isinstance(payload, list) and len(payload) == 1:
        return xxhash.xxh3_128_hexdigest(payload[0])  # faster in one call than in a stream
    digest = xxhash.xxh3_128()
    for run in payload:
        digest.update(run)
    return digest.hexdigest()


def seal(header: BlockHeader, payload: Iterable[memoryview]) -> BlockHeader:
    """The header with the checksum of its payload filled in."""
    return replace(header, checksum=payload_checksum(payload))


def encode(header: BlockHeader) -> bytes:
    """Header bytes, padded so that the payload starts on a 4096-byte boundary.

    Raises BlockFormatError when they would be too many.
    """
    values = vars(header) | {"provenance": header.provenance and vars(header.provenance)}
    text = _write_json(values).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise BlockFormatError(f"block header: impossible length {len(text)}")
    raw = _PREFIX.pack(MAGIC, len(text), xxhash.xxh3_64_intdigest(text)) + text
    return raw + bytes(-len(raw) % ALIGNMENT)


def header_bytes(first: bytes | memoryview) -> int:
    """Length of the padded header, told by its first 20 bytes.

    Raises BlockFormatError when they are not the start of a block.
    """
    return -(-(_PREFIX.size + _prefix(first)[0]) // ALIGNMENT) * ALIGNMENT


def without_padding(raw: bytes | bytearray) -> bytes:
    """What `decode` needs of header bytes.

    Raises BlockFormatError when they are not the start of a block.
    """
    return bytes(raw[: _PREFIX.size + _prefix(raw)[0]])


def decode(raw: bytes | bytearray | memoryview) -> BlockHeader:
    """Parse header bytes (padding and payload may follow).

    Raises BlockFormatError on anything but an intact header.
    """
    length, checksum = _prefix(raw)
    text = bytes(raw[_PREFIX.size : _PREFIX.size + length])
    if len(text) != length or xxhash.xxh3_64_intdigest(text) != checksum:
        raise BlockFormatError("block header: checksum does not match")
    try:
        values: dict[str, Any] = from_json(text)
        if values["provenance"] is not None:
            values["provenance"] = Provenance(**values["provenance"])
        header = _from_fields(values)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise BlockFormatError(f"block header: {error}") from None
    validate(header)
    return header


def _from_fields(values: dict[str, Any]) -> BlockHeader:
    if values.keys() != _FIELDS:
        return BlockHeader(**values)
    header = object.__new__(BlockHeader)
    vars(header).update(values)  # a frozen class's own constructor takes ten times as long
    return header


def _prefix(raw: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Length and checksum of the header text."""
    if len(raw) < _PREFIX.size:
        raise BlockFormatError("block header: truncated")
    magic, length, checksum = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise BlockFormatError("block header: not a block of this format (magic)")
    if not 0 < length <= MAX_HEADER_BYTES:
        raise BlockFormatError(f"block header: impossible length {length}")
    return length, checksum


def validate(header: BlockHeader) -> None:
    """Raises BlockFormatError when a field does not have its type or makes no sense."""
    counts = (
        header.payload_bytes,
        header.tokens,
        header.layers,
        header.heads,
        header.key_dim,
        header.value_dim,
    )
    for count in counts:
        if type(count) is not int or not 0 <= count < 1 << 40:
            raise BlockFormatError("block header: a size is not a sensible number")
    first = header.first_token
    if first is not None and (type(first) is not int or first < 0):
        raise BlockFormatError("block header: first_token is not a position")
    texts = [header.key, header.dtype, header.checksum]
    if header.provenance is not None:
        texts += [header.provenance.source_identity, header.provenance.mapper_digest]
    for text in texts:
        if not isinstance(text, str):
            raise BlockFormatError("block header: a name is not text")
    if type(header.created) not in (int, float) or not 0 <= header.created < 1 << 40:
        raise BlockFormatError("block header: created is not a time")
    if 2 * _LONGEST_ESCAPE * sum(map(len, texts)) > MAX_HEADER_BYTES:
        encode(header)  # refuses what does not fit; never needed for blocks of ours
    if not is_key(header.key):
        raise BlockFormatError(f"block header: {header.key[:80]!r} is not a block key")
