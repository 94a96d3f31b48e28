"""The store's totals as gauges, refreshed in the background while a tier is open."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvstore_xfer import metrics

if TYPE_CHECKING:
    from kvstore_xfer.store.base import BlockStore, StoreStats

_log = logging.getLogger(__name__)
REFRESH_SECONDS = 10.0
_MOST_OF_THE_TIME = 20  # a store that is slow to count is asked less often


class StoreGauges:
    """Asks `store` for its totals, first at once, then every ten seconds, on a thread of its own.

    `label` is the scheme of the store's URL: bounded, and free of addresses and passwords.
    """

    def __init__(self, store: BlockStore, label: str) -> None:
        self._store, self._label = store, label
        self._closed = threading.Event()
        self._down = False
        self._thread = threading.Thread(target=self._work, name="kvxfer-store-gauges", daemon=True)
        self._thread.start()

    def is_down(self) -> bool:
        """Whether the store did not tell its totals when it was asked last."""
        return self._down

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._closed.set()
        self._thread.join(REFRESH_SECONDS)  # a store that hangs must not hang the engine

    def _work(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause):
            started = time.monotonic()
            self._refresh()
            pause = max(REFRESH_SECONDS, _MOST_OF_THE_TIME * (time.monotonic() - started))

    def _refresh(self) -> None:
        try:
            self._set(self._store.stats())
        except Exception as error:  # noqa: BLE001 - a store that fails is down, not our thread
            metrics.STORE_UP.labels(self._label).set(0)
            if not self._down and not self._closed.is_set():
                _log.error("kvxfer: the %s store is down: %s", self._label, error)
            self._down = True
        else:
            if self._down:
                _log.warning("kvxfer: the %s store is up again", self._label)
            self._down = False

    def _set(self, stats: StoreStats) -> None:
        rows = {
            metrics.STORE_UP: 1.0,
            metrics.STORE_BLOCKS: stats.blocks,
            metrics.STORE_BYTES: stats.bytes,
            metrics.STORE_CAPACITY_BYTES: stats.capacity_bytes,
            metrics.STORE_OLDEST_USE_SECONDS: stats.oldest_use,
            metrics.STORE_EVICTED_BLOCKS: stats.evicted_blocks,
            metrics.STORE_CORRUPT_BLOCKS: stats.corrupt_blocks,
        }
        for gauge, value in rows.items():
            if value is not None:
                gauge.labels(self._label).set(value)
