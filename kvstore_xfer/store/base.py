"""The protocol that every store implements, and what its calls return.

Synchronous, batched and thread-safe. One unreadable block never fails a batch: each item has its
own result. `StoreError` is raised only by opening a store, `scan` and `stats`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from kvstore_xfer.blocks.header import BlockHeader


class ReadStatus(str, Enum):
    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"  # damaged bytes; the store has removed the block
    MISMATCH = "mismatch"  # intact, but its payload does not have the caller's size
    ERROR = "error"  # the store could not answer


class WriteStatus(str, Enum):
    STORED = "stored"
    EXISTS = "exists"  # a readable block is already there; nothing was changed
    FULL = "full"  # no room even after eviction, or the disk is full
    ERROR = "error"


@dataclass(frozen=True)
class ReadRequest:
    """`destination`: byte runs that together take exactly the payload; None asks for a copy.

    `touch` counts the read as a use, which protects the block from eviction.
    """

    key: str
    destination: Sequence[memoryview] | None = None
    touch: bool = True


@dataclass(frozen=True)
class ReadResult:
    """`header` is set when the status is OK or MISMATCH; `payload` only for copies."""

    status: ReadStatus
    header: BlockHeader | None = None
    payload: bytes | None = None


@dataclass(frozen=True)
class WriteRequest:
    """`header.key` is the key; the store fills in the checksum. `payload` is never kept."""

    header: BlockHeader
    payload: Sequence[memoryview]


@dataclass(frozen=True)
class BlockStat:
    """One row of a scan; times are Unix seconds, `size` counts the header.

    `created` is the header's; a store whose listing does not carry it says when it received the
    block.
    """

    key: str
    size: int
    created: float
    accessed: float


@dataclass(frozen=True)
class StoreStats:
    """`oldest_use`: when the least recently used block was last used, Unix seconds, if known."""

    blocks: int
    bytes: int
    capacity_bytes: int | None
    evicted_blocks: int
    corrupt_blocks: int
    oldest_use: float | None = None


class BlockStore(ABC):
    """Blocks by key. All methods may be called from several threads at once."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]:
        """One answer per key, from the index alone. Never raises: a failure is False."""

    @abstractmethod
    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Read into the callers' buffers and verify the checksum. Never raises.

        After any status but OK the content of the destination is undefined.
        """

    @abstractmethod
    def write(
        self, requests: Sequence[WriteRequest], *, overwrite: bool = False
    ) -> list[WriteStatus]:
        """Store whole blocks; a block is visible to readers entirely or not at all. Never raises.

        Without `overwrite` a readable block of the same key is kept and reported as EXISTS.
        """

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> list[bool]:
        """True for each block that was there and is gone. Never raises."""

    def pin(self, keys: Sequence[str], seconds: float) -> bool:
        """Keep these blocks from eviction for a while; never raises.

        False for a store on an engine, which evicts as it likes, and after a failure. A block that
        is being read is safe without it: a lost race is MISSING, never half a block.
        """
        del keys, seconds
        return False

    @abstractmethod
    def scan(self, prefix: str = "") -> Iterator[BlockStat]:
        """All blocks whose key starts with `prefix`, in key order.

        Raises StoreError when the index cannot be read: an empty answer would be a false one.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Totals of the whole store. Raises StoreError when they cannot be read."""

    def compact(self) -> tuple[int, int]:
        """Give back what bookkeeping takes too much; its bytes before and after.

        Raises StoreError. A store on an engine leaves that to the engine.
        """
        return 0, 0

    def repair(self) -> bool:
        """Bring bookkeeping and blocks together: index every intact block, drop rows without one.

        False for a store on an engine, which has no bookkeeping of its own. Raises StoreError.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Flush and release. Idempotent; using the store afterwards gives ERROR or False."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
