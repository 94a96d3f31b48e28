"""Seconds and bytes of the stages of a lookup, into the histograms."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore_xfer import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.mapper.convert import Converter


class Stages:
    """The stage histograms of one tier; looking labels up once keeps the data path cheap."""

    def __init__(self, target: str) -> None:
        self._seconds = {s: metrics.STAGE_SECONDS.labels(target, s).observe for s in metrics.STAGES}
        self._bytes = {s: metrics.STAGE_BYTES.labels(target, s).observe for s in metrics.STAGES}

    def observe(self, stage: str, seconds: float, size: int = 0) -> None:
        """One call of `stage`; `size` in bytes, 0 where nothing moves."""
        self._seconds[stage](seconds)
        if size:
            self._bytes[stage](size)

    @contextmanager
    def timed(self, stage: str, size: int = 0) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.observe(stage, time.perf_counter() - started, size)

    def convert(self, converter: Converter, source: KvPage, first: int, target: KvPage) -> None:
        """Convert one run of tokens; one that observes its own stages is not timed as a whole."""
        if hasattr(converter, "observe"):
            converter.convert([source], [first], [target])
            return
        with self.timed("map", target.shape.payload_bytes):
            converter.convert([source], [first], [target])
