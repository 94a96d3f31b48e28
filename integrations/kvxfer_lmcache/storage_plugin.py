"""`KvxferBackend`: the tier as a storage plug-in of LMCache's in-process cache.

For engines that do not use LMCache's server yet. With ``enable_async_loading`` LMCache says where
the chunks of a load stand, and reads on its event loop instead of the engine's forward pass; only
then is anything converted. Nothing raises into the engine.

    storage_plugins: ["kvxfer"]
    enable_async_loading: true
    extra_config:
      storage_plugin.kvxfer.module_path: kvxfer_lmcache.storage_plugin
      storage_plugin.kvxfer.class_name: KvxferBackend
      kvxfer.family: /etc/kvxfer/family.yaml
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface
from lmcache.v1.token_database import ChunkedTokenDatabase

from kvstore_xfer import metrics
from kvstore_xfer.errors import ConfigError
from kvxfer_lmcache.attach import UNLISTED, Attachment, Attachments
from kvxfer_lmcache.objects import (
    STRONG_HASH_BYTES,
    ObjectPage,
    Origin,
    block_name,
    bytes_of,
    form_of,
)
from kvxfer_lmcache.positions import Positions
from kvxfer_lmcache.refusals import Refusal, lmcache_version
from kvxfer_lmcache.settings import Settings, read_settings
from kvxfer_lmcache.tasks import Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_xfer.tier.plan import BlockPlan
    from kvstore_xfer.tier.tier import Tier

_log = logging.getLogger(__name__)
_PREFIX = "kvxfer."
_places = Positions()  # of all engines of this process: a hash stands at one place only


def _watch_tokens() -> None:
    """Learn chunks' places where LMCache cuts prompts into chunks; stores do not tell them."""
    original = ChunkedTokenDatabase.process_tokens

    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for start, end, key in original(self, *args, **kwargs):
            if end - start == self.chunk_size:
                chunk_hash = getattr(key, "chunk_hash", key)
                _places.learn([_hash_bytes(chunk_hash)], start // self.chunk_size)
            yield start, end, key

    ChunkedTokenDatabase.process_tokens = watched


_watch_tokens()


class KvxferBackend(StoragePluginInterface):  # type: ignore[misc]  # LMCache is not typed here
    """See the module docstring. The arguments are LMCache's."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        given = dict(config.extra_config or {})
        params = {k[len(_PREFIX) :]: v for k, v in given.items() if k.startswith(_PREFIX)}
        try:
            settings, wrong = read_settings(params), None
        except ConfigError as error:
            settings, wrong = Settings(Path("family.yaml")), error
        self._seconds = settings.seconds
        self._attachments = Attachments(settings.manifest, _hash_scheme(config), wrong)
        self._origin = _origin(metadata, int(config.chunk_size))
        self._chunk = int(config.chunk_size)
        self._lock = threading.Lock()
        self._putting: set[Any] = set()
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="kvxfer-inproc")
        self._refuse(config)
        # Digesting weights may take minutes; the first request should not wait for it.
        self._workers.submit(self._attachments.get, self._origin, 0.0)
        metrics.set_build_info("lmcache", lmcache_version() or "")

    def __str__(self) -> str:
        return "KvxferBackend"

    def _refuse(self, config: Any) -> None:
        if not config.enable_async_loading:
            text = "set enable_async_loading: without it a load does not say where its chunks stand"
            self._attachments.refuse(Refusal.SYNCHRONOUS_LOADING, text)
        if config.enable_blending:
            text = "CacheBlend uses chunks at other places than they were computed at"
            self._attachments.refuse(Refusal.CACHE_BLEND, text)

    def _attachment(self) -> Attachment | None:
        """Only what is open already: LMCache's threads must not wait for weights."""
        return self._attachments.get(self._origin, 0.0)

    # lookups

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether the tier has the chunk itself; nothing is converted on this path."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: Sequence[Any], pin: bool = False) -> int:
        """How many leading chunks the tier has itself; nothing is converted on this path."""
        plans = self._find(keys, whole_prompt=False)
        return _leading(plans, convertible=False)

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        """How many leading chunks can be had, converted ones included."""
        count = await self._on_worker(self._seconds["lookup"], "lookup", self._count, list(keys))
        return count or 0

    def _count(self, keys: list[Any]) -> int:
        plans = self._find(keys, whole_prompt=True)
        served = _leading(plans, convertible=True)
        tier = self._tier()
        if tier is not None:
            # The others will not be asked for, so why they cannot be had is counted here.
            tier.read(plans[served:], [])
        return served

    def _find(self, keys: Sequence[Any], *, whole_prompt: bool) -> list[BlockPlan]:
        tier = self._tier()
        names = [_name(key) for key in keys]
        return [] if tier is None else tier.find(names, whole_prompt=whole_prompt)

    def _tier(self) -> Tier | None:
        attachment = self._attachment()
        return None if attachment is None else attachment.tier

    # loads

    def get_blocking(self, key: Any) -> Any:
        """The chunk that the tier has itself, None when it has not."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: Sequence[Any]) -> list[Any]:
        """Chunks that the tier has itself, None for those behind the first that is missing."""
        try:
            loaded = self._load(list(keys), None)
        except Exception:  # noqa: BLE001 - nothing may raise into the engine
            self._failed("load")
            loaded = []
        return [*loaded, *[None] * (len(keys) - len(loaded))]

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: Sequence[Any], transfer_spec: Any = None
    ) -> list[Any]:
        """The leading chunks: own ones, or converted now; pinned, as LMCache expects."""
        lengths = (transfer_spec or {}).get("cum_chunk_lengths") or [None]
        first = (
            None if lengths[0] is None or lengths[0] % self._chunk else lengths[0] // self._chunk
        )
        loaded = await self._on_worker(
            self._seconds["load"], "load", self._load, list(keys), first, late=_release
        )
        for memory in loaded or []:
            memory.pin()
        return loaded or []

    def _load(self, keys: list[Any], first: int | None) -> list[Any]:
        """Memory of the leading chunks; converts only when the first one's place is given."""
        attachment = self._attachment()
        if attachment is None or attachment.tier is None:
            return []
        plans = self._find(keys, whole_prompt=False)
        plans = plans[: _leading(plans, convertible=first is not None)]
        memories = self._allocate(len(plans))
        pages = [ObjectPage(attachment.layout, bytes_of(memory), Lease()) for memory in memories]
        results = attachment.tier.read(plans[: len(pages)], pages, first)
        served = next((i for i, r in enumerate(results) if not r.served), len(results))
        _release(memories[served:])
        return memories[:served]

    def _allocate(self, count: int) -> list[Any]:
        (shape,), (dtype,) = self._origin.shapes, self._origin.dtypes
        memories: list[Any] = []
        for _ in range(count):
            memory = self.local_cpu_backend.allocate(
                torch.Size(shape), dtype, fmt=MemoryFormat.KV_2LTD
            )
            if memory is None:
                break
            memories.append(memory)
        return memories

    # stores

    def exists_in_put_tasks(self, key: Any) -> bool:
        # docstring inherited
        with self._lock:
            return key in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """Store whole chunks in the background; their memory is held until then."""
        whole = [
            (key, memory)
            for key, memory in zip(keys, objs, strict=True)
            if tuple(form_of(memory)[0][0]) == self._origin.shapes[0]
        ]
        for _, memory in whole:
            memory.ref_count_up()
        with self._lock:
            self._putting.update(key for key, _ in whole)
        self._workers.submit(self._put, whole, on_complete_callback)

    def _put(
        self, chunks: list[tuple[Any, Any]], on_complete: Callable[[Any], None] | None
    ) -> None:
        attachment = self._attachments.get(self._origin, self._seconds["store"])
        for key, memory in chunks:
            try:
                if attachment is not None and attachment.tier is not None:
                    place = _places.of(_hash_bytes(key.chunk_hash)) if attachment.placed else None
                    page = attachment.layout.unpack(bytes_of(memory))
                    attachment.tier.write([_name(key)], [page], place)
            except Exception:  # noqa: BLE001 - the memory must be given back
                self._failed("store")
            finally:
                memory.ref_count_down()
                with self._lock:
                    self._putting.discard(key)
            if on_complete is not None:
                on_complete(key)

    # the rest

    def pin(self, key: Any) -> bool:
        """Nothing is pinned: a block that is evicted meanwhile is a miss."""
        return True

    def unpin(self, key: Any) -> bool:
        # docstring inherited
        return True

    def remove(self, key: Any, force: bool = True) -> bool:
        # docstring inherited
        tier = self._tier()
        return tier is not None and tier.discard([_name(key)])[0]

    def touch_cache(self) -> None:
        """The store notes uses by itself."""

    def get_allocator_backend(self) -> Any:
        # docstring inherited
        return self.local_cpu_backend

    def close(self) -> None:
        """Store what is queued and close the store; a hanging store is given up."""
        self._workers.shutdown(wait=False, cancel_futures=False)
        self._attachments.close()

    async def _on_worker(
        self,
        seconds: float,
        kind: str,
        work: Callable[..., Any],
        *args: Any,
        late: Callable[[Any], None] | None = None,
    ) -> Any:
        """The result of `work`, None when it fails or takes too long; `late` gets a late result."""
        future = asyncio.get_running_loop().run_in_executor(self._workers, work, *args)
        done, _ = await asyncio.wait([future], timeout=seconds)
        if not done:
            metrics.ERRORS.labels(UNLISTED, f"lmcache_{kind}_timeout").inc()
            future.add_done_callback(functools.partial(_take_late, late))
            return None
        try:
            return future.result()
        except Exception:  # noqa: BLE001 - nothing may raise into the engine
            self._failed(kind)
            return None

    def _failed(self, kind: str) -> None:
        metrics.ERRORS.labels(UNLISTED, f"lmcache_{kind}_error").inc()
        _log.exception("kvxfer: a %s failed; answered as a miss", kind)


def _take_late(late: Callable[[Any], None] | None, future: asyncio.Future[Any]) -> None:
    if late is not None and not future.cancelled() and future.exception() is None:
        late(future.result())


def _release(memories: Sequence[Any]) -> None:
    for memory in memories:
        memory.ref_count_down()


def _leading(plans: Sequence[BlockPlan], *, convertible: bool) -> int:
    usable = (plan.served and (convertible or plan.pair is None) for plan in plans)
    return next((i for i, use in enumerate(usable) if not use), len(plans))


def _origin(metadata: Any, chunk: int) -> Origin:
    return Origin(
        model=str(metadata.model_name),
        rank=int(metadata.worker_id),
        ranks=int(metadata.world_size),
        group=0,
        hash_bytes=STRONG_HASH_BYTES,
        shapes=tuple(tuple(int(n) for n in shape) for shape in metadata.get_shapes(chunk)),
        dtypes=tuple(metadata.get_dtypes()),
    )


def _hash_scheme(config: Any) -> str:
    """Python's own hash differs between seeds, so the seed is part of its name."""
    name = str(config.pre_caching_hash_algorithm)
    seed = f"-seed{os.environ.get('PYTHONHASHSEED', '')}" if name == "builtin" else ""
    return f"lmcache-inprocess-{name}{seed}"


def _hash_bytes(chunk_hash: Any) -> bytes:
    """LMCache's hashes are bytes or integers, negative ones included."""
    if isinstance(chunk_hash, bytes):
        return chunk_hash
    return int(chunk_hash).to_bytes(STRONG_HASH_BYTES, "big", signed=True)


def _name(key: Any) -> str:
    tags = "@".join(f"{name}%{value}" for name, value in key.tags or ())
    return block_name(_hash_bytes(key.chunk_hash), tags)
