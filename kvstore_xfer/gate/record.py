"""The gate's record: what was measured, under which thresholds, and the verdict.

The record is stored in the mapper's manifest, one per KV dtype, and names everything that must
still be true when the mapper serves. A mapper without an accepted record never serves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore_xfer.outcome import Reason

if TYPE_CHECKING:
    from kvstore_xfer.mapper.maps import Mapper
    from kvstore_xfer.models.description import ModelDescription

ACCEPTED = "accepted"
REJECTED = "rejected"


@dataclass(frozen=True)
class Thresholds:
    """What a mapper must reach. Bounds are compared with the worse end of the 95 % interval.

    Attributes
    ----------
    min_passages, min_documents
        Fewer say too little; the check then asks for more text and decides nothing.
    max_identity_difference
        Largest difference of logits when the target's own cache goes through a store.
    max_kl_share
        KL of the mapped arm, as a share of the KL of each control: wrong document, no context,
        source alone. Below one half, the mapped cache carries more than half of what matters.
    min_top1
        Share of positions where the most likely token is the native one.
    """

    min_passages: int = 16
    min_documents: int = 4
    max_identity_difference: float = 0.0
    max_kl_share: float = 0.5
    min_top1: float = 0.75


@dataclass(frozen=True)
class GateRecord:
    """One check of one mapper for one KV dtype. Figures are means with their intervals."""

    verdict: str
    reason: str
    dtype: str
    mapper_digest: str
    source_fingerprint: str
    target_fingerprint: str
    source_rope: str
    target_rope: str
    text_digest: str = ""
    passages: int = 0
    documents: int = 0
    prefix_tokens: int = 0
    tail_tokens: int = 0
    identity_max_abs_diff: float = 0.0
    arms: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    kl_share: dict[str, dict[str, float]] = field(default_factory=dict)
    retention: dict[str, float] = field(default_factory=dict)
    gap_recovered: dict[str, float] | None = None
    prefill_tokens_per_second: float = 0.0
    conversion_tokens_per_second: float = 0.0
    thresholds: dict[str, float] = field(default_factory=lambda: asdict(Thresholds()))

    @property
    def accepted(self) -> bool:
        return self.verdict == ACCEPTED

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GateRecord:
        """Raises TypeError when a field is unknown or missing."""
        return cls(**data)


def subject(mapper: Mapper, dtype: str) -> dict[str, str]:
    """The fields of a record that say what it is about."""
    return {
        "dtype": dtype,
        "mapper_digest": mapper.digest,
        "source_fingerprint": mapper.source.fingerprint(),
        "target_fingerprint": mapper.target.fingerprint(),
        "source_rope": _rope_digest(mapper.source),
        "target_rope": _rope_digest(mapper.target),
    }


def refusal(record: GateRecord | None, mapper: Mapper, target: ModelDescription) -> Reason | None:
    """Why this mapper must not serve this target, or None when it may. Unknown means no."""
    if record is None:
        return Reason.GATE_MISSING
    if mapper.target.fingerprint() != target.fingerprint():
        return Reason.FINGERPRINT
    about = subject(mapper, record.dtype)
    if any(getattr(record, name) != value for name, value in about.items()):
        return Reason.FINGERPRINT
    return None if record.accepted else Reason.GATE_REJECTED


def _rope_digest(model: ModelDescription) -> str:
    return "" if model.rope is None else model.rope.digest()
