"""Module of LMCache's server that tells the adapter what only the server knows.

Block sizes of the engines: without them objects of vLLM's CPU backend are not even stored.

And whether the adapter is right about places of chunks, which it learns from its own lookup calls.
Where the server moves the data itself (``lmcache_driven``) it also says, beside the data path,
where each stored chunk stands; a contradiction turns conversion off. The events may be dropped, so
they check and never teach.

    --server-module '{"module_path": "kvxfer_lmcache.server_module"}'
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from lmcache.v1.mp_observability.event import EventType
from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule

from kvxfer_lmcache.block_sizes import Known, reported
from kvxfer_lmcache.l2_adapter import KvxferL2Adapter

if TYPE_CHECKING:
    from collections.abc import Sequence


class ServerFacts:
    """Tells the adapters block sizes, and compares LMCache's token offsets of stored chunks with
    their positions. `modules` are those of LMCache's server."""

    def __init__(self, context: Any, modules: Sequence[Any]) -> None:
        self._context, self._modules = context, modules
        self._lock = threading.Lock()
        self._agreed = self._unknown = self._contradicted = 0
        adapters = [adapter for _, adapter in context.storage_manager.l2_adapters()]
        self._adapters = [a for a in adapters if isinstance(a, KvxferL2Adapter)]
        for adapter in self._adapters:
            adapter.attachments.block_sizes.ask(self._block_sizes)
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

    def _block_sizes(self) -> list[Known]:
        return [known for module in self._modules for known in reported(module.report_status())]

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


def build_server_modules(build: Any) -> ServerFacts:
    """LMCache's factory hook."""
    return ServerFacts(build.server_context, _of_engines(build.modules))


def _of_engines(modules: Sequence[Any]) -> list[Any]:
    """The modules that engines register with."""
    kinds = (EngineDrivenTransferModule, LMCacheDrivenTransferModule)
    return [module for module in modules if isinstance(module, kinds)]
