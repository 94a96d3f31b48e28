"""`Tier.find`: what the store has for each hash of a prompt, and what the policy says to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.key import NATIVE, UNPLACED, BlockKey
from kvstore_xfer.outcome import SERVED, Outcome, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.blocks.identity import Identity
    from kvstore_xfer.blocks.key import Shard
    from kvstore_xfer.store.base import BlockStore
    from kvstore_xfer.tier.pair import Pair


@dataclass(frozen=True)
class BlockPlan:
    """How one block can be had. In a plan, CONVERTED means: can be converted.

    `keys` are the stored blocks to read (for a conversion one per source shard, in the order of
    `shards`); `pair` is set when the block would be converted, `sibling` when it is or could have
    been made from that pair's source.
    """

    outcome: Outcome
    reason: Reason = Reason.NONE
    chain_hash: str = ""
    keys: tuple[str, ...] = ()
    shards: tuple[Shard, ...] = ()
    pair: Pair | None = None
    sibling: Pair | None = None

    @property
    def origin(self) -> tuple[str, str]:
        """Source and direction as metric labels; empty for native blocks and absent ones."""
        pair = self.sibling
        return ("", "") if pair is None else (pair.name, pair.direction.value)

    @property
    def served(self) -> bool:
        return self.outcome in SERVED

    @property
    def forbidden(self) -> bool:
        """Whether a sibling that may serve was declined by its pair's policy."""
        sibling = self.sibling
        return (
            self.outcome is Outcome.DECLINED
            and sibling is not None
            and sibling.refusal is None
            and self.reason is not Reason.POSITION_UNKNOWN
        )


class Planner:
    """Decides from the store's index alone; holds no state between calls.

    A block counts as present when all ranks of `shards` have theirs, `shard` is this rank's: ranks
    that looked only at their own blocks would disagree after an eviction.
    """

    def __init__(
        self,
        store: BlockStore,
        identity: Identity,
        shard: str,
        pairs: Sequence[Pair],
        shards: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._identity = identity
        self._shard = shard
        self._shards = tuple(shards) or (shard,)
        self._pairs = pairs

    def plan(
        self, hashes: Sequence[str], *, whole_prompt: bool, gaps: bool = False
    ) -> list[BlockPlan]:
        close = own_after_gap if gaps else after_gap
        own: dict[str, BlockPlan] = {}
        self._add_present(own, list(hashes), NATIVE)
        if len(own) == len(hashes):  # no policy applies to own blocks, and no gap
            return list(own.values())
        self._add_present(own, _rest(hashes, own), UNPLACED)
        for pair in self._pairs:
            if pair.refusal is None:
                self._add_present(own, _rest(hashes, own), pair.derived_kind, pair)
        declined: dict[str, BlockPlan] = {}
        skipped: set[tuple[str, str]] = set()
        while True:
            ordered = self._with_siblings(hashes, own, declined, skipped)
            if whole_prompt:
                ordered = self._hold_back(ordered)
            ordered = close(self._apply_limits(close(ordered), whole_prompt=whole_prompt))
            # What policy forbids one sibling another may serve; of the reasons the first counts.
            forbidden = [plan for plan in ordered if plan.forbidden and _told(plan) not in skipped]
            if not forbidden or sum(pair.refusal is None for pair in self._pairs) < 2:
                return ordered
            for plan in forbidden:
                declined.setdefault(plan.chain_hash, plan)
                skipped.add(_told(plan))

    def _with_siblings(
        self,
        hashes: Sequence[str],
        own: dict[str, BlockPlan],
        declined: dict[str, BlockPlan],
        skipped: set[tuple[str, str]],
    ) -> list[BlockPlan]:
        """Own blocks, and for the rest the first sibling that has it and is not `skipped` for it,
        before any limit."""
        plans, unplaced = dict(own), dict(declined)
        # Refused siblings last: one that must not serve does not hide one that may.
        for pair in sorted(self._pairs, key=lambda pair: pair.refusal is not None):
            rest = [n for n in _rest(hashes, plans) if (pair.derived_kind, n) not in skipped]
            if pair.refusal is not None:
                rest = [name for name in rest if name not in declined]
            self._add_convertible(plans, unplaced, rest, pair)
        plans = {**unplaced, **plans}
        return [
            plans.get(name) or BlockPlan(Outcome.MISSED, Reason.ABSENT, name) for name in hashes
        ]

    def convertible(self, hashes: list[str], pair: Pair) -> dict[str, BlockPlan]:
        """How blocks would be converted by one pair, whatever else is there of them."""
        plans: dict[str, BlockPlan] = {}
        self._add_convertible(plans, {}, hashes, pair)
        return {name: plan for name, plan in plans.items() if plan.served}

    def _add_present(
        self, plans: dict[str, BlockPlan], hashes: list[str], kind: str, made: Pair | None = None
    ) -> None:
        """Blocks of our own of one kind; `made` is the pair that derived ones were made with."""
        if not hashes:
            return
        outcome = Outcome.NATIVE if made is None else Outcome.DERIVED
        own = _key_prefix(self._identity.digest, self._shard, kind)
        for name in self._all_present(hashes, self._identity.digest, self._shards, kind):
            key = f"{own}{name}"
            plans[name] = BlockPlan(outcome, Reason.NONE, name, (key,), (), None, made)

    def _add_convertible(
        self,
        plans: dict[str, BlockPlan],
        unplaced: dict[str, BlockPlan],
        hashes: list[str],
        pair: Pair,
    ) -> None:
        """Blocks that the sibling has natively and in a certain position; never derived ones.

        Those it has in no certain position go to `unplaced`, declined.
        """
        if not hashes:
            return
        for layout in pair.source_layouts(self._store):
            rest = _rest(hashes, plans)
            names = [str(shard) for shard in layout.present]
            there = self._all_present(rest, pair.identity.digest, names, NATIVE)
            for name in there:
                keys = tuple(
                    str(BlockKey(pair.identity.digest, str(shard), NATIVE, name))
                    for shard in layout.read
                )
                plans[name] = _convertible(pair, name, keys, layout.read)
            # A prompt is stored with positions or without, so its first block tells of the rest.
            rest = _rest(hashes, plans)
            if rest and self._all_present(rest[:1], pair.identity.digest, names, UNPLACED):
                for name in self._all_present(rest, pair.identity.digest, names, UNPLACED):
                    reason = Reason.POSITION_UNKNOWN
                    plan = BlockPlan(Outcome.DECLINED, reason, name, sibling=pair)
                    unplaced.setdefault(name, plan)

    def _all_present(
        self, hashes: Sequence[str], identity: str, shards: Sequence[str], kind: str
    ) -> list[str]:
        """The hashes that every one of the shards has."""
        prefixes = [_key_prefix(identity, shard, kind) for shard in shards]
        keys = [f"{prefix}{name}" for name in hashes for prefix in prefixes]
        there, width = self._store.exists(keys), len(shards)
        if all(there):
            return list(hashes)
        return [
            name
            for number, name in enumerate(hashes)
            if all(there[number * width : (number + 1) * width])
        ]

    def _hold_back(self, plans: list[BlockPlan]) -> list[BlockPlan]:
        """The newest tokens of a prompt are computed by the target, not mapped."""
        tokens = self._identity.block_tokens
        kept = []
        for number, plan in enumerate(plans):
            after = (len(plans) - number) * tokens
            held = [p.policy.hold_back_tokens for p in self._pairs if p is plan.pair]
            if plan.outcome is Outcome.DERIVED:
                held = [p.policy.hold_back_tokens for p in self._pairs if p.refusal is None]
            declined = any(after - tokens < hold for hold in held)
            kept.append(_declined(plan, Reason.HOLD_BACK) if declined else plan)
        return kept

    def _apply_limits(self, plans: list[BlockPlan], *, whole_prompt: bool) -> list[BlockPlan]:
        """Minimum, longest prefix and cost, per pair, over the blocks that would be converted."""
        tokens = self._identity.block_tokens
        for pair in self._pairs:
            mine = [i for i, plan in enumerate(plans) if plan.served and plan.pair is pair]
            ends = {i: pair.too_long((i + 1) * tokens) for i in mine}
            reasons = {i: reason for i, reason in ends.items() if reason is not None}
            left = (len(mine) - len(reasons)) * tokens
            if whole_prompt and left < pair.policy.min_tokens:
                reasons = dict.fromkeys(mine, Reason.MIN_TOKENS)
            elif whole_prompt and left and not _pays(pair, left):
                reasons = dict.fromkeys(mine, Reason.NOT_WORTH_IT)
            plans = [
                _declined(plan, reasons[i]) if i in reasons else plan
                for i, plan in enumerate(plans)
            ]
        return plans


def _key_prefix(identity: str, shard: str, kind: str) -> str:
    """What all keys of one kind begin with: the chain hash follows."""
    return str(BlockKey(identity, shard, kind, ""))


def _convertible(
    pair: Pair, chain_hash: str, keys: tuple[str, ...], shards: tuple[Shard, ...]
) -> BlockPlan:
    if pair.refusal is not None:
        return BlockPlan(Outcome.DECLINED, pair.refusal, chain_hash, sibling=pair)
    return BlockPlan(Outcome.CONVERTED, Reason.NONE, chain_hash, keys, shards, pair, pair)


def _pays(pair: Pair, tokens: int) -> bool:
    gate = pair.gate
    return gate is not None and pair.policy.pays(
        tokens, gate.prefill_tokens_per_second, gate.conversion_tokens_per_second
    )


def still_allowed(plans: Sequence[BlockPlan], pairs: Sequence[Pair]) -> list[BlockPlan]:
    """The plans, with those declined whose pair has been turned off since they were made."""
    allowed = {pair.derived_kind: pair for pair in pairs if pair.refusal is None}
    refused = {pair.derived_kind: pair.refusal for pair in pairs}

    def check(plan: BlockPlan) -> BlockPlan:
        if plan.pair is not None:
            kind = plan.pair.derived_kind
        elif plan.outcome is Outcome.DERIVED:
            kind = BlockKey.parse(plan.keys[0]).kind
        else:
            return plan
        if kind in allowed:
            return plan
        return _declined(plan, refused.get(kind) or Reason.DISABLED)

    return [check(plan) for plan in plans]


def _told(plan: BlockPlan) -> tuple[str, str]:
    """Which sibling the plan is about, and which block."""
    return ("" if plan.sibling is None else plan.sibling.derived_kind), plan.chain_hash


def _declined(plan: BlockPlan, reason: Reason) -> BlockPlan:
    return BlockPlan(Outcome.DECLINED, reason, plan.chain_hash, sibling=plan.sibling)


def _rest(hashes: Sequence[str], plans: dict[str, BlockPlan]) -> list[str]:
    return [name for name in hashes if name not in plans]


def after_gap(plans: list[BlockPlan]) -> list[BlockPlan]:
    """A block behind one that is not there cannot be used; say so instead of promising it."""
    end = next((i for i, plan in enumerate(plans) if not plan.served), len(plans))
    return [
        plan
        if i <= end or not plan.served
        else BlockPlan(Outcome.MISSED, Reason.AFTER_GAP, plan.chain_hash)
        for i, plan in enumerate(plans)
    ]


def own_after_gap(plans: list[BlockPlan]) -> list[BlockPlan]:
    """The engine may hold the gap itself, so own blocks behind it are of use; nothing is converted
    for an if."""
    closed = after_gap(plans)
    return [
        plan if plan.served and plan.pair is None else other
        for plan, other in zip(plans, closed, strict=True)
    ]
