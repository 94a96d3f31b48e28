"""What an operator allows for one ordered pair. Pure decisions, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_xfer.models.description import ModelDescription

READ_SECONDS = 2.0  # one read of stored blocks: longer, and computing them is often faster


class Direction(str, Enum):
    """From a small to a large model (up), the other way (down), or between equals."""

    UP = "up"
    DOWN = "down"
    LATERAL = "lateral"


@dataclass(frozen=True)
class Policy:
    """Limits of conversion for one ordered pair, in tokens, seconds and tokens a second.

    Attributes
    ----------
    enabled
        False keeps the pair off; its lookups are counted as declined.
    min_tokens
        A shorter convertible run is not worth it.
    hold_back_tokens
        The newest tokens of a prompt that the target always computes itself.
    max_prefix_tokens
        No block that ends beyond this position is converted; None is no limit of its own.
    max_beyond_checked
        Nor one that ends beyond this many times the longest prefix that the check measured: what
        maps do further on, nobody has seen.
    budget_seconds
        Longest time that one read may spend converting.
    conversion_overhead_seconds, prefill_tokens_per_second, conversion_tokens_per_second
        Cost model: a run is declined when overhead plus conversion is predicted to take longer
        than the target's prefill. A rate of None is taken from the gate's record.
    sampled_share
        Share of convertible prompts that are left to the target, to compare its own blocks with
        what would have been served. Only of pairs whose check measured the relation.
    min_retention
        The pair is switched off when the lower bound of the retention estimated from sampled
        prompts stays below this; None is twice the loss that the gate may have seen.
    """

    enabled: bool = True
    min_tokens: int = 0
    hold_back_tokens: int = 0
    max_prefix_tokens: int | None = None
    max_beyond_checked: float = 4.0
    budget_seconds: float = 2.0
    conversion_overhead_seconds: float = 0.0
    prefill_tokens_per_second: float | None = None
    conversion_tokens_per_second: float | None = None
    sampled_share: float = 0.01
    min_retention: float | None = None

    def checked_limit(self, checked_tokens: int) -> int:
        """The end of the last block that may be converted, by the check alone."""
        return int(self.max_beyond_checked * checked_tokens)

    def pays(self, tokens: int, measured_prefill: float, measured_conversion: float) -> bool:
        """Whether converting `tokens` is predicted to be faster than prefilling them.

        The measured rates are those of the gate's record, in tokens a second.
        """
        prefill = self.prefill_tokens_per_second or measured_prefill
        conversion = self.conversion_tokens_per_second or measured_conversion
        if prefill <= 0 or conversion <= 0:
            return False
        return self.conversion_overhead_seconds + tokens / conversion < tokens / prefill


def direction_of(source: ModelDescription, target: ModelDescription) -> Direction:
    """By parameter count; within five percent the models are equals (fine-tunes of one base)."""
    if abs(source.parameters - target.parameters) <= 0.05 * target.parameters:
        return Direction.LATERAL
    return Direction.UP if source.parameters < target.parameters else Direction.DOWN
