"""Retention in production: sampled prefixes are left to the engine, and compared afterwards.

::

    find    a sampled prompt: its derived and convertible blocks are declined (`Reason.SAMPLED`)
    write   the engine's own blocks of it arrive
    here    source blocks -> convert -> compare with the native ones -> estimate of retention
            -> below the threshold for long enough: an off record in the store

Which prompts are sampled follows from their hashes, and whether a pair is off from the store, so
that all ranks decide alike; within the second between two looks for off records they may differ, as
they may about an eviction. A pair that is off stays off, across restarts, until `kvxfer check` has
been run again. The samples are in the store too: a restart goes on from them, and all engines of
one model add to them.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import xxhash

from kvstore_xfer import metrics
from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.blocks.key import NATIVE, RECORD, BlockKey
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.gate.relation import MIN_SAMPLES, compare
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest
from kvstore_xfer.tier.background import BackgroundWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.blocks.identity import Identity
    from kvstore_xfer.blocks.page import KvShape
    from kvstore_xfer.gate.relation import Comparison
    from kvstore_xfer.gate.score import Interval
    from kvstore_xfer.gate.watch import WatchRecord
    from kvstore_xfer.store.base import BlockStore
    from kvstore_xfer.tier.pair import Pair
    from kvstore_xfer.tier.plan import BlockPlan
    from kvstore_xfer.tier.sources import SourceReader

_log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0  # between looks for off records
PATIENCE = 4  # samples in a row whose estimate is too low
KEPT_SAMPLES = 256  # the estimate is of the latest traffic
_PENDING_BLOCKS = 4096  # sampled blocks whose native ones have not arrived
_QUEUED_RUNS = 8
_RUN_TOKENS = 1024  # compared together at most


def is_sampled(chain_hash: str, share: float) -> bool:
    """Whether a prompt that ends with this block is left to the engine; the same on every rank."""
    drawn = xxhash.xxh64_intdigest(f"kvxfer-sample:{chain_hash}".encode()) / 2.0**64
    return drawn < share


class Retention:
    """The running estimate of one pair. Not thread-safe: one thread compares."""

    def __init__(self, record: WatchRecord, threshold: float | None) -> None:
        self.record = record
        self.threshold = record.relation.threshold if threshold is None else threshold
        self.samples: deque[float] = deque(maxlen=KEPT_SAMPLES)
        self.compared = 0
        self._low_in_a_row = 0

    def add(self, x: float) -> Interval:
        self.samples.append(x)
        self.compared += 1
        interval = self.record.relation.estimate(self.samples)
        enough = self.compared >= MIN_SAMPLES
        self._low_in_a_row = self._low_in_a_row + 1 if interval.low < self.threshold else 0
        if not enough:
            self._low_in_a_row = min(self._low_in_a_row, PATIENCE - 1)
        return interval

    @property
    def too_low(self) -> bool:
        """The lower bound stayed under the threshold."""
        return self._low_in_a_row >= PATIENCE

    def encode(self) -> bytes:
        state = {
            "samples": list(self.samples),
            "compared": self.compared,
            "low_in_a_row": self._low_in_a_row,
        }
        return json.dumps(state).encode()

    def restore(self, payload: bytes) -> None:
        """Go on from what `encode` gave. Raises ValueError for anything else."""
        state = json.loads(payload)
        try:
            samples = [float(x) for x in state["samples"]]
            compared, low = int(state["compared"]), int(state["low_in_a_row"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no samples: {error}") from None
        if not all(math.isfinite(x) for x in samples) or compared < len(samples) or low < 0:
            raise ValueError("samples that cannot be")
        self.samples = deque(samples, KEPT_SAMPLES)
        self.compared, self._low_in_a_row = compared, low


@dataclass(frozen=True)
class _Sampled:
    pair: Pair
    plan: BlockPlan  # how the block would be converted


class Watcher:
    """The sampling of one tier.

    Parameters
    ----------
    store, identity, shard, shape
        Those of the tier; `shard` is also the part of the probes that this rank compares.
    heads
        Half-open range of the target's KV heads that this rank holds.
    sources
        Reads the sibling's blocks.
    switched_off
        Called with a pair that has just been found to be off.
    """

    def __init__(
        self,
        store: BlockStore,
        identity: Identity,
        shard: str,
        shape: KvShape,
        heads: tuple[int, int],
        sources: SourceReader,
        switched_off: Callable[[Pair], None],
    ) -> None:
        self._store, self._identity, self._shard, self._shape = store, identity, shard, shape
        self._heads, self._sources, self._switched_off = heads, sources, switched_off
        self._pending: OrderedDict[str, _Sampled] = OrderedDict()
        self._lock = threading.Lock()
        self._retention: dict[str, Retention] = {}
        self._off: set[str] = set()
        self._known: tuple[Sequence[Pair], list[Pair], list[str]] = ((), [], [])
        self.next_look = 0.0
        self._jobs = BackgroundWriter(_QUEUED_RUNS)

    def close(self) -> None:
        self._jobs.close()

    def flush(self) -> None:
        """Return when everything that has arrived is compared."""
        self._jobs.drain()

    # off records

    def check_off(self, pairs: Sequence[Pair]) -> None:
        """Turn off the pairs that the store says are off; keep their records in use there.

        Due at `next_look` (of `time.monotonic`): asking the store costs as much as many a lookup.
        """
        self.next_look = time.monotonic() + LOOK_SECONDS
        if pairs is not self._known[0]:
            known = [pair for pair in pairs if pair.watch is not None]
            self._known = (pairs, known, [self._off_key(pair) for pair in known])
        _, watched, keys = self._known
        if not watched:
            return
        if not self._off.intersection(keys) and not any(self._store.exists(keys)):
            return
        # Reading, unlike asking, counts as a use: a record in use is not evicted.
        for pair, key, found in zip(
            watched, keys, self._store.read([ReadRequest(key) for key in keys]), strict=True
        ):
            if key in self._off:
                if found.status is ReadStatus.MISSING:
                    self._record_off(pair, "the record was gone from the store")
            elif found.status is ReadStatus.OK:
                self._turn_off(pair, (found.payload or b"").decode(errors="replace"))

    def _off_key(self, pair: Pair) -> str:
        return self._record_key("off", pair, "whole")

    def _record_key(self, what: str, pair: Pair, shard: str) -> str:
        """A check made anew has records of its own."""
        check = "" if pair.watch is None else pair.watch.check_id
        name = f"{what}-{pair.mapper.digest}-{check}"
        return str(BlockKey(self._identity.digest, shard, RECORD, name))

    def _record_off(self, pair: Pair, why: str) -> None:
        labels = dict(zip(("source", "target", "direction"), pair.labels, strict=True))
        payload = json.dumps({**labels, "why": why, "at": time.time()}).encode()
        self._write_record(self._off_key(pair), payload)

    def _write_record(self, key: str, payload: bytes) -> None:
        header = BlockHeader(key=key, payload_bytes=len(payload))
        self._store.write([WriteRequest(header, [memoryview(payload)])], overwrite=True)

    def _turn_off(self, pair: Pair, why: str) -> None:
        key = self._off_key(pair)
        if key in self._off:
            return
        self._off.add(key)
        metrics.SWITCHED_OFF.labels(*pair.labels).set(1)
        metrics.GATE_OPEN.labels(*pair.labels).set(0)
        _log.error(
            "kvxfer: pair %s -> %s is SWITCHED OFF and stays off: its retention in production is "
            "too low (%s); run 'kvxfer check' on its mapper and restart the engine",
            pair.name,
            pair.target_name,
            why,
        )
        self._switched_off(pair)
        self.next_look = 0.0  # the record may be gone, or not have been written

    # sampling

    def decline_sampled(
        self,
        plans: list[BlockPlan],
        convertible: Callable[[list[str], Pair], dict[str, BlockPlan]],
    ) -> list[BlockPlan]:
        """The plans of a whole prompt, its converted part declined when the prompt is sampled.

        `convertible` says how blocks that are there as derived ones would be converted.
        """
        end = next((i for i, plan in enumerate(plans) if not plan.served), len(plans))
        made = [i for i in range(end) if plans[i].outcome is not Outcome.NATIVE]
        if not made:
            return plans
        pair = plans[made[0]].sibling
        if pair is None or pair.watch is None or pair.converter is None:
            return plans
        last = plans[made[-1]].chain_hash
        if not is_sampled(last, pair.policy.sampled_share):
            return plans
        run = range(made[0], end)
        derived = [plans[i].chain_hash for i in run if plans[i].outcome is Outcome.DERIVED]
        sources = {plans[i].chain_hash: plans[i] for i in run if plans[i].pair is pair}
        sources |= convertible(derived, pair)
        self._expect(pair, sources)
        metrics.SAMPLES.labels(*pair.labels, "declined").inc()
        return [
            replace(
                plan,
                outcome=Outcome.DECLINED,
                reason=Reason.SAMPLED,
                keys=(),
                shards=(),
                pair=None,
            )
            if i in run and plan.outcome is not Outcome.NATIVE
            else plan
            for i, plan in enumerate(plans)
        ]

    def _expect(self, pair: Pair, sources: dict[str, BlockPlan]) -> None:
        with self._lock:
            for chain_hash, plan in sources.items():
                self._pending[chain_hash] = _Sampled(pair, plan)
            while len(self._pending) > _PENDING_BLOCKS:
                self._pending.popitem(last=False)

    # comparing

    def arrived(self, hashes: Sequence[str]) -> None:
        """The engine's own blocks are in the store; neighbours of one sample are compared."""
        if not self._pending:
            return
        longest = max(1, _RUN_TOKENS // self._identity.block_tokens)
        runs: list[list[_Sampled]] = [[]]
        with self._lock:
            for chain_hash in hashes:
                sampled = self._pending.pop(chain_hash, None)
                full = len(runs[-1]) >= longest
                if sampled is None or full or (runs[-1] and runs[-1][0].pair is not sampled.pair):
                    runs.append([])
                if sampled is not None:
                    runs[-1].append(sampled)
        for run in runs:
            if run and not self._jobs.submit(lambda run=run: self._compare(run)):  # type: ignore[misc]
                metrics.SAMPLES.labels(*run[0].pair.labels, "dropped").inc()

    @torch.inference_mode()
    def _compare(self, run: list[_Sampled]) -> None:
        pair = run[0].pair
        comparison = self._comparison(pair, [sampled.plan for sampled in run])
        if comparison is None or pair.watch is None:
            metrics.SAMPLES.labels(*pair.labels, "dropped").inc()
            return
        metrics.SAMPLES.labels(*pair.labels, "compared").inc()
        _export(pair, comparison)
        retention = self._recalled(pair, pair.watch)
        interval = retention.add(comparison.x)
        self._write_record(self._record_key("samples", pair, self._shard), retention.encode())
        metrics.RETENTION_THRESHOLD.labels(*pair.labels).set(retention.threshold)
        metrics.set_bounds(metrics.OBSERVED_RETENTION, pair.labels, vars(interval))
        if retention.too_low and self._off_key(pair) not in self._off:
            why = (
                f"{interval.mean:.4f} [{interval.low:.4f}, {interval.high:.4f}] after "
                f"{retention.compared} samples, threshold {retention.threshold:.4f}"
            )
            self._record_off(pair, why)
            self._turn_off(pair, why)

    def _recalled(self, pair: Pair, record: WatchRecord) -> Retention:
        """The samples of this rank's heads so far, by whichever process; else those of this one."""
        key = self._record_key("samples", pair, self._shard)
        retention = self._retention.setdefault(key, Retention(record, pair.policy.min_retention))
        found = self._store.read([ReadRequest(key)])[0]
        if found.status is ReadStatus.OK:
            try:
                retention.restore(found.payload or b"")
            except ValueError as error:
                _log.warning("pair %s -> %s: its samples: %s", *pair.labels[:2], error)
        return retention

    def _comparison(self, pair: Pair, plans: list[BlockPlan]) -> Comparison | None:
        """None when blocks of either side are gone, or the run is too short to say anything."""
        source = self._sources.read(range(len(plans)), plans)
        native = self._native([plan.chain_hash for plan in plans[: source.count]])
        rope = pair.mapper.target.rope
        if source.page is None or native is None or rope is None or pair.converter is None:
            return None
        if pair.watch is None:
            return None
        mapped = KvPage.empty_run(self._shape, source.count)
        pair.converter.convert([source.page], [source.first], [mapped])
        probes = pair.watch.probes[:, slice(*self._heads)].float()
        return compare(native, mapped, probes, rope, source.first)

    def _native(self, hashes: list[str]) -> KvPage | None:
        if not hashes:
            return None
        blocks = [KvPage.empty(self._shape) for _ in hashes]
        keys = [str(BlockKey(self._identity.digest, self._shard, NATIVE, name)) for name in hashes]
        requests = [
            ReadRequest(key, block.segments(), touch=False)
            for key, block in zip(keys, blocks, strict=True)
        ]
        if any(read.status is not ReadStatus.OK for read in self._store.read(requests)):
            return None
        parts = [block.keys for block in blocks], [block.values for block in blocks]
        return KvPage(torch.cat(parts[0], 1), torch.cat(parts[1], 1))


def _export(pair: Pair, comparison: Comparison) -> None:
    cosines = comparison.cosines
    metrics.SAMPLE_COSINE.labels(*pair.labels, "mean").set(float(cosines.mean()))
    metrics.SAMPLE_COSINE.labels(*pair.labels, "lowest").set(float(cosines.min()))
    for component, errors in (
        ("keys", comparison.key_errors),
        ("values", comparison.value_errors),
    ):
        for layer, error in enumerate(errors.tolist()):
            metrics.SAMPLE_ERROR.labels(*pair.labels, component, str(layer)).set(error)
