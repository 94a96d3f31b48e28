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

    The section ``gate`` of a family manifest, and of a pair in it, overrides single fields.

    Attributes
    ----------
    min_passages, min_documents
        Fewer say too little; the check then asks for more text and decides nothing.
    min_fit_sequences, min_rows_per_input
        Sequences the maps were fitted on, and tokens of them for each input of a map: with fewer,
        maps repeat what they have seen.
    max_identity_difference
        Largest difference of logits when the target's own cache goes through a store.
    min_cosine, min_layer_cosine
        Cosine of the attention output on the mapped cache with that on the target's own: mean
        over layers, and worst layer.
    max_kl_share
        KL of the mapped arm, as a share of the KL of each control: wrong document, no context,
        source alone. Below one half, the mapped cache carries more than half of what matters.
    min_top1
        Share of positions where the most likely token is the native one.
    max_perplexity_ratio
        Perplexity after the mapped cache over that after the target's own.
    max_behind_both
        Nats a token by which the mean loss may exceed that of the worse of the two models.
    max_growth
        KL at twice and four times the calibration length, over KL at that length (means).
    min_task_items
        Fewer questions say too little; the check then asks for more and decides nothing.
    min_task_retention
        Floor-normalised retention on the questions of a tasks file.
    """

    min_passages: int = 16
    min_documents: int = 4
    min_fit_sequences: int = 32
    min_rows_per_input: float = 4.0
    max_identity_difference: float = 0.0
    min_cosine: float = 0.9
    min_layer_cosine: float = 0.8
    max_kl_share: float = 0.5
    min_top1: float = 0.75
    max_perplexity_ratio: float = 1.2
    max_behind_both: float = 0.05
    max_growth: float = 1.5
    min_task_items: int = 30
    min_task_retention: float = 0.8


# Raised whenever a check asks for more than before: an older record does not answer that.
PROTOCOL = 2


@dataclass(frozen=True)
class GateRecord:
    """One check of one mapper for one KV dtype. Figures are means with their intervals.

    `stage` is the one that failed. `arms`, `kl_share` and what follows are at the calibration
    length; `lengths` holds the same for every other length, or why it was left out. A stage that
    was not reached has left its fields empty. A record holds for a tier that holds back
    `hold_back_tokens` of a prompt or more.
    """

    verdict: str
    reason: str
    dtype: str
    mapper_digest: str
    source_fingerprint: str
    target_fingerprint: str
    source_rope: str
    target_rope: str
    protocol: int = PROTOCOL
    stage: str = ""
    text_digest: str = ""
    passages: int = 0
    documents: int = 0
    prefix_tokens: int = 0
    tail_tokens: int = 0
    longest_prefix_tokens: int = 0
    hold_back_tokens: int = 0
    structure: dict[str, Any] = field(default_factory=dict)
    identity_max_abs_diff: float = 0.0
    attention: dict[str, Any] = field(default_factory=dict)
    arms: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    kl_share: dict[str, dict[str, float]] = field(default_factory=dict)
    perplexity_ratio: dict[str, float] = field(default_factory=dict)
    behind_both: dict[str, float] = field(default_factory=dict)
    retention: dict[str, float] = field(default_factory=dict)
    gap_recovered: dict[str, float] | None = None
    lengths: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    mapper_parameters: int = 0
    prefill_tokens_per_second: float = 0.0
    conversion_tokens_per_second: float = 0.0
    thresholds: dict[str, float] = field(default_factory=lambda: asdict(Thresholds()))

    @property
    def accepted(self) -> bool:
        return self.verdict == ACCEPTED

    @property
    def concerns_mapper(self) -> bool:
        """False where only what was given to the check is wrong: an earlier record then stays."""
        return self.stage not in ("models", "held_out")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GateRecord:
        """Raises TypeError when a field is unknown or missing; protocol 1 did not name itself."""
        return cls(**{"protocol": 1, **data})


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
    if not record.accepted:
        return Reason.GATE_REJECTED
    return None if record.protocol == PROTOCOL else Reason.GATE_OUTDATED


def _rope_digest(model: ModelDescription) -> str:
    return "" if model.rope is None else model.rope.digest()
