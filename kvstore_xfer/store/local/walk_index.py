"""Walks through every page of an index, in a process of its own: a damaged one may end it with a
signal.

``python walk_index.py FOLDER``; exits with 0 when LMDB can work with the file. It holds up the
opening of a store, so it imports nothing but LMDB, and leaves the rows' checksums to `check_index`.
But it looks at what would let LMDB write beyond a page: the sizes of values, and the keys, which
two databases have in common.
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING

import lmdb

if TYPE_CHECKING:
    from collections.abc import Iterable

_VALUE_BYTES = {
    b"blocks": {36, 40},  # the latter with a checksum
    b"recent": {0},
    b"trash": {8},
    b"meta": set(range(64)),  # totals, and the id of a boot
}
_STAMP_BYTES = 8


def main(folder: str) -> None:
    """Raises what makes it damaged."""
    with (
        # Without a lock: its caller is the only one to have it open.
        lmdb.open(folder, map_size=0, max_dbs=4, readonly=True, create=False, lock=False) as index,
        index.begin() as transaction,
    ):
        sums = {}
        for name, sizes in _VALUE_BYTES.items():
            database = index.open_db(name, transaction, create=False)
            rows = transaction.stat(database)["entries"]
            # At most one too many: damaged branches can make a walk without an end.
            walk = islice(transaction.cursor(database), rows + 1)
            sums[name] = _sum(walk, sizes, _STAMP_BYTES if name == b"recent" else 0)
    if sums[b"blocks"] != sums[b"recent"]:
        raise SystemExit("the blocks are not those in the order of eviction")


def _sum(rows: Iterable[tuple[bytes, bytes]], sizes: set[int], start: int) -> int:
    """Of a hash of each key, without its first bytes: the same in any order."""
    total = 0
    for key, value in rows:
        if len(value) not in sizes:
            raise SystemExit(f"a row of {len(value)} bytes")
        total += hash(key[start:])
    return total


if __name__ == "__main__":
    main(sys.argv[1])
