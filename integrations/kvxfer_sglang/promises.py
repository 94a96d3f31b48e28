"""Plans that SGLang was told of and asks for a moment later: no second look at the index."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore_xfer.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.tier.plan import BlockPlan
    from kvstore_xfer.tier.tier import Tier

_KEPT = 64  # lookups between their two calls; SGLang looks up one after the other
_SECONDS = 5.0  # a request that was aborted in between leaves its promise behind


class Promises:
    """Plans of a model's own blocks, each to be taken once. Safe from several threads.

    Others are planned anew, because policy is applied to what is still there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[float, Tier, list[BlockPlan]]] = OrderedDict()

    def keep(self, tier: Tier, plans: list[BlockPlan]) -> None:
        """Remember the plans of one lookup, if all are of own blocks."""
        if not plans or any(plan.outcome is not Outcome.NATIVE for plan in plans):
            return
        with self._lock:
            self._kept[plans[0].chain_hash] = (time.monotonic(), tier, plans)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def take(self, tier: Tier, keys: Sequence[str]) -> list[BlockPlan] | None:
        """The plans of these keys, when they were promised by this tier just now."""
        with self._lock:
            since, of, plans = self._kept.pop(keys[0] if keys else "", (0.0, None, []))
        plans = plans[: len(keys)]
        if of is not tier or time.monotonic() - since > _SECONDS:
            return None
        return plans if [plan.chain_hash for plan in plans] == list(keys) else None
