"""Module of LMCache's server that checks what the adapter believes about places of chunks.

The adapter learns them from its own lookup calls. Where the server moves the data itself
(``lmcache_driven``) it also says, beside the data path, where each stored chunk stands; a
contradiction turns conversion off. The events may be dropped, so they check and never teach.

    --server-module '{"module_path": "kvxfer_lmcache.server_module"}'
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from lmcache.v1.mp_observability.event import EventType

from kvxfer_lmcache.l2_adapter import KvxferL2Adapter

if TYPE_CHECKING:
    from collections.abc import Sequence


class PlaceCheck:
    """Compares LMCache's token offsets of stored chunks with the adapters' positions."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._agreed = self._unknown = self._contradicted = 0
        adapters = [adapter for _, adapter in context.storage_manager.l2_adapters()]
        self._adapters = [a for a in adapters if isinstance(a, KvxferL2Adapter)]
        context.event_bus.subscribe(EventType.MP_TOKENS, self._on_tokens)

    @property
    def context(self) -> Any:
        """LMCache's server context, for LMCache."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """Merged into LMCache's status page."""
        with self._lock:
            counts = {
                "agreed": self._agreed,
                "unknown": self._unknown,
                "contradicted": self._contradicted,
            }
        return {"kvxfer_places": counts}

    def close(self) -> None:
        """Nothing to release: the event bus ends with the server."""

    def _on_tokens(self, event: Any) -> None:
        hashes, offsets = event.metadata["chunk_hashes"], event.metadata["token_offsets"]
        for adapter in self._adapters:
            self._check(adapter, hashes, offsets)

    def _check(
        self, adapter: KvxferL2Adapter, hashes: Sequence[bytes], offsets: Sequence[int]
    ) -> None:
        places = [adapter.positions.of(chunk) for chunk in hashes]
        pairs = list(zip(places, offsets, strict=True))
        known = [(place, offset) for place, offset in pairs if place is not None]
        wrong = [1 for place, offset in known if place * self._context.chunk_size != offset]
        with self._lock:
            self._agreed += len(known) - len(wrong)
            self._contradicted += len(wrong)
            self._unknown += len(pairs) - len(known)
        if wrong:
            adapter.distrust("LMCache says that a stored chunk stands elsewhere in its prompt")


def build_server_modules(build: Any) -> PlaceCheck:
    """LMCache's factory hook."""
    return PlaceCheck(build.server_context)
