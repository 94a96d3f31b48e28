"""Which blocks there are, how old, and what is still to be removed: rows in LMDB.

========== =========================== ==============================================
database   key                         value
========== =========================== ==============================================
``blocks`` block key                   `Entry`, then xxh32 of key and entry
``recent`` rank, block key             empty; first row = least recently used
``trash``  payload name                size; out of the index, file to be removed
``meta``   ``totals``, ``walked``      `Totals`; boot id of the last full walk
========== =========================== ==============================================

A file is removed only after its row has moved to the trash, so a crash in between leaves neither
an entry without a file nor a file that nobody counts. LMDB's pages carry no checksum: rows carry
one, and `seal` guards the file as a whole while nobody has it open; `walk_index` and `check_index`
look at what a crash has left.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import xxhash

from kvstore_xfer.blocks.key import MAX_KEY_BYTES
from kvstore_xfer.store.local.environment import INITIAL_MAP_BYTES, Environment
from kvstore_xfer.store.local.layout import payload_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import lmdb

T = TypeVar("T")

_ENTRY = struct.Struct("<QIQdQ")
_SUM = struct.Struct("<I")
_STAMP = struct.Struct(">Q")
_SIZE = struct.Struct("<Q")
_TOTALS = struct.Struct("<QQQ")
_PAGE_ROWS = 1024
# A derived block can be made again: it goes before a native one used up to ten minutes earlier.
DERIVED_HANDICAP_NS = 600 * 10**9
_DERIVED = b"/derived-"


class Entry(NamedTuple):
    """`stamp`: nanoseconds of the last use; `created`: Unix seconds."""

    generation: int
    header_bytes: int
    payload_bytes: int
    created: float
    stamp: int

    @property
    def size(self) -> int:
        return self.header_bytes + self.payload_bytes


@dataclass(frozen=True)
class Totals:
    """`used` counts every file that is still on the disk, trash included."""

    used: int = 0
    evicted: int = 0
    corrupt: int = 0


class Databases(NamedTuple):
    blocks: lmdb._Database
    recent: lmdb._Database
    trash: lmdb._Database
    meta: lmdb._Database


def raw_key(key: str) -> bytes:
    """The key as LMDB sees it; empty, which is never stored, when it cannot be a key."""
    raw = key.encode("utf-8", "surrogatepass")
    return raw if len(raw) <= MAX_KEY_BYTES else b""


def pack_entry(key: bytes, entry: Entry) -> bytes:
    raw = _ENTRY.pack(*entry)
    return raw + _SUM.pack(xxhash.xxh32_intdigest(key + raw))


def unpack_entry(key: bytes, row: bytes | memoryview) -> Entry:
    """Raises struct.error for a damaged row. Rows of version 0.1 carry no checksum."""
    raw = bytes(row)
    if len(raw) != _ENTRY.size:
        raw, found = raw[: -_SUM.size], raw[-_SUM.size :]
        if found != _SUM.pack(xxhash.xxh32_intdigest(key + raw)):
            raise struct.error("index: the checksum of a row does not match")
    return Entry(*_ENTRY.unpack(raw))


def recent_row(key: bytes, stamp: int) -> bytes:
    """The row of a block in the order of eviction."""
    handicap = DERIVED_HANDICAP_NS if _DERIVED in key else 0
    return _STAMP.pack(max(0, stamp - handicap)) + key


class Rows:
    """The index inside one write transaction; `save` puts the totals down at its end."""

    def __init__(self, transaction: lmdb.Transaction, databases: Databases) -> None:
        self._txn = transaction
        self._db = databases
        self.totals = self._saved = read_totals(transaction, databases)

    def get(self, key: bytes) -> Entry | None:
        raw = self._txn.get(key, db=self._db.blocks)
        return None if raw is None else unpack_entry(key, raw)

    def put(self, key: bytes, entry: Entry) -> str | None:
        """Add an entry; the name of the payload it replaces goes to the trash."""
        replaced = self.remove(key)
        self._txn.put(key, pack_entry(key, entry), db=self._db.blocks)
        self._txn.put(recent_row(key, entry.stamp), b"", db=self._db.recent)
        self._count(used=entry.size)
        return replaced

    def remove(self, key: bytes) -> str | None:
        """Move an entry to the trash; the name of its payload."""
        entry = self.get(key)
        if entry is None:
            return None
        name = payload_name(key, entry.generation)
        self._txn.delete(key, db=self._db.blocks)
        self._txn.delete(recent_row(key, entry.stamp), db=self._db.recent)
        self._txn.put(name.encode(), _SIZE.pack(entry.size), db=self._db.trash)
        return name

    def remove_corrupt(self, key: bytes, generation: int) -> str | None:
        """Like `remove`, unless another writer has replaced the damaged block already."""
        entry = self.get(key)
        if entry is None or entry.generation != generation:
            return None
        self._count(corrupt=1)
        return self.remove(key)

    def touch(self, key: bytes, stamp: int) -> None:
        entry = self.get(key)
        if entry is None or entry.stamp >= stamp:
            return
        self._txn.delete(recent_row(key, entry.stamp), db=self._db.recent)
        self._txn.put(recent_row(key, stamp), b"", db=self._db.recent)
        self._txn.put(key, pack_entry(key, entry._replace(stamp=stamp)), db=self._db.blocks)

    def evict(self, needed: int, now: int) -> list[str]:
        """Move the least recently used blocks to the trash until `needed` bytes are named.

        Blocks with a stamp later than `now` are pinned.
        """
        freed = 0
        rows = []
        with self._txn.cursor(db=self._db.recent) as cursor:
            for found in cursor.iternext(values=False):
                row = bytes(found)
                key = row[_STAMP.size :]
                entry = self.get(key)
                rows.append(row)
                if entry is None or row != recent_row(key, entry.stamp):
                    continue  # left over from another order
                if entry.stamp > now:
                    rows.pop()
                    if _STAMP.unpack_from(row)[0] > now:
                        break  # so are all that follow
                    continue
                freed += entry.size
                if freed >= needed:
                    break
        names = [name for row in rows if (name := self._evict_row(row))]
        self._count(evicted=len(names))
        return names

    def _evict_row(self, row: bytes) -> str | None:
        key = row[_STAMP.size :]
        entry = self.get(key)
        self._txn.delete(row, db=self._db.recent)
        current = entry is not None and row == recent_row(key, entry.stamp)
        return self.remove(key) if current else None

    def forget(self, name: str) -> None:
        """The file of a trash row is gone."""
        raw = self._txn.pop(name.encode(), db=self._db.trash)
        if raw is not None:
            self._count(used=-_SIZE.unpack(raw)[0])

    def in_trash(self, name: str) -> bool:
        return self._txn.get(name.encode(), db=self._db.trash) is not None

    def set_walked(self, boot: str) -> None:
        self._txn.put(b"walked", boot.encode(), db=self._db.meta)

    def _count(self, used: int = 0, evicted: int = 0, corrupt: int = 0) -> None:
        old = self.totals
        self.totals = Totals(max(0, old.used + used), old.evicted + evicted, old.corrupt + corrupt)

    def save(self) -> None:
        if self.totals != self._saved:
            row = _TOTALS.pack(self.totals.used, self.totals.evicted, self.totals.corrupt)
            self._txn.put(b"totals", row, db=self._db.meta)


class Index:
    """The index of one store folder. Its methods raise lmdb.Error."""

    def __init__(self, folder: Path, map_bytes: int = INITIAL_MAP_BYTES) -> None:
        self.environment = Environment(folder, len(Databases._fields), map_bytes)
        try:
            self._db = Databases(
                *(self.environment.database(name.encode()) for name in Databases._fields)
            )
        except BaseException:
            self.environment.close()
            raise

    def contains(self, keys: Sequence[str]) -> list[bool]:
        with self.environment.reading() as txn:
            blocks = self._db.blocks
            raw = [raw_key(key) for key in keys]
            return [bool(key) and txn.get(key, db=blocks) is not None for key in raw]

    def entries(self, keys: Sequence[str]) -> list[Entry | None]:
        with self.environment.reading() as txn:
            raw = [raw_key(key) for key in keys]
            rows = [txn.get(key, db=self._db.blocks) if key else None for key in raw]
        return [
            None if row is None else unpack_entry(key, row)
            for key, row in zip(raw, rows, strict=True)
        ]

    def scan(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        """In key order, a page of rows at a time: a slow caller holds no snapshot open."""
        start = raw_prefix = raw_key(prefix)
        if prefix and not raw_prefix:
            return
        while True:
            rows = self._page(start, raw_prefix)
            for key, row in rows:
                yield key.decode(errors="replace"), unpack_entry(key, row)
            if len(rows) < _PAGE_ROWS:
                return
            start = rows[-1][0] + b"\0"

    def _page(self, start: bytes, prefix: bytes) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        with (
            self.environment.reading() as txn,
            txn.cursor(db=self._db.blocks) as cursor,
        ):
            if not (cursor.set_range(start) if start else cursor.first()):
                return rows
            for key, row in cursor.iternext():
                if len(rows) == _PAGE_ROWS or not bytes(key).startswith(prefix):
                    break
                rows.append((bytes(key), bytes(row)))
        return rows

    def totals(self) -> tuple[int, Totals]:
        """Number of blocks, and the totals."""
        with self.environment.reading() as txn:
            return txn.stat(db=self._db.blocks)["entries"], read_totals(txn, self._db)

    def oldest_stamp(self) -> int | None:
        """Last use of the least recently used block, in nanoseconds; None when there is none."""
        with self.environment.reading() as txn, txn.cursor(db=self._db.recent) as cursor:
            if not cursor.first():
                return None
            key = bytes(cursor.key()[_STAMP.size :])
            row = txn.get(key, db=self._db.blocks)
            return None if row is None else unpack_entry(key, row).stamp

    def trash(self) -> list[str]:
        with self.environment.reading() as txn, txn.cursor(db=self._db.trash) as cursor:
            return [bytes(name).decode() for name in cursor.iternext(values=False)]

    def walked(self) -> str | None:
        """Boot id of the last walk over all payloads that came to its end."""
        with self.environment.reading() as txn:
            raw = txn.get(b"walked", db=self._db.meta)
        return None if raw is None else bytes(raw).decode(errors="replace")

    def update(self, work: Callable[[Rows], T]) -> T:
        """Run `work` in one write transaction; it may run twice."""

        def with_totals(transaction: lmdb.Transaction) -> T:
            rows = Rows(transaction, self._db)
            result = work(rows)
            rows.save()
            return result

        return self.environment.update(with_totals)

    def close(self) -> None:
        self.environment.close()


def read_totals(transaction: lmdb.Transaction, databases: Databases) -> Totals:
    raw = transaction.get(b"totals", db=databases.meta)
    return Totals() if raw is None else Totals(*_TOTALS.unpack(raw))
