"""What became of each block of a read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_xfer.outcome import SERVED, Outcome, Reason
from kvstore_xfer.store.base import ReadStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.blocks.header import BlockHeader
    from kvstore_xfer.blocks.page import KvShape
    from kvstore_xfer.tier.plan import BlockPlan


@dataclass(frozen=True)
class BlockResult:
    """One block's outcome; its page holds the tokens only when it was served."""

    outcome: Outcome
    reason: Reason = Reason.NONE

    @property
    def served(self) -> bool:
        return self.outcome in SERVED


def results_as_planned(plans: Sequence[BlockPlan]) -> list[BlockResult]:
    """What reading would tell without reading; neighbours that are alike share one object."""
    results: list[BlockResult] = []
    last = BlockResult(Outcome.MISSED)
    for plan in plans:
        if plan.outcome is not last.outcome or plan.reason is not last.reason:
            last = BlockResult(plan.outcome, plan.reason)
        results.append(last)
    return results


def read_failure(status: ReadStatus) -> Reason | None:
    """Why a block that the store was asked for is missed; None when it was read."""
    return {
        ReadStatus.OK: None,
        ReadStatus.MISSING: Reason.ABSENT,
        ReadStatus.CORRUPT: Reason.CORRUPT,
        ReadStatus.MISMATCH: Reason.SHAPE_MISMATCH,
        ReadStatus.ERROR: Reason.STORE_ERROR,
    }[status]


def has_shape(header: BlockHeader, shape: KvShape) -> bool:
    """Whether a stored block has the geometry and dtype that the reader expects."""
    dtype = str(shape.dtype).removeprefix("torch.")
    stored = (header.layers, header.tokens, header.heads, header.key_dim, header.value_dim)
    wanted = (shape.layers, shape.tokens, shape.heads, shape.key_dim, shape.value_dim)
    return stored == wanted and header.dtype == dtype
