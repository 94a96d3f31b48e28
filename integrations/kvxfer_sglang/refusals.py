"""Why an engine's blocks must not be converted, or not even be stored."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvxfer_sglang.facts import BIGRAM_HASHES

if TYPE_CHECKING:
    from kvxfer_sglang.facts import EngineFacts

SGLANG_TESTED_VERSIONS = {"0.5.23"}
_PLAIN_DTYPES = {"bfloat16", "float16", "float32"}


class Refusal(str, Enum):
    """Why blocks are not converted or not stored. Bounded: the values are also metric labels."""

    SGLANG_VERSION = "sglang_version"
    UNKNOWN_FACT = "unknown_fact"
    MLA = "mla"
    SIDECAR_POOL = "sidecar_pool"
    POOL_FORMAT = "pool_format"
    DRAFT_LAYERS = "draft_layers"
    BIGRAM_HASHES = "bigram_hashes"
    CONTEXT_PARALLEL = "context_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    KV_DTYPE = "kv_dtype"
    LORA = "lora"
    MULTIMODAL_ROPE = "multimodal_rope"
    ALTERED_MODEL = "altered_model"
    # found when the tier is opened
    PLUGIN = "plugin"
    CONFIG = "config"
    STORE = "store"
    MODEL = "model"
    NOT_IN_FAMILY = "not_in_family"
    POOL = "pool"
    GEOMETRY = "geometry"
    WEIGHTS_CHANGED = "weights_changed"


def conversion_refusals(facts: EngineFacts) -> list[tuple[Refusal, str]]:
    """Every reason why this engine's blocks must not be converted; empty when they may be.

    The texts are for an operator.
    """
    return [(reason, text) for reason, applies, text in _rules(facts) if applies]


def storage_refusals(facts: EngineFacts) -> list[tuple[Refusal, str]]:
    """Why this engine's pages must not be stored at all; empty when they may be.

    Without these facts it cannot be said whose they are, and with a sidecar pool they are not all
    that a prefix consists of.
    """
    refusals = []
    needed = ("model_path", "alterations", "kv_dtype", "head_range", "hash_scheme")
    unknown = [name for name in needed if getattr(facts, name) is None]
    if unknown:
        refusals.append((Refusal.UNKNOWN_FACT, f"SGLang does not say: {', '.join(unknown)}"))
    if facts.sidecar_pools:
        pools = ", ".join(facts.sidecar_pools)
        text = f"the model keeps other state beside the KV pages: {pools}"
        refusals.append((Refusal.SIDECAR_POOL, text))
    return refusals


def _rules(facts: EngineFacts) -> list[tuple[Refusal, bool, str]]:
    tested = ", ".join(sorted(SGLANG_TESTED_VERSIONS))
    return [
        (
            Refusal.SGLANG_VERSION,
            facts.sglang_version not in SGLANG_TESTED_VERSIONS,
            f"SGLang {facts.sglang_version} is not one of the tested versions ({tested})",
        ),
        (
            Refusal.UNKNOWN_FACT,
            bool(_unknown(facts)),
            f"SGLang does not say: {', '.join(_unknown(facts))}",
        ),
        (
            Refusal.MLA,
            facts.is_mla,
            "the model caches latents (MLA), not keys and values",
        ),
        (
            Refusal.SIDECAR_POOL,
            bool(facts.sidecar_pools),
            f"the model keeps other state beside the KV pages: {', '.join(facts.sidecar_pools)}",
        ),
        (
            Refusal.POOL_FORMAT,
            facts.pool_format is not None,
            f"the host pool has a byte format of its own ({facts.pool_format})",
        ),
        (
            Refusal.DRAFT_LAYERS,
            facts.draft_layers > 0,
            f"{facts.draft_layers} draft layers are packed into each page and have no source",
        ),
        (
            Refusal.BIGRAM_HASHES,
            facts.hash_scheme == BIGRAM_HASHES,
            "EAGLE speculation hashes pages by token pairs; siblings without it never match",
        ),
        (
            Refusal.CONTEXT_PARALLEL,
            facts.context_parallel_size > 1,
            f"context parallelism ({facts.context_parallel_size}) spreads a page over ranks",
        ),
        (
            Refusal.PIPELINE_PARALLEL,
            facts.pp_size > 1,
            f"pipeline parallelism ({facts.pp_size}): a layer's sources lie on other stages",
        ),
        (
            Refusal.KV_DTYPE,
            facts.kv_dtype is not None and facts.kv_dtype not in _PLAIN_DTYPES,
            f"KV dtype {facts.kv_dtype}: its scales are not in the pool",
        ),
        (
            Refusal.LORA,
            facts.lora is True,
            "LoRA is enabled and a page does not say which adapter computed it",
        ),
        (
            Refusal.MULTIMODAL_ROPE,
            facts.multimodal_rope is True,
            "multimodal RoPE: a token's position is not its place in the prompt",
        ),
        (
            Refusal.ALTERED_MODEL,
            bool(facts.alterations),
            f"the engine changes the model on loading: {_options(facts.alterations or ())}",
        ),
    ]


def _unknown(facts: EngineFacts) -> list[str]:
    required = (
        "model_path",
        "weight_version",
        "alterations",
        "compute_dtype",
        "kv_dtype",
        "head_range",
        "hash_scheme",
        "lora",
        "multimodal_rope",
    )
    return [name for name in required if getattr(facts, name) is None]


def _options(options: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in options)
