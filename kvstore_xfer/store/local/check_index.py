"""Reads every row of an index in use: its checksum, its place in the order of eviction, and whether
a look-up finds it.

``python -m kvstore_xfer.store.local.check_index FOLDER``; exits with 0 when all is well, with
`DAMAGED` and the reason when it is not. Standard input is a pipe that ends with whoever waits.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import lmdb

from kvstore_xfer.store.local.check import DAMAGED
from kvstore_xfer.store.local.environment import DAMAGE
from kvstore_xfer.store.local.index import Databases, read_totals, recent_row, unpack_entry

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOWEST_PRIORITY = 19


def main(folder: str) -> int:
    """The exit status. Raises what is no verdict on the index."""
    os.nice(_LOWEST_PRIORITY)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        check(folder)
    except DAMAGE as error:
        sys.stderr.write(f"{error}\n")
        return DAMAGED
    return 0


def check(folder: str) -> None:
    """One snapshot, read only: nobody waits for a lock that a process of low priority holds.

    The two orders are compared by sums of hashes, which a block's place does not change. Raises
    one of `DAMAGE`.
    """
    names = [name.encode() for name in Databases._fields]
    with (
        lmdb.open(folder, map_size=0, max_dbs=len(names), readonly=True, create=False) as index,
        index.begin() as transaction,
    ):
        databases = Databases(*(index.open_db(name, transaction, create=False) for name in names))
        blocks, recent, *others = (_rows(transaction, database) for database in databases)
        wanted = sum(hash(recent_row(key, unpack_entry(key, row).stamp)) for key, row in blocks)
        if wanted != sum(hash(row) for row, _ in recent):
            raise lmdb.CorruptedError("index: the order of eviction is not that of the blocks")
        for rows in others:
            for _ in rows:
                pass
        read_totals(transaction, databases)


def _rows(transaction: lmdb.Transaction, database: lmdb._Database) -> Iterator[tuple[bytes, bytes]]:
    """All rows; raises lmdb.CorruptedError where a look-up goes astray."""
    for key, row in transaction.cursor(database):
        if transaction.get(key, None, database) is None:
            raise lmdb.CorruptedError("index: a row that no look-up finds")
        yield bytes(key), bytes(row)


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
