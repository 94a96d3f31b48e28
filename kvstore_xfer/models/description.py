"""The full description of one model: everything a mapper or a sibling lookup depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvstore_xfer.errors import ModelError, UnsupportedModelError
from kvstore_xfer.models.attention import AttentionKind, attention_kind, attention_refusal
from kvstore_xfer.models.location import ModelFolder, locate, read_json, weight_files
from kvstore_xfer.models.tokenizer import tokenizer_digest
from kvstore_xfer.models.weights import content_digest, summarise
from kvstore_xfer.rope.spec import RopeSpec, rope_from_config

if TYPE_CHECKING:
    from pathlib import Path

# A fingerprint leaves out what may differ between equals: where the model lies, how long a
# context it is said to take, what its weights digest implies, and our own wording.
_NOT_IN_FINGERPRINT = ("name", "max_positions", "parameters", "dtype", "refusal")


@dataclass(frozen=True)
class ModelDescription:
    """One model. Sizes are those of the language model; `kv_heads` is 0 without a KV cache.

    For MLA the cache holds one latent per token and layer: `kv_heads` 1, `value_dim` 0.
    `dtype` is torch's name without the prefix, `max_positions` 0 when the config sets no limit.
    `rope` is None when it is not of a supported kind. `refusal` says why its cache must not be
    converted, None when it may be.
    """

    name: str
    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    parameters: int
    dtype: str
    rope: RopeSpec | None
    tokenizer_digest: str
    weights_digest: str
    attention: AttentionKind
    refusal: str | None

    @property
    def convertible(self) -> bool:
        return self.refusal is None

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` turns back into an equal description."""
        rope = None if self.rope is None else self.rope.to_json()
        return {**asdict(self), "rope": rope, "attention": self.attention.value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelDescription:
        """Inverse of `to_json`. Raises TypeError or ValueError on other fields or values."""
        rope = None if data["rope"] is None else RopeSpec.from_json(data["rope"])
        return cls(**{**data, "rope": rope, "attention": AttentionKind(data["attention"])})

    def fingerprint(self) -> str:
        """Hex digest over weights, tokenizer, geometry and RoPE."""
        fields = {k: v for k, v in self.to_json().items() if k not in _NOT_IN_FINGERPRINT}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    def kv_bytes_per_token(self, dtype: str | torch.dtype) -> int:
        """Bytes of one token's keys and values over all layers and heads.

        Raises ValueError when `dtype` is not a torch dtype or its name.
        """
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype {dtype!r}: expected a torch dtype, such as bfloat16")
        return self.layers * self.kv_heads * (self.key_dim + self.value_dim) * kind.itemsize


def describe(model: str | Path, *, revision: str | None = None) -> ModelDescription:
    """Describe a model folder or hub id, without loading weights or running its code.

    A model whose cache must not be converted is described, with the reason in `refusal`. Raises
    ModelError when the model is missing or damaged.
    """
    folder = locate(model, revision)
    config = _language_config(folder.path)
    files = weight_files(folder.path)
    summary = summarise(files)
    kind = attention_kind(config)
    rope, rope_refusal = _rope(config)
    return ModelDescription(
        name=str(model),
        model_type=config.model_type,
        layers=_size(config, "num_hidden_layers"),
        **_geometry(config, kind),
        hidden_size=_size(config, "hidden_size"),
        vocab_size=_size(config, "vocab_size"),
        max_positions=_size(config, "max_position_embeddings"),
        parameters=summary.parameters,
        dtype=_dtype(config, summary.dtype),
        rope=rope,
        tokenizer_digest=tokenizer_digest(folder.path),
        weights_digest=_weights_digest(folder, files),
        attention=kind,
        refusal=attention_refusal(config, kind) or rope_refusal,
    )


def _language_config(folder: Path) -> Any:
    from transformers import AutoConfig

    file = folder / "config.json"
    model_type = read_json(file).get("model_type")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config.get_text_config(decoder=True)
    except Exception as error:  # noqa: BLE001 - transformers raises whatever a config provokes
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{file}: transformers cannot read model type {model_type!r} ({cause}); it may need "
            "a newer transformers"
        ) from None


def _rope(config: Any) -> tuple[RopeSpec | None, str | None]:
    try:
        return rope_from_config(config), None
    except UnsupportedModelError as error:
        return None, str(error)


def _geometry(config: Any, kind: AttentionKind) -> dict[str, int]:
    heads = _size(config, "num_attention_heads")
    if kind is AttentionKind.MLA:
        latent = _size(config, "kv_lora_rank") + _size(config, "qk_rope_head_dim")
        return {"query_heads": heads, "kv_heads": 1, "key_dim": latent, "value_dim": 0}
    key_dim = _size(config, "head_dim") or _size(config, "hidden_size") // max(heads, 1)
    return {
        "query_heads": heads,
        "kv_heads": _size(config, "num_key_value_heads") or heads,
        "key_dim": key_dim if heads else 0,
        "value_dim": (_size(config, "v_head_dim") or key_dim) if heads else 0,
    }


def _size(config: Any, field: str) -> int:
    """A size of the config, 0 when it has none (or one per layer, in kinds we do not convert)."""
    value = getattr(config, field, None)
    return value if isinstance(value, int) else 0


def _dtype(config: Any, stored: str) -> str:
    stated = getattr(config, "dtype", None)
    return str(stated).removeprefix("torch.") if stated else stored


def _weights_digest(folder: ModelFolder, files: list[Path]) -> str:
    """The hub's commit already is a digest of the weights; else their bytes are hashed."""
    if folder.revision is not None:
        return f"hub-{folder.revision}"
    return content_digest(files)
