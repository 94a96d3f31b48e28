"""The family manifest: which models share a store, which may serve which, and how.

A YAML file, strictly validated. Relative paths are relative to the manifest's folder. The JSON
Schema for editors is `docs/family.schema.json`; `kvxfer family validate` reports the first error
with its line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from kvstore_xfer.gate.decide import held_back_failure, record_failure
from kvstore_xfer.gate.record import Thresholds
from kvstore_xfer.tier.policy import READ_SECONDS, Direction, Policy
from kvstore_xfer.yaml_file import Strict, load_yaml

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore_xfer.gate.record import GateRecord

VLLM_CPU_PACK_TOKENS = 32  # vLLM's CPU attention packs smaller blocks otherwise


class ModelEntry(Strict):
    """One model of the family."""

    path: str = Field(description="Model folder (relative to the manifest) or hub id.")
    revision: str | None = Field(default=None, description="Hub revision.")
    vllm_cpu_block_tokens: int | None = Field(
        default=None,
        ge=1,
        description="vLLM's --block-size, when it runs this model on CPUs behind LMCache: compared "
        "with what LMCache's server says, which counts.",
    )

    @field_validator("vllm_cpu_block_tokens")
    @classmethod
    def _whole_packs(cls, given: int | None) -> int | None:
        if given is not None and given % VLLM_CPU_PACK_TOKENS:
            raise ValueError(
                f"{given} is not a multiple of {VLLM_CPU_PACK_TOKENS}, as vLLM's --block-size must "
                "be on CPUs; correct both, or remove this field"
            )
        return given


class PolicyEntry(Strict):
    """Limits of conversion for one ordered pair; see `kvstore_xfer.tier.policy.Policy`."""

    enabled: bool = True
    min_tokens: int = Field(default=0, ge=0)
    hold_back_tokens: int = Field(default=0, ge=0)
    max_prefix_tokens: int | None = Field(default=None, ge=1)
    max_beyond_checked: float = Field(default=4.0, ge=1)
    budget_seconds: float = Field(default=2.0, gt=0)
    conversion_overhead_seconds: float = Field(default=0.0, ge=0)
    prefill_tokens_per_second: float | None = Field(default=None, gt=0)
    conversion_tokens_per_second: float | None = Field(default=None, gt=0)
    sampled_share: float = Field(default=0.01, ge=0, le=1)
    min_retention: float | None = Field(default=None, gt=0, le=1)


class GateEntry(Strict):
    """Thresholds that a mapper must reach; see `kvstore_xfer.gate.record.Thresholds`.

    A field that is left out has its default, in a pair: the family's value.
    """

    min_passages: int | None = Field(default=None, ge=2)
    min_documents: int | None = Field(default=None, ge=2)
    min_fit_sequences: int | None = Field(default=None, ge=1)
    min_rows_per_input: float | None = Field(default=None, gt=0)
    max_identity_difference: float | None = Field(default=None, ge=0)
    min_cosine: float | None = Field(default=None, ge=-1, le=1)
    min_layer_cosine: float | None = Field(default=None, ge=-1, le=1)
    max_kl_share: float | None = Field(default=None, gt=0, le=1)
    min_top1: float | None = Field(default=None, ge=0, le=1)
    max_perplexity_ratio: float | None = Field(default=None, ge=1)
    max_behind_both: float | None = Field(default=None, ge=0)
    max_growth: float | None = Field(default=None, gt=0)
    min_task_items: int | None = Field(default=None, ge=2)
    min_task_retention: float | None = Field(default=None, ge=0, le=1)
    lengths: list[Literal["calibration", "short", "double", "fourfold"]] | None = Field(
        default=None,
        description="Lengths that must have been measured, or found to be beyond the models "
        "(default: all).",
    )
    max_tokens: int | None = Field(
        default=None, ge=2, description="Longest context both models can use."
    )


class PairEntry(Strict):
    """One ordered pair: blocks of `source` may be converted for `target`."""

    source: str
    target: str
    mapper: str = Field(description="Mapper folder (relative to the manifest).")
    direction: Direction | None = Field(
        default=None,
        strict=False,
        description="Stated direction; refused when the models' sizes say otherwise.",
    )
    policy: PolicyEntry = PolicyEntry()
    gate: GateEntry | None = None


class MetricsEntry(Strict):
    """Prometheus metrics on a port of our own, for engines that do not expose them."""

    port: int = Field(ge=1, le=65535)
    address: str = "127.0.0.1"


def _joined(value: object) -> object:
    """Levels as one URL."""
    levels = value if isinstance(value, list) else None
    return "|".join(levels) if levels and all(isinstance(x, str) for x in levels) else value


StoreUrl = Annotated[
    str,
    BeforeValidator(_joined),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class Family(Strict):
    """A family manifest."""

    family: str = Field(min_length=1)
    store: StoreUrl = Field(
        description="Store URL, such as local:///var/lib/kvxfer?max_size=50GiB; "
        "a list names levels from fast to far, such as memory:, local:, valkey:."
    )
    models: dict[str, ModelEntry] = Field(min_length=1)
    pairs: list[PairEntry] = Field(default=[])
    metrics: MetricsEntry | None = None
    gate: GateEntry | None = None
    read_seconds: float = Field(
        default=READ_SECONDS,
        gt=0,
        description="Longest time that one read of stored blocks may hold an engine; what a store "
        "on the network has not sent by then is a miss.",
    )

    @model_validator(mode="after")
    def _names_exist_once(self) -> Family:
        seen: set[tuple[str, str]] = set()
        for number, pair in enumerate(self.pairs):
            for role in ("source", "target"):
                name = getattr(pair, role)
                if name not in self.models:
                    known = ", ".join(self.models)
                    text = f"no model {name!r} under models; known: {known}"
                    raise ValueError(f"pairs.{number}.{role}: {text}")
            if pair.source == pair.target:
                raise ValueError(f"pairs.{number}.target: is the source itself")
            if (pair.source, pair.target) in seen:
                raise ValueError(f"pairs.{number}.target: this pair is given twice")
            seen.add((pair.source, pair.target))
        return self


def policy_of(entry: PolicyEntry) -> Policy:
    """The tier's policy from its manifest entry."""
    return Policy(**entry.model_dump())


def gate_of(family: Family, pair: PairEntry) -> GateEntry | None:
    """The family's thresholds with the pair's own laid over them; None when neither gives any."""
    given = [entry for entry in (family.gate, pair.gate) if entry is not None]
    merged = [entry.model_dump(exclude_none=True) for entry in given]
    return GateEntry(**{k: v for fields in merged for k, v in fields.items()}) if given else None


def thresholds_of(entry: GateEntry | None) -> Thresholds:
    """The gate's thresholds from their manifest entry."""
    fields = {} if entry is None else entry.model_dump(exclude_none=True)
    return Thresholds(**{k: v for k, v in fields.items() if k not in ("lengths", "max_tokens")})


def unmet(family: Family, pair: PairEntry, record: GateRecord) -> str:
    """What the manifest asks of a pair and an accepted record does not show; empty when nothing."""
    failure = held_back_failure(record, pair.policy.hold_back_tokens)
    gate = gate_of(family, pair)
    if failure or gate is None:
        return failure
    return record_failure(record, thresholds_of(gate), gate.lengths or ())


def load_family(path: str | Path) -> Family:
    """Read and validate a manifest.

    Raises ConfigError in one line: file, line, field, and what is expected there.
    """
    return load_yaml(path, Family, "manifest")


def json_schema() -> dict[str, Any]:
    """JSON Schema of the manifest."""
    return Family.model_json_schema()
