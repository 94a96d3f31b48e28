"""Block keys: ``v1/<identity>/<shard>/<kind>/<hash>``.

A page hash covers token ids only, so it is the same for every model with the same tokenizer.
The identity in front of it keeps models apart; the kind keeps derived blocks out of the native
namespace, and blocks whose position is uncertain (`UNPLACED`) out of reach of conversion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvstore_xfer.errors import BlockFormatError

FORMAT = "v1"
NATIVE = "native"
UNPLACED = "unplaced"
RECORD = "record"
MAX_KEY_BYTES = 480  # below the smallest key limit of the stores (LMDB: 511)

_PART = r"[A-Za-z0-9][A-Za-z0-9_.=@+:-]*"
_KEY = re.compile(rf"{FORMAT}/({_PART})/({_PART})/({_PART})/({_PART})")


def derived_kind(mapper_digest: str) -> str:
    """The namespace of blocks made by one mapper."""
    return f"derived-{mapper_digest}"


@dataclass(frozen=True)
class Shard:
    """The KV heads and layers that one engine rank holds: half-open ranges of the whole model."""

    first_head: int
    last_head: int
    first_layer: int
    last_layer: int

    def __str__(self) -> str:
        return f"h{self.first_head}-{self.last_head}.l{self.first_layer}-{self.last_layer}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        match = re.fullmatch(r"h(\d+)-(\d+)\.l(\d+)-(\d+)", text)
        if match is None:
            raise BlockFormatError(f"shard {text!r}: expected h<first>-<last>.l<first>-<last>")
        return cls(*(int(number) for number in match.groups()))


def heads_of_rank(total: int, rank: int, size: int) -> tuple[int, int]:
    """The KV heads that one tensor-parallel rank holds, of `total`.

    With fewer heads than ranks, neighbouring ranks hold copies of the same head.
    """
    if size > total:
        first = rank // (size // total)
        return first, first + 1
    each = total // size
    return rank * each, (rank + 1) * each


@dataclass(frozen=True)
class BlockKey:
    """Where a block lives. `chain_hash` is the engine's page hash, salt included."""

    identity: str
    shard: str
    kind: str
    chain_hash: str

    def __str__(self) -> str:
        return f"{FORMAT}/{self.identity}/{self.shard}/{self.kind}/{self.chain_hash}"

    @classmethod
    def parse(cls, text: str) -> BlockKey:
        """Raises BlockFormatError when `text` is not a key of this format."""
        match = _match(text)
        if match is None:
            raise BlockFormatError(f"block key {text[:80]!r}: expected {FORMAT}/<identity>/...")
        return cls(*match.groups())


def is_key(text: str) -> bool:
    """Whether `BlockKey.parse` takes it."""
    return _match(text) is not None


def _match(text: str) -> re.Match[str] | None:
    return _KEY.fullmatch(text) if len(text) <= MAX_KEY_BYTES else None
