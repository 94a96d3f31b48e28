"""`KvxferL2Adapter`: the tier as an L2 adapter plug-in of LMCache's multiprocess server.

LMCache's store and prefetch controllers submit tasks and poll for results; every task runs on a
thread of ours and is completed exactly once, in bounded time. Nothing raises into the server,
whatever fails is a miss, a reason, a counter.

Blocks belong to the tier: how many there may be and which go first is the store's business, so
this adapter locks nothing and declares no capacity to LMCache.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvstore_xfer import metrics
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.base import WriteStatus
from kvxfer_lmcache.attach import UNLISTED, Attachment, Attachments
from kvxfer_lmcache.objects import (
    ObjectPage,
    Origin,
    block_name,
    bytes_of,
    form_of,
    origin_of,
)
from kvxfer_lmcache.positions import Positions
from kvxfer_lmcache.refusals import Refusal, lmcache_version
from kvxfer_lmcache.settings import Settings, read_settings
from kvxfer_lmcache.start import log_as
from kvxfer_lmcache.tasks import Lane

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.tier.plan import BlockPlan
    from kvstore_xfer.tier.tier import Tier
    from kvxfer_lmcache.tasks import Lease

_THREADS = {"store": 2, "lookup": 2, "load": 4}
_BLEND = "lmcache.v1.multiprocess.modules.blend"


class KvxferL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not typed here
    """See the module docstring. `params` are the operator's ``adapter_params``."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__(max_capacity_bytes=0)
        log_as(init_logger)
        try:
            settings, wrong = read_settings(params), None
        except ConfigError as error:
            settings, wrong = Settings(Path("family.yaml")), error
        self.positions = Positions()
        self.attachments = Attachments(settings.manifest, wrong=wrong)
        self._lookups: Lane[Bitmap] = self._lane("lookup", settings)
        self._loads: Lane[Bitmap] = self._lane("load", settings)
        self._stores: Lane[L2StoreResult] = self._lane("store", settings)
        self._opening_seconds = settings.seconds["lookup"] / 2
        self._storing_seconds = settings.seconds["store"] / 2
        metrics.set_build_info("lmcache", lmcache_version() or "")

    def _lane(self, kind: str, settings: Settings) -> Lane[Any]:
        def count(why: str) -> None:
            metrics.ERRORS.labels(UNLISTED, f"lmcache_{kind}_{why}").inc()

        return Lane(kind, _THREADS[kind], settings.seconds[kind], count)

    # event descriptors

    def get_store_event_fd(self) -> int:
        # docstring inherited
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        # docstring inherited
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        # docstring inherited
        return self._loads.fd

    # store

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store chunks that an engine computed; their places are known from its lookup."""
        keys, objects = list(keys), list(objects)
        return self._stores.submit(
            lambda lease: self._store(keys, objects, lease), L2StoreResult(False, 0)
        )

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        # docstring inherited
        return self._stores.take_all()

    def _store(self, keys: list[Any], objects: list[Any], lease: Lease) -> L2StoreResult:
        stored: list[Any] = []
        sizes: list[int] = []
        kept = True
        for origin, members in self._by_origin(keys, objects).items():
            attachment = self.attachments.get(origin, self._storing_seconds)
            if attachment is None or attachment.tier is None:
                kept = False
                continue
            for first, run in self._runs(attachment, members, keys):
                pages = [_copied(attachment, objects[i], lease) for i in run]
                names = [block_name(keys[i].chunk_hash, keys[i].cache_salt) for i in run]
                statuses = attachment.tier.write(names, pages, first)
                for i, status in zip(run, statuses, strict=True):
                    kept = kept and status in (WriteStatus.STORED, WriteStatus.EXISTS)
                    if status is WriteStatus.STORED:
                        stored.append(keys[i])
                        sizes.append(attachment.tier.shape.payload_bytes)
        if stored:
            self._notify_keys_stored(stored, sizes)
        return L2StoreResult(kept, sum(sizes))

    # lookup

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Which chunks can be had; `keys` are rows, each a whole prompt on one rank.

        The rows teach the places of all chunks here and now: the stores that follow need them.
        """
        keys = list(keys)
        rows: dict[tuple[int, int], list[int]] = {}
        for i, key in enumerate(keys):
            rows.setdefault((key.object_group_id, key.kv_rank), []).append(i)
        if _BLEND in sys.modules:
            text = (
                "CacheBlend uses chunks at other places than they were computed at; start "
                "LMCache without --engine-type blend"
            )
            self.attachments.refuse(Refusal.CACHE_BLEND, text)
        elif self.attachments.configured:
            self._learn([keys[i].chunk_hash for i in row] for row in rows.values())
        descriptions = dict(group_layout_descs)
        return self._lookups.submit(
            lambda _: self._look_up(keys, list(rows.values()), descriptions), Bitmap(len(keys))
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        # docstring inherited
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing is locked: a block that is evicted meanwhile is a miss."""

    def _learn(self, rows: Iterator[list[bytes]] | Sequence[list[bytes]]) -> None:
        for row in rows:
            self.positions.learn(row)
        if self.positions.conflicts:
            self.distrust("a chunk was listed at two places of its prompt")

    def distrust(self, text: str) -> None:
        """Never again believe a chunk's place: something is not as this package believes."""
        self.attachments.refuse(Refusal.POSITIONS, text)

    def _look_up(
        self, keys: list[Any], rows: list[list[int]], descriptions: dict[int, Any]
    ) -> Bitmap:
        found = Bitmap(len(keys))
        for row in rows:
            first = keys[row[0]]
            description = descriptions.get(first.object_group_id)
            if description is None:
                continue
            origin = origin_of(first, description.shapes, description.dtypes)
            attachment = self.attachments.get(origin, self._opening_seconds)
            if attachment is None or attachment.tier is None:
                self.attachments.count_missed(origin, attachment, len(row))
                continue
            names = [block_name(keys[i].chunk_hash, keys[i].cache_salt) for i in row]
            plans = attachment.tier.find(names, gaps=True)
            for i, plan in zip(row, plans, strict=True):
                if plan.served:
                    found.set(i)
            # The others will not be asked for, so why they cannot be had is counted here.
            attachment.tier.read([plan for plan in plans if not plan.served], [])
        return found

    # load

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Fill the objects: native, derived, or converted now."""
        keys, objects = list(keys), list(objects)
        return self._loads.submit(lambda lease: self._load(keys, objects, lease), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        # docstring inherited
        return self._loads.take(task_id)

    def _load(self, keys: list[Any], objects: list[Any], lease: Lease) -> Bitmap:
        loaded = Bitmap(len(keys))
        for origin, members in self._by_origin(keys, objects).items():
            attachment = self.attachments.get(origin, self._opening_seconds)
            if attachment is None or attachment.tier is None:
                continue
            for first, run in self._runs(attachment, members, keys):
                names = [block_name(keys[i].chunk_hash, keys[i].cache_salt) for i in run]
                pages: list[KvPage] = [
                    ObjectPage(attachment.layout, bytes_of(objects[i]), lease) for i in run
                ]
                plans = _plans(attachment.tier, names, first)
                results = attachment.tier.read(plans, pages, first)
                for i, result in zip(run, results, strict=True):
                    if result.served:
                        loaded.set(i)
        accessed = [key for i, key in enumerate(keys) if loaded.test(i)]
        if accessed:
            self._notify_keys_accessed(accessed)
        return loaded

    # both

    @staticmethod
    def _by_origin(keys: list[Any], objects: list[Any]) -> dict[Origin, list[int]]:
        grouped: dict[Origin, list[int]] = {}
        for i, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            grouped.setdefault(origin_of(key, *form_of(memory)), []).append(i)
        return grouped

    def _runs(
        self, attachment: Attachment, members: list[int], keys: list[Any]
    ) -> list[tuple[int | None, list[int]]]:
        """Runs of consecutive chunks of one tenant, with the ordinal of their first chunk.

        Chunks without a certain place are runs of their own.
        """
        placed: list[tuple[str, int, int]] = []
        runs: list[tuple[int | None, list[int]]] = []
        for i in members:
            place = self.positions.of(keys[i].chunk_hash) if attachment.placed else None
            if place is None:
                runs.append((None, [i]))
            else:
                placed.append((keys[i].cache_salt, place, i))
        last: tuple[str, int] | None = None
        for salt, place, i in sorted(placed):
            if last == (salt, place - 1):
                runs[-1][1].append(i)
            else:
                runs.append((place, [i]))
            last = (salt, place)
        return runs

    # the rest

    def delete(self, keys: list[Any]) -> None:
        """Drop the keys' blocks, native and derived; on a thread of its own."""
        by_rank: dict[tuple[str, int, int], list[Any]] = {}
        for key in keys:
            rank = (str(key.model_name), key.kv_rank >> 16 & 0xFF, int(key.object_group_id))
            by_rank.setdefault(rank, []).append(key)
        threading.Thread(target=self._delete, args=(by_rank,), daemon=True).start()

    def _delete(self, by_rank: dict[tuple[str, int, int], list[Any]]) -> None:
        for rank, keys in by_rank.items():
            names = [block_name(key.chunk_hash, key.cache_salt) for key in keys]
            for tier in self.attachments.tiers(*rank):
                gone = tier.discard(names)
                deleted = [key for key, there in zip(keys, gone, strict=True) if there]
                self._notify_keys_deleted(deleted, [tier.shape.payload_bytes] * len(deleted))

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status page: engines, whether they are converted for, what waits."""
        lanes: dict[str, Lane[Any]] = {
            "stores": self._stores,
            "lookups": self._lookups,
            "loads": self._loads,
        }
        return {
            "is_healthy": self.attachments.usable,
            "type": type(self).__name__,
            "engines": self.attachments.report(),
            "attaching": self.attachments.attaching(),
            "waiting": {name: lane.waiting for name, lane in lanes.items()},
        }

    def close(self) -> None:
        """Complete every task, store what is queued, close the store."""
        for lane in (self._lookups, self._loads, self._stores):
            lane.close()
        self.attachments.close()


def _plans(tier: Tier, names: list[str], first: int | None) -> list[BlockPlan]:
    """Plans of a run; without a certain place nothing is converted."""
    plans = tier.find(names, whole_prompt=False)
    if first is not None:
        return plans
    return [
        plan
        if plan.pair is None
        else replace(
            plan, outcome=Outcome.DECLINED, reason=Reason.POSITION_UNKNOWN, keys=(), pair=None
        )
        for plan in plans
    ]


def _copied(attachment: Attachment, memory: Any, lease: Lease) -> KvPage:
    """The object's block in memory of our own: writing it may outlast the task."""
    with lease.held():
        return attachment.layout.unpack(bytes_of(memory).clone())
