"""Which chunk of its prompt a chunk hash is, learned from lookups.

A chunk's hash covers its own tokens and all before them, so it stands at one place only, in every
prompt, model and tenant. LMCache's lookups list a prompt's hashes from its first chunk on, and an
engine looks a prompt up before it stores it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPACITY = 1 << 18  # hashes; about 60 MB, 64 million tokens in chunks of 256
_UNCERTAIN = -1


class Positions:
    """Chunk hash to ordinal. Safe to use from several threads.

    A hash that is seen behind two different ones, or at two places, is uncertain for good: then
    something is not as this package believes.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[int, bytes | None]] = OrderedDict()
        self.conflicts = 0

    def learn(self, hashes: Sequence[bytes], first: int = 0) -> None:
        """The hashes of consecutive chunks, the first of which has ordinal `first`."""
        with self._lock:
            before = b"" if first == 0 else None
            for number, chunk in enumerate(hashes, start=first):
                self._learn(chunk, number, before)
                before = chunk
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)

    def of(self, chunk: bytes) -> int | None:
        """The ordinal, None when it is not known or not certain."""
        with self._lock:
            place, _ = self._known.get(chunk, (_UNCERTAIN, b""))
        return None if place == _UNCERTAIN else place

    def _learn(self, chunk: bytes, number: int, before: bytes | None) -> None:
        place, parent = self._known.get(chunk, (number, before))
        differs = before is not None and parent is not None and parent != before
        if place != _UNCERTAIN and (place != number or differs):
            self.conflicts += 1
            place = _UNCERTAIN
        self._known[chunk] = (place, before if parent is None else parent)
        self._known.move_to_end(chunk)
