"""Whose weights this process computes with, as SGLang's plug-in hooks saw it happen.

Kept for the process and not for a storage: one that is attached after an update must know of it.
"""

from __future__ import annotations

import threading


class Weights:
    """What is known of the engine's weights. All methods may be called from several threads.

    Until `watch` is called nobody tells of updates, and nothing of the rest is certain.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched, self._in_files, self._mixed = False, True, False

    @property
    def watched(self) -> bool:
        """Whether updates would be told of."""
        return self._watched

    @property
    def in_files(self) -> bool:
        """Whether the weights are those of the model path in use."""
        return self._in_files

    @property
    def mixed(self) -> bool:
        """Whether SGLang's own tiers may hold pages of earlier weights."""
        return self._mixed

    def watch(self) -> None:
        self._watched = True

    def updated(self, *, from_files: bool, success: bool, emptied: bool) -> None:
        """An update ended; `emptied`: SGLang has dropped all pages of the weights before.

        A failed one leaves or restores the weights before, or has replaced a part of them.
        """
        with self._lock:
            self._in_files = from_files and (success or self._in_files)
            self._mixed = not (success and emptied)

    def updating(self) -> None:
        """An update in several steps has begun."""
        with self._lock:
            self._in_files, self._mixed = False, True

    def emptied(self) -> bool:
        """SGLang has dropped all pages outside of an update; True when that ended a mixture."""
        with self._lock:
            before, self._mixed = self._mixed, False
            return before


weights = Weights()
