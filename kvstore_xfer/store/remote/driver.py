"""What an engine must be able to do to hold blocks, apart from everything they all share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore_xfer.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.store.base import BlockStat, WriteStatus


class RemoteError(StoreError):
    """The engine did not answer, or refused. Counts against its circuit breaker."""


class Frame(NamedTuple):
    """A block to be put, in memory of its own: `header` is padded, `payload` may be empty."""

    key: str
    header: bytes
    payload: bytes
    created: float

    @property
    def size(self) -> int:
        return len(self.header) + len(self.payload)


class Fetched(NamedTuple):
    """A stored block: the header lies in the first part. `version` changes with its content."""

    parts: list[memoryview]
    version: object


class Capacity(NamedTuple):
    """Bytes that the engine may hold, None when it sets no limit; blocks it has evicted."""

    bytes: int | None = None
    evicted: int = 0


class Driver(Protocol):
    """Batches of keys or frames; one answer an item, in order. Every call may raise RemoteError.

    Called from several threads at once, with keys that are valid block keys. A batch is shared
    among at most `parallel` threads: few where the driver sends its part in one exchange, many
    where every item is an exchange of its own.
    """

    @property
    def parallel(self) -> int: ...

    def exists(self, keys: Sequence[str]) -> list[bool]: ...

    def fetch(self, keys: Sequence[str]) -> list[Fetched | None]:
        """The stored bytes, None for a key that is not there."""

    def put(self, frames: Sequence[Frame], *, overwrite: bool) -> list[WriteStatus]:
        """Visible entirely or not at all. Without `overwrite` a present block is kept."""

    def remove(self, keys: Sequence[str]) -> list[bool]: ...

    def remove_version(self, key: str, version: object) -> None:
        """Remove a damaged block, unless somebody has replaced it meanwhile."""

    def scan(self, prefix: str) -> Iterator[BlockStat]:
        """In any order."""

    def capacity(self) -> Capacity: ...

    def close(self) -> None: ...
