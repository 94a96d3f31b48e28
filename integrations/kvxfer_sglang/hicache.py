"""`KvxferStorage`: SGLang's storage backend for ``--hicache-storage-backend dynamic``.

SGLang asks from three threads at once (query, read, backup) and from its scheduler. Every call is
answered from one attachment, taken once at its start: it is replaced as a whole when the engine is
given other weights. Nothing raises into the engine, whatever fails is a miss, a reason, a counter.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvstore_xfer import metrics
from kvstore_xfer.errors import ConfigError
from kvxfer_sglang.attach import UNLISTED, Attachment, attach
from kvxfer_sglang.config import read_settings
from kvxfer_sglang.facts import read_facts, sglang_version, weights_in_use
from kvxfer_sglang.flow import Flow
from kvxfer_sglang.promises import Promises
from kvxfer_sglang.refusals import Refusal
from kvxfer_sglang.weights import weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvstore_xfer.blocks.page import KvPage

_log = logging.getLogger(__name__)
_live: weakref.WeakSet[KvxferStorage] = weakref.WeakSet()
T = TypeVar("T")


def weights_changed() -> None:
    """Tell every storage of this process to look at `kvxfer_sglang.weights` again."""
    for storage in list(_live):
        storage.attach_again()


def _answering(fallback: Callable[..., T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Answer with ``fallback(*arguments)`` instead of raising into the engine."""

    def decorate(call: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(call)
        def guarded(self: KvxferStorage, *args: Any, **kwargs: Any) -> T:
            try:
                return call(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - nothing may raise into the engine
                metrics.ERRORS.labels(self.name, call.__name__).inc()
                _log.exception("kvxfer: %s failed; answered as a miss", call.__name__)
                return fallback(*args, **kwargs)

        return guarded

    return decorate


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _none_of(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


class KvxferStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no type information
    """See the module docstring. The extra config's own keys are ``family`` and ``model``."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._attachment: Attachment | None = None
        self._refused: dict[Refusal, str] = {}
        self._changing = threading.Lock()
        self._warned_unplaced = False
        self._promises = Promises()
        self.flow = Flow(enabled=bool(storage_config.enable_storage_metrics))

    @property
    def name(self) -> str:
        """The model's name in the family, for metrics."""
        attachment = self._attachment
        return UNLISTED if attachment is None else attachment.name

    # attach and detach, on the scheduler's thread

    @_answering(_nothing)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool that appears after the attach means state beside the pages: the tier goes off."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._attachment is not None:
            self._attach()

    @_answering(_nothing)
    def on_host_pools_registered(self) -> None:
        # docstring inherited
        _live.add(self)
        metrics.set_build_info("sglang", sglang_version() or "")
        self._attach()

    @_answering(_nothing)
    def attach_again(self) -> None:
        """The engine's weights, or what is known of them, changed."""
        self._attach()

    @_answering(_nothing)
    def clear(self) -> None:
        """Delete this rank's blocks, native and derived."""
        attachment = self._attachment
        if attachment is not None and attachment.tier is not None:
            _log.info("kvxfer: cleared %d blocks", attachment.tier.clear())

    @_answering(_nothing)
    def close(self) -> None:
        """Detach: store what is queued, stop the tier's threads. Idempotent."""
        _live.discard(self)
        with self._changing:
            self._replace(None)
            self._announce([])

    @_answering(_nothing)
    def get_stats(self) -> Any:
        """What moved since the last call, as SGLang's StorageMetrics."""
        return self.flow.take()

    def _attach(self) -> None:
        with self._changing:
            self._replace(None)
            opened = self._open()
            self._replace(opened if isinstance(opened, Attachment) else None)
            refusals = opened.refusals if isinstance(opened, Attachment) else [opened]
            self._announce(refusals, self.name)

    def _open(self) -> Attachment | tuple[Refusal, str]:
        """The attachment to the engine as it is now, or why there can be none."""
        if not weights.watched:
            text = "SGLang did not load this package's plug-in; name kvxfer in SGLANG_PLUGINS"
            return Refusal.PLUGIN, f"weight updates would go unnoticed: {text}"
        if weights.mixed:
            text = "the weights were updated and SGLang's own tiers not emptied; flush the cache"
            return Refusal.WEIGHTS_CHANGED, text
        try:
            settings = read_settings(self._config.extra_config)
        except ConfigError as error:
            return Refusal.CONFIG, str(error)
        pools = getattr(self, "registered_pools", {})
        facts = read_facts(self._config, self.mem_pool_host, pools)
        return attach(settings, facts, self.mem_pool_host, private=not weights.in_files)

    def _replace(self, attachment: Attachment | None) -> None:
        before, self._attachment = self._attachment, attachment
        if before is not None and before.tier is not None:
            before.tier.close()

    def _announce(self, refusals: list[tuple[Refusal, str]], name: str = UNLISTED) -> None:
        """Log each reason once per attach, and export it for as long as it holds."""
        for reason, label in self._refused.items():
            metrics.CONVERSION_REFUSED.labels(label, reason.value).set(0)
        self._refused = {reason: name for reason, _ in refusals}
        stored = self._attachment is not None and self._attachment.tier is not None
        off = "conversion is off" if stored else "nothing is stored or converted"
        for reason, text in refusals:
            metrics.CONVERSION_REFUSED.labels(name, reason.value).set(1)
            _log.warning("kvxfer: %s (%s): %s", off, reason.value, text)
        if stored and not refusals:
            _log.info("kvxfer: attached as %s", self.name)

    # the data path

    @_answering(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages can be had, from the store's index alone.

        The others will not be asked for again, so why they cannot be had is counted here.
        """
        attachment = self._current()
        if attachment is None or attachment.tier is None:
            return 0
        plans = attachment.tier.find(keys)
        served = next((i for i, plan in enumerate(plans) if not plan.served), len(plans))
        if served < len(plans):
            attachment.tier.read(plans[served:], [])
        self._promises.keep(attachment.tier, plans[:served])
        return served

    @_answering(_none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Fill the pages at `host_indices`: native, derived, or converted now.

        ``extra_info.prefix_keys`` is not read: on this path SGLang leaves the pages of the last
        cached node out of it. Positions come from the blocks themselves.
        """
        attachment = self._current()
        if attachment is None or attachment.view is None:
            return [False] * len(keys)
        return self._read(attachment, keys, attachment.view.pages_at(host_indices))

    @_answering(lambda keys, *_, **__: [True] * len(keys))
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages that the engine computed itself.

        One False would make SGLang give up the rest of the prompt, so what became of each page is
        told by a counter and not by the answer.
        """
        attachment = self._current()
        if attachment is not None and attachment.view is not None:
            prefix = None if extra_info is None else extra_info.prefix_keys
            pages = attachment.view.pages_at(host_indices)
            self._write(attachment, keys, pages, None if prefix is None else len(prefix))
        return [True] * len(keys)

    def _current(self) -> Attachment | None:
        """The attachment, unless the engine computes with weights that nobody told us of."""
        attachment = self._attachment
        if attachment is None or attachment.facts.weights == weights_in_use():
            return attachment
        with self._changing:
            if self._attachment is attachment:
                self._replace(None)
                text = "the weights changed without this package's plug-in; attach storage again"
                self._announce([(Refusal.WEIGHTS_CHANGED, text)])
        return None

    def _read(self, attachment: Attachment, keys: list[str], pages: list[KvPage]) -> list[bool]:
        if attachment.tier is None:
            return [False] * len(keys)
        started = time.perf_counter()
        plans = self._promises.take(attachment.tier, keys)
        if plans is None:
            plans = attachment.tier.find(keys, whole_prompt=False)
        served = [result.served for result in attachment.tier.read(plans, pages)]
        size = attachment.tier.shape.payload_bytes
        self.flow.prefetched(sum(served), size, time.perf_counter() - started)
        return served

    def _write(
        self, attachment: Attachment, keys: list[str], pages: list[KvPage], first: int | None
    ) -> None:
        if attachment.tier is None:
            return
        if first is None and not self._warned_unplaced:
            self._warned_unplaced = True
            _log.warning(
                "kvxfer: SGLang does not say where pages stand in their prompt, so no sibling can "
                "use them; put hicache_storage_pass_prefix_keys: true and interface_v1: 1 into the "
                "extra config"
            )
        started = time.perf_counter()
        attachment.tier.write(keys, pages, first)
        size = attachment.tier.shape.payload_bytes
        self.flow.backed_up(len(keys), size, time.perf_counter() - started)

    # the generic interface, without interface_v1: pages come and go as flat copies

    @_answering(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """The flat pages of `keys`, None for those that cannot be had."""
        attachment = self._current()
        if attachment is None or attachment.view is None:
            return [None] * len(keys)
        pages = [attachment.view.flat_page(flat) for flat in target_locations]
        served = self._read(attachment, keys, pages)
        return [
            flat if there else None for flat, there in zip(target_locations, served, strict=True)
        ]

    @_answering(lambda *_, **__: True)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat pages; their positions are not known on this interface."""
        attachment = self._current()
        if attachment is not None and attachment.view is not None:
            pages = [attachment.view.flat_page(flat) for flat in values]
            self._write(attachment, keys, pages, None)
        return True

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        # docstring inherited
        page: torch.Tensor | None = self.batch_get([key], [target_location])[0]
        return page

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        # docstring inherited
        return self.batch_set([key], [value])

    def exists(self, key: str) -> bool:
        # docstring inherited
        return self.batch_exists([key]) == 1

    # models with sidecar pools: refused at attach, so never a hit

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """No hit: without every pool, pages alone are of no use to such a model."""
        return PoolTransferResult.empty()

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        # docstring inherited
        return {transfer.name: _none_of(transfer.keys or []) for transfer in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Reported as stored, so that SGLang goes on; nothing is."""
        return {transfer.name: [True] * len(transfer.keys or []) for transfer in transfers}
