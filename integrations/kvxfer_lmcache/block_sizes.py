"""The block sizes of the engines behind LMCache, as its server knows them.

Objects of vLLM's CPU backend can be read only by who knows vLLM's block size, and the bytes of two
runs with different ones differ although LMCache's keys are equal. LMCache's adapters are not told
the number; its server's modules are, from the shape of the engine's tensors.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvxfer_lmcache.objects import Origin

_log = logging.getLogger(__name__)

# Model name and worker count, as in LMCache's keys, and tokens of a block.
Known = tuple[str, int, int]


class BlockSizes:
    """All block sizes that were seen of an engine since the server started.

    None are forgotten: LMCache's own memory may hold chunks of every engine that was here. Safe to
    use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ask: Callable[[], Iterable[Known]] = tuple
        self._seen: set[Known] = set()

    def ask(self, source: Callable[[], Iterable[Known]]) -> None:
        """Where to learn, now and at every question, which engines LMCache knows."""
        self._ask = source

    def of(self, origin: Origin) -> tuple[int, ...]:
        """Those of one model and worker count, for objects whose bytes may depend on it."""
        if not may_be_packed(origin.shapes):
            return ()
        try:
            known = set(self._ask())
        except Exception as error:  # noqa: BLE001 - another LMCache; not known means not stored
            _log.warning(
                "kvxfer: LMCache's server does not say its engines' block sizes: %r", error
            )
            known = set()
        with self._lock:
            self._seen |= known
            engine = (origin.model, origin.ranks)
            return tuple(sorted(size for *name, size in self._seen if tuple(name) == engine))


def may_be_packed(shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether objects have one plane only, as keys and values in one have (and latents)."""
    return any(len(shape) == 3 or (len(shape) == 4 and shape[0] == 1) for shape in shapes)


def reported(status: Mapping[str, Any]) -> list[Known]:
    """What a module of LMCache's server says of its engines on the status page."""
    sizes = [
        (entry, entry["block_size"]) for entry in status.get("non_cuda_context_meta", {}).values()
    ]
    sizes += [
        (entry, group["slots_per_block"])
        for entry in status.get("cache_context_meta", {}).values()
        for group in entry["kv_cache_layout"]["kernel_groups"]
    ]
    return [(str(e["model_name"]), int(e["world_size"]), int(size)) for e, size in sizes]
