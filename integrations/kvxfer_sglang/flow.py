"""What moved between the host pool and the store, in the form SGLang's metrics want it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

_KEPT = 4096  # calls between two collections; SGLang collects several times a second
_GIB = 1 << 30


class Flow:
    """Pages and GiB a second of each call since the last `take`. Safe from several threads."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._calls: dict[str, deque[tuple[int, float]]] = {}

    def prefetched(self, pages: int, page_bytes: int, seconds: float) -> None:
        self._record("prefetch", pages, page_bytes, seconds)

    def backed_up(self, pages: int, page_bytes: int, seconds: float) -> None:
        self._record("backup", pages, page_bytes, seconds)

    def take(self) -> Any:
        """SGLang's StorageMetrics of the calls since the last take."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            calls, self._calls = self._calls, {}
        columns: dict[str, list[Any]] = {}
        for direction in ("prefetch", "backup"):
            rows = calls.get(direction, ())
            columns[f"{direction}_pgs"] = [pages for pages, _ in rows]
            columns[f"{direction}_bandwidth"] = [rate for _, rate in rows]
        return StorageMetrics(**columns)

    def _record(self, direction: str, pages: int, page_bytes: int, seconds: float) -> None:
        if not self._enabled or not pages:
            return
        rate = pages * page_bytes / max(seconds, 1e-9) / _GIB
        with self._lock:
            self._calls.setdefault(direction, deque(maxlen=_KEPT)).append((pages, rate))
