"""The tier of one running model: which blocks can be had, getting them, keeping new ones.

::

    find   hashes -> native | derived | convertible (from which sibling) | why not
    read   native, derived:  store -> checksum -> the engine's page
           convertible:      sibling's block -> strip RoPE, map, apply RoPE -> the engine's page,
                             and in the background -> store, as derived
    write  the engine's page -> store, as native; derived blocks of the same hash give way

Nothing here raises into an engine: whatever goes wrong is a miss with a reason, and a counter.
Nor does it wait: `find` takes a second at most, `read` as long as the tier and the pair's policy
allow, on any store that waits for others.
`find` decides from the store alone, so that all ranks of a tensor-parallel group reach the same
verdict. All methods may be called from several threads at once.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from kvstore_xfer import metrics
from kvstore_xfer.blocks.header import BlockHeader, Provenance
from kvstore_xfer.blocks.key import FORMAT, NATIVE, UNPLACED, BlockKey
from kvstore_xfer.blocks.page import KvPage, byte_view
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.base import ReadRequest, WriteRequest, WriteStatus
from kvstore_xfer.store.deadline import within
from kvstore_xfer.tier.background import BackgroundWriter
from kvstore_xfer.tier.plan import BlockPlan, Planner, after_gap, own_after_gap, still_allowed
from kvstore_xfer.tier.policy import READ_SECONDS
from kvstore_xfer.tier.result import BlockResult, has_shape, read_failure, results_as_planned
from kvstore_xfer.tier.sources import SourceBlocks, SourceReader
from kvstore_xfer.tier.stages import Stages
from kvstore_xfer.tier.watch import Watcher
from kvstore_xfer.tracing import span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.blocks.identity import Identity
    from kvstore_xfer.blocks.key import Shard
    from kvstore_xfer.blocks.page import KvShape
    from kvstore_xfer.store.base import BlockStore
    from kvstore_xfer.tier.pair import Pair

    _Count = Callable[[float], None]

_sibling = attrgetter("sibling")
_log = logging.getLogger(__name__)
_GROUP_TOKENS = 1024  # converted together: large enough for the matrix units, small to pipeline
_QUEUE_BLOCKS = 1024  # derived blocks waiting to be stored; beyond that they are dropped, counted
_QUEUE_BYTES = 1 << 30  # together; a block of 256 tokens of a large model takes 64 MiB
_QUEUE_BLOCKS_AT_LEAST = 4
_FIND_SECONDS = 1.0


class Tier:
    """See the module docstring.

    Parameters
    ----------
    store
        Where blocks live; closed with the tier only when `owns_store`.
    name
        Short name of the target model, for metrics.
    identity, shard
        Whose blocks this engine's are, and which heads and layers this rank holds.
    shape
        Geometry of one block of this rank.
    pairs
        The siblings that may serve, in order of preference.
    layout
        The shards of all ranks of this engine; a block that one of them lacks is not found.
    read_seconds
        Longest time that one read may wait for stored blocks, native and derived; conversions have
        their policy's.

    `store_is_down`, when set, tells misses of a store that does not work from those of blocks that
    are not there.
    """

    def __init__(
        self,
        store: BlockStore,
        name: str,
        identity: Identity,
        shard: Shard,
        shape: KvShape,
        pairs: Sequence[Pair],
        *,
        layout: Sequence[Shard] = (),
        owns_store: bool = False,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self.name, self.identity, self.shape = name, identity, shape
        self.pairs = tuple(pairs)
        self._store = store
        self._owns_store = owns_store
        self._read_seconds = read_seconds
        self._shard = str(shard)
        self._shards = tuple(dict.fromkeys(str(part) for part in layout))
        self._planner = self._make_planner()
        self._prefill_rate = max((pair.prefill_rate for pair in self.pairs), default=0.0)
        self._stages = Stages(name)
        self._lookup_started = metrics.LOOKUPS.labels(name).inc
        self._saved_seconds = metrics.SAVED_SECONDS.labels(name).inc
        self._counters: dict[tuple[str, ...], tuple[_Count, _Count]] = {}
        self._sources = SourceReader(store, identity.block_tokens, self._stages)
        self._watcher = Watcher(
            store,
            identity,
            self._shard,
            shape,
            (shard.first_head, shard.last_head),
            self._sources,
            self._switch_off,
        )
        for pair in self.pairs:
            converter = pair.converter
            if converter is not None and hasattr(converter, "observe"):
                converter.observe = self._stages.observe
        self.store_is_down: Callable[[], bool] = lambda: False
        self._at_close: list[Callable[[], None]] = []
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="kvxfer-read-ahead")
        fitting = _QUEUE_BYTES // max(1, shape.payload_bytes)
        self._writer = BackgroundWriter(max(_QUEUE_BLOCKS_AT_LEAST, min(_QUEUE_BLOCKS, fitting)))

    def find(
        self, hashes: Sequence[str], *, whole_prompt: bool = True, gaps: bool = False
    ) -> list[BlockPlan]:
        """One plan per hash, in prefix order, from the store's index alone.

        The leading plans whose outcome is served are what `read` can be asked for. With
        `whole_prompt` the last hash ends the prompt, and the policy's minimum and hold-back apply;
        an engine that reads in batches sets it False for a batch of an earlier `find`. With `gaps`
        own blocks behind one that is missing are offered too, to an engine that may have that one
        itself.
        """
        if whole_prompt:
            self._lookup_started()
        started = time.perf_counter()
        with within(_FIND_SECONDS) as deadline:
            try:
                plans = self._find(hashes, whole_prompt=whole_prompt, gaps=gaps)
            except Exception:  # noqa: BLE001 - nothing may raise into an engine
                self._failed("find")
                plans = [BlockPlan(Outcome.MISSED, Reason.STORE_ERROR)] * len(hashes)
        if deadline.missed:
            plans = _absent_for(Reason.BUDGET, plans)
        elif deadline.unanswered or self.store_is_down():  # its index may know nothing of it
            plans = _absent_for(Reason.STORE_ERROR, plans)
        self._stages.observe("find", time.perf_counter() - started)
        return plans

    def read(
        self,
        plans: Sequence[BlockPlan],
        pages: Sequence[KvPage],
        first_block: int | None = None,
    ) -> list[BlockResult]:
        """Fill the engine's pages of the leading served plans; one result per plan.

        The first block that fails ends the prefix: later ones are reported as missed after a gap.
        An engine that knows the ordinal of the first plan's block in its sequence gives it as
        `first_block`; a sibling's block that stands elsewhere is then not converted.
        """
        started = time.perf_counter()
        try:
            results = self._read(plans, pages, first_block)
        except Exception:  # noqa: BLE001 - nothing may raise into an engine
            self._failed("read")
            results = [BlockResult(Outcome.MISSED, Reason.STORE_ERROR)] * len(plans)
        results = _until_gap(results)
        self._count(plans, results, time.perf_counter() - started)
        return results

    def write(
        self, hashes: Sequence[str], pages: Sequence[KvPage], first_block: int | None
    ) -> list[WriteStatus]:
        """Store native blocks; the pages may be reused as soon as this returns.

        `first_block` is the ordinal of the first page in its sequence, None when it is not
        certain: such blocks are served natively and never converted.
        """
        with self._stages.timed("write", len(hashes) * self.shape.payload_bytes):
            try:
                return self._write(hashes, pages, first_block)
            except Exception:  # noqa: BLE001 - nothing may raise into an engine
                self._failed("write")
                return [WriteStatus.ERROR] * len(hashes)

    def clear(self) -> int:
        """Delete this rank's blocks, native and derived, queued ones too; returns how many.

        What could not be deleted is counted as an error, and found again.
        """
        self._writer.drain()
        try:
            prefix = f"{FORMAT}/{self.identity.digest}/{self._shard}/"
            keys = [row.key for row in self._store.scan(prefix)]
            return sum(self._store.delete(keys))
        except Exception:  # noqa: BLE001 - nothing may raise into an engine
            self._failed("clear")
            return 0

    def discard(self, hashes: Sequence[str]) -> list[bool]:
        """Delete this rank's blocks of the hashes, native and derived; which of them were there."""
        kinds = [NATIVE, UNPLACED, *(pair.derived_kind for pair in self.pairs)]
        try:
            gone = self._store.delete([self._key(kind, name) for name in hashes for kind in kinds])
        except Exception:  # noqa: BLE001 - nothing may raise into an engine
            self._failed("discard")
            return [False] * len(hashes)
        width = len(kinds)
        return [any(gone[start : start + width]) for start in range(0, len(gone), width)]

    def flush(self) -> None:
        """Return when derived blocks of earlier reads are in the store, and samples compared."""
        self._writer.drain()
        self._watcher.flush()

    def close(self) -> None:
        """Store what is queued and stop the threads. Idempotent."""
        for action in self._at_close:
            action()
        self._watcher.close()
        self._writer.close()
        self._ahead.shutdown()
        if self._owns_store:
            self._store.close()

    def at_close(self, action: Callable[[], None]) -> None:
        """Call `action` when the tier is closed, before its store is."""
        self._at_close.append(action)

    def disable_conversion(self, reason: Reason) -> None:
        """Turn all pairs off from now on, also for plans made before; native blocks are served."""
        self.pairs = tuple(
            replace(pair, refusal=pair.refusal or reason, converter=None) for pair in self.pairs
        )
        self._planner = self._make_planner()

    def _make_planner(self) -> Planner:
        return Planner(self._store, self.identity, self._shard, self.pairs, self._shards)

    def _switch_off(self, off: Pair) -> None:
        self.pairs = tuple(
            replace(pair, refusal=Reason.RETENTION, converter=None)
            if pair.derived_kind == off.derived_kind
            else pair
            for pair in self.pairs
        )
        self._planner = self._make_planner()

    def _find(self, hashes: Sequence[str], *, whole_prompt: bool, gaps: bool) -> list[BlockPlan]:
        if time.monotonic() >= self._watcher.next_look:
            self._watcher.check_off(self.pairs)
        planner = self._planner
        plans = planner.plan(hashes, whole_prompt=whole_prompt, gaps=gaps)
        if not (whole_prompt and plans and plans[0].served):
            return plans
        close = own_after_gap if gaps else after_gap
        return close(self._watcher.decline_sampled(plans, planner.convertible))

    # read

    @torch.inference_mode()  # the engine's pages may be inference tensors
    def _read(
        self, plans: Sequence[BlockPlan], pages: Sequence[KvPage], first_block: int | None
    ) -> list[BlockResult]:
        plans = still_allowed(plans, self.pairs)
        results = results_as_planned(plans)
        leading = next((i for i, plan in enumerate(plans) if not plan.served), len(plans))
        stored = [i for i in range(leading) if plans[i].pair is None]
        for i, result in zip(stored, self._read_stored(stored, plans, pages), strict=True):
            results[i] = result
            if not result.served:
                leading = min(leading, i)
        convertible = [i for i in range(leading) if plans[i].pair is not None]
        if convertible:
            for i, result in self._convert_traced(convertible, plans, pages, first_block):
                results[i] = result
        return results

    def _convert_traced(
        self,
        indices: list[int],
        plans: Sequence[BlockPlan],
        pages: Sequence[KvPage],
        first_block: int | None,
    ) -> list[tuple[int, BlockResult]]:
        source, direction = plans[indices[0]].origin
        about: dict[str, str | int] = {
            "kvxfer.target": self.name,
            "kvxfer.source": source,
            "kvxfer.direction": direction,
            "kvxfer.blocks": len(indices),
            "kvxfer.tokens": len(indices) * self.identity.block_tokens,
        }
        with span("kvxfer.convert", about) as current:
            results = self._convert(indices, plans, pages, first_block)
            if current is not None:
                converted = sum(result.served for _, result in results)
                current.set_attribute("kvxfer.blocks_converted", converted)
        return results

    def _read_stored(
        self, indices: list[int], plans: Sequence[BlockPlan], pages: Sequence[KvPage]
    ) -> list[BlockResult]:
        """Native and derived blocks, straight into the engine's memory where its layout allows."""
        staged: dict[int, KvPage] = {}
        requests, results = [], []
        for i in indices:
            runs = pages[i].segments()
            if runs is None:
                staged[i] = KvPage.empty(self.shape)
                runs = staged[i].segments()
            requests.append(ReadRequest(plans[i].keys[0], runs))
        if not requests:
            return []
        started = time.perf_counter()
        with within(self._read_seconds) as deadline:
            answers = self._store.read(requests)
        size = len(requests) * self.shape.payload_bytes
        self._stages.observe("read", time.perf_counter() - started, size)
        for i, read in zip(indices, answers, strict=True):
            reason = read_failure(read.status)
            if reason is Reason.STORE_ERROR and deadline.missed:
                reason = Reason.BUDGET
            if reason is None and (read.header is None or not has_shape(read.header, self.shape)):
                reason = Reason.SHAPE_MISMATCH
            if reason is not None:
                results.append(BlockResult(Outcome.MISSED, reason))
                continue
            if i in staged:
                pages[i].copy_from(staged[i])
            results.append(BlockResult(plans[i].outcome))
        return results

    def _convert(
        self,
        indices: list[int],
        plans: Sequence[BlockPlan],
        pages: Sequence[KvPage],
        first_block: int | None,
    ) -> list[tuple[int, BlockResult]]:
        """Convert in groups; the next group's source blocks are read while this one is mapped."""
        groups = _groups(indices, plans, max(1, _GROUP_TOKENS // self.identity.block_tokens))
        results: list[tuple[int, BlockResult]] = []
        made: list[Callable[[], None]] = []
        started = time.monotonic()
        origin = None if first_block is None else first_block * self.identity.block_tokens
        ahead = [self._read_ahead(g, plans, origin, started) for g in groups[:1]]
        for number, group in enumerate(groups):
            pair = plans[group[0]].pair
            if pair is None or pair.converter is None:
                break
            read = _by(ahead.pop(), started + pair.policy.budget_seconds)
            if read is None:
                results += [(i, BlockResult(Outcome.DECLINED, Reason.BUDGET)) for i in group]
                break
            ahead += [
                self._read_ahead(g, plans, read.origin, started)
                for g in groups[number + 1 : number + 2]
            ]
            members = group[: read.count]
            results += self._convert_group(pair, members, read, plans, pages, made)
            if read.failure is not None:
                results.append((group[read.count], read.failure))
                break
            if not results[-1][1].served:
                break
        for future in ahead:
            future.cancel()
        # Only now: storing competes for the processor with the conversion the engine waits for.
        for job in made:
            if not self._writer.submit(job):
                self._wrote("derived", "dropped")
        return _complete(results, indices)

    def _read_ahead(
        self, group: list[int], plans: Sequence[BlockPlan], origin: int | None, started: float
    ) -> Future[SourceBlocks]:
        """On the other thread; one that nobody waits for any more ends, and makes room."""

        def read() -> SourceBlocks:
            pair = plans[group[0]].pair
            budget = 0.0 if pair is None else pair.policy.budget_seconds
            with within(started + budget - time.monotonic()):
                return self._sources.read(group, plans, origin)

        return self._ahead.submit(read)

    def _convert_group(
        self,
        pair: Pair,
        members: list[int],
        source: SourceBlocks,
        plans: Sequence[BlockPlan],
        pages: Sequence[KvPage],
        made: list[Callable[[], None]],
    ) -> list[tuple[int, BlockResult]]:
        """Map the members' source blocks into their pages, as one run of tokens; jobs that store
        the results are added to `made`."""
        if not members or source.page is None or pair.converter is None:
            return []
        run = KvPage.empty_run(self.shape, len(members))
        try:
            self._stages.convert(pair.converter, source.page, source.first, run)
        except Exception:  # noqa: BLE001 - nothing may raise into an engine
            self._failed("convert")
            return [(i, BlockResult(Outcome.DECLINED, Reason.CONVERSION_ERROR)) for i in members]
        tokens = self.identity.block_tokens
        blocks = list(zip(members, run.split(tokens), strict=True))
        with self._stages.timed("copy_out", len(members) * self.shape.payload_bytes):
            for i, target in blocks:
                pages[i].copy_from(target)
        for number, (i, target) in enumerate(blocks):
            first = source.first + number * tokens
            made.append(partial(self._store_derived, pair, plans[i].chain_hash, first, target))
        return [(i, BlockResult(Outcome.CONVERTED)) for i in members]

    # write

    def _write(
        self, hashes: Sequence[str], pages: Sequence[KvPage], first_block: int | None
    ) -> list[WriteStatus]:
        kind = UNPLACED if first_block is None else NATIVE
        tokens = self.identity.block_tokens
        requests = []
        for number, (chain_hash, page) in enumerate(zip(hashes, pages, strict=True)):
            first = None if first_block is None else (first_block + number) * tokens
            requests.append(self._request(self._key(kind, chain_hash), page, first))
        statuses = self._store.write(requests)
        for status in statuses:
            self._wrote(kind, status.value)
        kept = [
            chain_hash
            for chain_hash, status in zip(hashes, statuses, strict=True)
            if status in (WriteStatus.STORED, WriteStatus.EXISTS)
        ]
        kinds = [pair.derived_kind for pair in self.pairs]
        if kind == NATIVE:
            kinds.append(UNPLACED)
        derived = [self._key(lesser, name) for lesser in kinds for name in kept]
        stale = [
            key for key, there in zip(derived, self._store.exists(derived), strict=True) if there
        ]
        if stale:
            self._store.delete(stale)
        if kind == NATIVE:
            self._watcher.arrived(kept)
        return statuses

    def _store_derived(self, pair: Pair, chain_hash: str, first: int, page: KvPage) -> None:
        if any(self._store.exists([self._key(kind, chain_hash) for kind in (NATIVE, UNPLACED)])):
            return
        provenance = Provenance(pair.identity.digest, pair.mapper.digest)
        key = self._key(pair.derived_kind, chain_hash)
        status = self._store.write([self._request(key, page, first, provenance)])[0]
        self._wrote("derived", status.value)

    def _request(
        self, key: str, page: KvPage, first: int | None, provenance: Provenance | None = None
    ) -> WriteRequest:
        shape = self.shape
        header = BlockHeader(
            key=key,
            payload_bytes=shape.payload_bytes,
            tokens=shape.tokens,
            layers=shape.layers,
            heads=shape.heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dtype=str(shape.dtype).removeprefix("torch."),
            first_token=first,
            provenance=provenance,
        )
        runs = page.segments()
        if runs is None:
            runs = [byte_view(part.cpu().contiguous()) for part in (page.keys, page.values)]
        return WriteRequest(header, runs)

    def _key(self, kind: str, chain_hash: str) -> str:
        return str(BlockKey(self.identity.digest, self._shard, kind, chain_hash))

    # bookkeeping

    def _count(
        self, plans: Sequence[BlockPlan], results: list[BlockResult], seconds: float
    ) -> None:
        tokens = self.identity.block_tokens
        served = start = 0
        while start < len(plans):
            end = _alike_until(plans, results, start)
            count_blocks, count_tokens = self._answer_counters(plans[start], results[start])
            count_blocks(end - start)
            count_tokens((end - start) * tokens)
            served += end - start if results[start].served else 0
            start = end
        if served:
            self._stages.observe("serve", seconds, served * self.shape.payload_bytes)
            if self._prefill_rate:
                saved = served * tokens / self._prefill_rate - seconds
                self._saved_seconds(max(0.0, saved))

    def _answer_counters(self, plan: BlockPlan, result: BlockResult) -> tuple[_Count, _Count]:
        """Count blocks, and tokens, answered so; finding the counters anew takes microseconds."""
        # Plain strings: an enumeration's member is hashed by Python code.
        about = (*plan.origin, result.outcome._value_, result.reason._value_)
        found = self._counters.get(about)
        if found is None:
            labels = (self.name, *about)
            counters = (metrics.LOOKUP_BLOCKS, metrics.LOOKUP_TOKENS)
            blocks, tokens = (counter.labels(*labels).inc for counter in counters)
            found = (blocks, tokens)
            self._counters[about] = found
        return found

    def _wrote(self, kind: str, status: str) -> None:
        metrics.WRITTEN_BLOCKS.labels(self.name, kind, status).inc()

    def _failed(self, call: str) -> None:
        metrics.ERRORS.labels(self.name, call).inc()
        _log.exception("%s failed; answered as a miss", call)


def _until_gap(results: list[BlockResult]) -> list[BlockResult]:
    """After the first block that was not served, nothing can be used."""
    end = next((i for i, result in enumerate(results) if not result.served), len(results))
    gap = BlockResult(Outcome.MISSED, Reason.AFTER_GAP)
    return [r if i <= end or not r.served else gap for i, r in enumerate(results)]


def _alike_until(plans: Sequence[BlockPlan], results: list[BlockResult], start: int) -> int:
    """Where the run of blocks ends that are counted like the one at `start`."""
    first, sibling = results[start], plans[start].sibling
    if start == 0 and results.count(first) == len(results) and not any(map(_sibling, plans)):
        return len(results)  # nobody has any: as good as free
    end = start
    for plan, result in islice(zip(plans, results, strict=True), start, None):
        alike = result.outcome is first.outcome and result.reason is first.reason
        if not alike or plan.sibling is not sibling:
            break
        end += 1
    return end


def _absent_for(reason: Reason, plans: list[BlockPlan]) -> list[BlockPlan]:
    """Of what was not found it is not known that it is not there."""
    return [replace(p, reason=reason) if p.reason is Reason.ABSENT else p for p in plans]


def _by(future: Future[SourceBlocks], deadline: float) -> SourceBlocks | None:
    """The result, None when it is not there by the deadline (of `time.monotonic`)."""
    left = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
    try:
        result = future.result(left)
    except FutureTimeoutError:
        future.cancel()
        return None
    return result if time.monotonic() < deadline else None


def _complete(
    results: list[tuple[int, BlockResult]], indices: list[int]
) -> list[tuple[int, BlockResult]]:
    """Blocks that were not come to, because an earlier one failed, are after a gap."""
    known = {i for i, _ in results}
    gap = BlockResult(Outcome.MISSED, Reason.AFTER_GAP)
    return results + [(i, gap) for i in indices if i not in known]


def _groups(indices: list[int], plans: Sequence[BlockPlan], size: int) -> list[list[int]]:
    """Runs of neighbouring blocks of one pair, at most `size` long."""
    groups: list[list[int]] = []
    for i in indices:
        same = groups and plans[groups[-1][0]].pair is plans[i].pair
        if same and groups[-1][-1] == i - 1 and len(groups[-1]) < size:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
