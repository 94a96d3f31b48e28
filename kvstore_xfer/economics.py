"""What conversion saves for an expected traffic, from measured rates. Pure arithmetic.

Prefill is taken as linear in the prefix at the measured rate. Attention makes long prefixes
slower than that, so savings at long prefixes are understated, never overstated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from kvstore_xfer.yaml_file import Strict

if TYPE_CHECKING:
    from kvstore_xfer.tier.policy import Policy


class SwitchTraffic(Strict):
    """Requests that reach `target` of one ordered pair, and how many come from `source`."""

    source: str
    target: str
    requests_per_hour: float = Field(gt=0, description="All requests to the target.")
    switch_share: float = Field(
        gt=0, le=1, description="Share of them whose prefix only the source has computed."
    )
    prefix_tokens: list[int] = Field(
        min_length=1, description="A sample of prefix lengths at a switch, weighted alike."
    )
    hit_rate: float = Field(
        default=1.0, gt=0, le=1, description="Share of the prefix still stored for the source."
    )
    target_gpus: int = Field(default=1, ge=1, description="GPUs of one instance of the target.")
    prefill_tokens_per_second: float | None = Field(
        default=None, gt=0, description="The target's in production; else the gate's figure."
    )
    conversion_tokens_per_second: float | None = Field(
        default=None, gt=0, description="Measured in production; else the gate's figure."
    )


class Traffic(Strict):
    """A traffic file."""

    switches: list[SwitchTraffic] = Field(min_length=1)
    gpu_hour_price: float | None = Field(default=None, gt=0)


@dataclass(frozen=True)
class Rates:
    """Tokens a second of one instance of the target."""

    prefill: float
    conversion: float


@dataclass(frozen=True)
class Saving:
    """One ordered pair under one traffic.

    Attributes
    ----------
    converted_tokens_per_switch
        Mean over all switches, those that are not converted included.
    converted_share
        Share of switches that the policy converts.
    seconds_per_switch
        Mean time to first token saved, over all switches.
    gpu_seconds_per_hour
        The same time on every GPU of the target's instance, for all switches of an hour.
    derived_bytes_per_hour
        Derived blocks written to the store.
    break_even_tokens
        Shortest convertible run that is faster converted than prefilled; None when none is.
    """

    converted_tokens_per_switch: float
    converted_share: float
    seconds_per_switch: float
    gpu_seconds_per_hour: float
    derived_bytes_per_hour: float
    break_even_tokens: int | None


def saving(traffic: SwitchTraffic, policy: Policy, rates: Rates, bytes_per_token: int) -> Saving:
    """What `policy` saves at these rates. `bytes_per_token` is the target's KV of one token."""
    converted = [
        _convertible(prefix, traffic.hit_rate, policy, rates) for prefix in traffic.prefix_tokens
    ]
    count = len(converted)
    tokens = sum(converted) / count
    seconds = sum(_seconds_saved(run, policy, rates) for run in converted if run) / count
    switches = traffic.requests_per_hour * traffic.switch_share
    return Saving(
        converted_tokens_per_switch=tokens,
        converted_share=sum(run > 0 for run in converted) / count,
        seconds_per_switch=seconds,
        gpu_seconds_per_hour=seconds * switches * traffic.target_gpus,
        derived_bytes_per_hour=tokens * switches * bytes_per_token,
        break_even_tokens=break_even_tokens(policy, rates),
    )


def break_even_tokens(policy: Policy, rates: Rates) -> int | None:
    """Tokens of a convertible run from which conversion is faster than prefill; None if never."""
    gain = 1 / rates.prefill - 1 / rates.conversion
    if gain <= 0:
        return None
    return max(1, int(policy.conversion_overhead_seconds / gain) + 1)


def _convertible(prefix: int, hit_rate: float, policy: Policy, rates: Rates) -> int:
    """Tokens that the tier would convert of one prefix; 0 when its policy declines."""
    held = min(int(prefix * hit_rate), prefix - policy.hold_back_tokens)
    run = held if policy.max_prefix_tokens is None else min(held, policy.max_prefix_tokens)
    declined = run < max(policy.min_tokens, 1) or not policy.pays(
        run, rates.prefill, rates.conversion
    )
    return 0 if declined else run


def _seconds_saved(run: int, policy: Policy, rates: Rates) -> float:
    return run / rates.prefill - run / rates.conversion - policy.conversion_overhead_seconds
