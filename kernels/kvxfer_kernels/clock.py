"""Seconds of stages that overlap on several streams."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """Busy seconds of named stages, each measured on its own stream. Not thread-safe."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def on(self, stage: str, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Measure what is issued to `stream`; without one, what happens meanwhile."""
        if stream is None:
            started = time.perf_counter()
            yield
            self._seconds[stage] += time.perf_counter() - started
            return
        first, last = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        first.record(stream)
        yield
        last.record(stream)
        self._events.append((stage, first, last))

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call. The streams must have been synchronised."""
        for stage, first, last in self._events:
            self._seconds[stage] += first.elapsed_time(last) / 1e3
        seconds, self._seconds, self._events = dict(self._seconds), defaultdict(float), []
        return seconds
