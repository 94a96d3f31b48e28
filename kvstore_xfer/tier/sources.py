"""Reading a sibling's blocks for conversion: shards put together, headers and positions checked."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.identity import block_shape
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.base import ReadRequest
from kvstore_xfer.tier.result import BlockResult, has_shape, read_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.store.base import BlockStore, ReadResult
    from kvstore_xfer.tier.pair import Pair
    from kvstore_xfer.tier.plan import BlockPlan
    from kvstore_xfer.tier.stages import Stages


@dataclass
class SourceBlocks:
    """The leading blocks of a group that can be converted, and why the next one cannot.

    `page` holds them one after the other; its first token stands at position `first`. `origin` is
    the position that the headers give the first token of the first plan of the whole read.
    """

    page: KvPage | None = None
    first: int = 0
    count: int = 0
    failure: BlockResult | None = None
    origin: int | None = None


class SourceReader:
    """Reads groups of source blocks of one pair."""

    def __init__(self, store: BlockStore, block_tokens: int, stages: Stages) -> None:
        self._store = store
        self._tokens = block_tokens
        self._stages = stages

    def read(
        self, group: Sequence[int], plans: Sequence[BlockPlan], origin: int | None = None
    ) -> SourceBlocks:
        """Read the source blocks of ``plans[i] for i in group``: neighbours, all of one pair.

        Positions come from the headers and must follow the order of the plans; `origin` is that of
        an earlier group.
        """
        pair = plans[group[0]].pair
        blocks = SourceBlocks(origin=origin)
        if pair is None:
            return blocks
        blocks.page = KvPage.empty_run(pair.source_shape, len(group))
        pages = blocks.page.split(self._tokens)
        requests, staged = self._requests(pair, [plans[i] for i in group], pages)
        size = sum(len(run) for request in requests for run in request.destination or ())
        with self._stages.timed("read", size):
            answers = iter(self._store.read(requests))
        assembling = 0.0
        for index, page in zip(group, pages, strict=True):
            shards = [next(answers) for _ in plans[index].keys]
            first, blocks.failure = self._first_token(pair, plans[index], shards)
            if blocks.failure is None and not self._follows(blocks, first - index * self._tokens):
                blocks.failure = BlockResult(Outcome.DECLINED, Reason.POSITION_UNKNOWN)
            if blocks.failure is not None:
                break
            blocks.origin = first - index * self._tokens
            started = perf_counter()
            _assemble(pair, plans[index], page, staged)
            assembling += perf_counter() - started
            blocks.first = blocks.first if blocks.count else first
            blocks.count += 1
        blocks.page = blocks.page.cut(0, blocks.count * self._tokens)
        if staged:
            self._stages.observe("copy_in", assembling, size)
        return blocks

    def _requests(
        self, pair: Pair, plans: list[BlockPlan], pages: list[KvPage]
    ) -> tuple[list[ReadRequest], dict[str, KvPage]]:
        """A source held by one shard of exactly our heads is read in place, others are staged."""
        requests, staged = [], {}
        for plan, page in zip(plans, pages, strict=True):
            for key, shard in zip(plan.keys, plan.shards, strict=True):
                destination = page
                if (shard.first_head, shard.last_head) != (pair.heads.start, pair.heads.stop):
                    shape = block_shape(pair.source, shard, self._tokens, page.keys.dtype)
                    destination = staged[key] = KvPage.empty(shape)
                requests.append(ReadRequest(key, destination.segments()))
        return requests, staged

    @staticmethod
    def _follows(blocks: SourceBlocks, origin: int) -> bool:
        """A prefix does not begin before position 0, and all its blocks agree where it begins."""
        return origin >= 0 and blocks.origin in (None, origin)

    def _first_token(
        self, pair: Pair, plan: BlockPlan, reads: list[ReadResult]
    ) -> tuple[int, BlockResult | None]:
        firsts = set()
        for shard, read in zip(plan.shards, reads, strict=True):
            reason = read_failure(read.status)
            shape = block_shape(pair.source, shard, self._tokens, pair.source_shape.dtype)
            if reason is None and (read.header is None or not has_shape(read.header, shape)):
                reason = Reason.SHAPE_MISMATCH
            if reason is not None or read.header is None:
                return 0, BlockResult(Outcome.MISSED, reason or Reason.STORE_ERROR)
            firsts.add(read.header.first_token)
        first = firsts.pop()
        if first is None or firsts or first % self._tokens:
            return 0, BlockResult(Outcome.DECLINED, Reason.POSITION_UNKNOWN)
        reason = pair.too_long(first + self._tokens)
        return first, None if reason is None else BlockResult(Outcome.DECLINED, reason)


def _assemble(pair: Pair, plan: BlockPlan, page: KvPage, staged: dict[str, KvPage]) -> None:
    for key, shard in zip(plan.keys, plan.shards, strict=True):
        if key in staged:
            into, heads = pair.shard_heads(shard)
            part = staged[key]
            page.keys[:, :, into] = part.keys[:, :, heads]
            page.values[:, :, into] = part.values[:, :, heads]
