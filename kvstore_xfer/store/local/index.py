"""Which blocks there are, how old, and what is still to be removed: rows in LMDB.

========== =========================== ==============================================
database   key                         value
========== =========================== ==============================================
``blocks`` block key                   `Entry`
``recent`` stamp, block key            empty; first row = least recently used
``trash``  payload name                size; out of the index, file to be removed
``meta``   ``totals``, ``walked``      `Totals`; boot id of the last full walk
========== =========================== ==============================================

A file is removed only after its row has moved to the trash, so a crash in between leaves neither
an entry without a file nor a file that nobody counts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvstore_xfer.blocks.key import MAX_KEY_BYTES
from kvstore_xfer.store.local.environment import INITIAL_MAP_BYTES, Environment
from kvstore_xfer.store.local.layout import payload_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import lmdb

T = TypeVar("T")

_ENTRY = struct.Struct("<QIQdQ")
_STAMP = struct.Struct(">Q")
_SIZE = struct.Struct("<Q")
_TOTALS = struct.Struct("<QQQ")
_PAGE_ROWS = 1024


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


class Rows:
    """The index inside one write transaction."""

    def __init__(self, transaction: lmdb.Transaction, databases: Databases) -> None:
        self._txn = transaction
        self._db = databases
        self.totals = _totals(transaction, databases)

    def get(self, key: bytes) -> Entry | None:
        raw = self._txn.get(key, db=self._db.blocks)
        return None if raw is None else Entry(*_ENTRY.unpack(raw))

    def put(self, key: bytes, entry: Entry) -> str | None:
        """Add an entry; the name of the payload it replaces goes to the trash."""
        replaced = self.remove(key)
        self._txn.put(key, _ENTRY.pack(*entry), db=self._db.blocks)
        self._txn.put(_STAMP.pack(entry.stamp) + key, b"", db=self._db.recent)
        self._count(used=entry.size)
        return replaced

    def remove(self, key: bytes) -> str | None:
        """Move an entry to the trash; the name of its payload."""
        entry = self.get(key)
        if entry is None:
            return None
        name = payload_name(key, entry.generation)
        self._txn.delete(key, db=self._db.blocks)
        self._txn.delete(_STAMP.pack(entry.stamp) + key, db=self._db.recent)
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
        self._txn.delete(_STAMP.pack(entry.stamp) + key, db=self._db.recent)
        self._txn.put(_STAMP.pack(stamp) + key, b"", db=self._db.recent)
        self._txn.put(key, _ENTRY.pack(*entry._replace(stamp=stamp)), db=self._db.blocks)

    def evict(self, needed: int) -> list[str]:
        """Move the least recently used blocks to the trash until `needed` bytes are named."""
        freed = 0
        keys = []
        with self._txn.cursor(db=self._db.recent) as cursor:
            for row in cursor.iternext(values=False):
                key = bytes(row[_STAMP.size :])
                entry = self.get(key)
                freed += entry.size if entry else 0
                keys.append(key)
                if freed >= needed:
                    break
        names = [name for key in keys if (name := self.remove(key))]
        self._count(evicted=len(names))
        return names

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
        return [None if row is None else Entry(*_ENTRY.unpack(row)) for row in rows]

    def scan(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        """In key order, a page of rows at a time: a slow caller holds no snapshot open."""
        start = raw_prefix = raw_key(prefix)
        if prefix and not raw_prefix:
            return
        while True:
            rows = self._page(start, raw_prefix)
            for key, row in rows:
                yield key.decode(errors="replace"), Entry(*_ENTRY.unpack(row))
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
            return txn.stat(db=self._db.blocks)["entries"], _totals(txn, self._db)

    def oldest_stamp(self) -> int | None:
        """Last use of the least recently used block, in nanoseconds; None when there is none."""
        with self.environment.reading() as txn, txn.cursor(db=self._db.recent) as cursor:
            if not cursor.first():
                return None
            stamp: int = _STAMP.unpack(cursor.key()[: _STAMP.size])[0]
            return stamp

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
        return self.environment.update(lambda txn: work(Rows(txn, self._db)))

    def close(self) -> None:
        self.environment.close()


def _totals(transaction: lmdb.Transaction, databases: Databases) -> Totals:
    raw = transaction.get(b"totals", db=databases.meta)
    return Totals() if raw is None else Totals(*_TOTALS.unpack(raw))
