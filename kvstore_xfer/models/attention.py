"""What kind of attention a model has, told by its config, and why a kind does not convert."""

from __future__ import annotations

from enum import Enum
from typing import Any


class AttentionKind(str, Enum):
    """How a model's layers remember the prefix. Only `FULL` keeps one key per token and head."""

    FULL = "full"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"
    ENCODER_DECODER = "encoder_decoder"
    OTHER = "other"


_RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# Fields of the configs of Mamba, Mamba 2 and their hybrids, RecurrentGemma, RWKV.
_RECURRENT_FIELDS = (
    "state_size",
    "mamba_d_state",
    "mamba_state_dim",
    "ssm_state_size",
    "block_types",
    "attention_hidden_size",
    "linear_attn_config",
)


def attention_kind(config: Any) -> AttentionKind:
    """Kind of a transformers config (the text part of a multimodal one)."""
    layers = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        return AttentionKind.ENCODER_DECODER
    if getattr(config, "kv_lora_rank", None) is not None:
        return AttentionKind.MLA
    if layers & _RECURRENT_LAYERS or any(hasattr(config, field) for field in _RECURRENT_FIELDS):
        return AttentionKind.RECURRENT
    if "chunked_attention" in layers:
        return AttentionKind.CHUNKED
    if _slides(config, layers):
        return AttentionKind.SLIDING_WINDOW
    if layers - {"full_attention", "sliding_attention"}:
        return AttentionKind.OTHER
    return AttentionKind.FULL


def attention_refusal(config: Any, kind: AttentionKind) -> str | None:
    """Why a cache of this kind must not be converted, None when it may."""
    reasons = {
        AttentionKind.MLA: (
            f"multi-head latent attention (kv_lora_rank {getattr(config, 'kv_lora_rank', None)}): "
            "its cache holds latents, not keys and values"
        ),
        AttentionKind.SLIDING_WINDOW: (
            f"sliding-window attention (window {getattr(config, 'sliding_window', None)}): "
            "its layers forget keys that a conversion needs"
        ),
        AttentionKind.CHUNKED: "chunked attention: its layers forget keys that a conversion needs",
        AttentionKind.RECURRENT: "recurrent layers: their state is not made of keys and values",
        AttentionKind.ENCODER_DECODER: "encoder-decoder model: its cache is not a token prefix",
        AttentionKind.OTHER: f"layer types {getattr(config, 'layer_types', None)} are not known",
    }
    return reasons.get(kind)


def _slides(config: Any, layers: set[str]) -> bool:
    """Whether some layer can forget a key within the longest context.

    Phi-4-mini states a window of twice its longest context: it never forgets.
    """
    window = getattr(config, "sliding_window", None)
    longest = getattr(config, "max_position_embeddings", None)
    if layers and "sliding_attention" not in layers:
        return False
    if window is None or longest is None:
        return bool(layers) or window is not None
    return bool(getattr(config, "use_sliding_window", True)) and int(window) < int(longest)
