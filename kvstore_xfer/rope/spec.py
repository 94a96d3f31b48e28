"""The rotary position embedding of one model, as its own transformers module computes it.

Frequencies are never recomputed here: the model's own rotary module is built on the CPU and its
table is copied. Whatever this file does not know is refused by name.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvstore_xfer.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# model type -> prefix of its class names in transformers. A type is listed only if tests/rope has
# compared it with that model's own rotation and with the keys in that model's own cache.
HALF_SPLIT = {
    "arcee": "Arcee",
    "gemma": "Gemma",
    "gpt_neox": "GPTNeoX",
    "granite": "Granite",
    "granitemoe": "GraniteMoe",
    "llama": "Llama",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "olmoe": "Olmoe",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "seed_oss": "SeedOss",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}
INTERLEAVED = {
    "cohere": "Cohere",
    "ernie4_5": "Ernie4_5",
    "glm": "Glm",
    "glm4": "Glm4",
    "helium": "Helium",
}


@dataclass(frozen=True)
class RopeSpec:
    """All that is needed to rotate keys.

    `inv_freq` holds `rotary_dim / 2` float32 values. Dimensions from `rotary_dim` on are not
    rotated. Pairs are (0, 1), (2, 3), ... when `interleaved`, else (i, i + rotary_dim / 2).
    `attention_factor` scales the rotated dimensions (YaRN). Raises ValueError when the sizes
    contradict each other.
    """

    rope_type: str
    head_dim: int
    rotary_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float
    interleaved: bool

    def __post_init__(self) -> None:
        if not 0 < 2 * len(self.inv_freq) == self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rope: {len(self.inv_freq)} frequencies, rotary_dim {self.rotary_dim} and "
                f"head_dim {self.head_dim} do not fit together"
            )

    def to_json(self) -> dict[str, Any]:
        """A plain dict; its floats survive JSON exactly."""
        return {**asdict(self), "inv_freq": list(self.inv_freq)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RopeSpec:
        """Inverse of `to_json`. Raises TypeError or ValueError on other fields or sizes."""
        return cls(**{**data, "inv_freq": tuple(data["inv_freq"])})

    def digest(self) -> str:
        """Hex digest over every field."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def rope_from_config(config: Any) -> RopeSpec:
    """The RoPE of a transformers config (its text part, for multimodal models).

    Raises UnsupportedModelError, naming the cause, for anything but one rope of a known type on
    every layer of a model whose pairing style is known.
    """
    text = config.get_text_config(decoder=True)
    rope_type = _plain_rope_type(text)
    _refuse_unrotated_layers(text)
    name, interleaved = _pairing(text.model_type)
    inv_freq, attention_factor = _transformers_table(text, name)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return RopeSpec(
        rope_type=rope_type,
        head_dim=head_dim,
        rotary_dim=2 * len(inv_freq),
        inv_freq=inv_freq,
        attention_factor=attention_factor,
        interleaved=interleaved,
    )


def _plain_rope_type(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None)
    name = config.model_type
    if not parameters:
        raise UnsupportedModelError(f"model type {name!r} has no rotary positions")
    if parameters.get("mrope_section") is not None:
        raise UnsupportedModelError(f"multimodal rotary positions (mrope_section) of {name!r}")
    if any(isinstance(value, dict) for value in parameters.values()):
        kinds = ", ".join(sorted(k for k, v in parameters.items() if isinstance(v, dict)))
        raise UnsupportedModelError(f"rope parameters per layer type ({kinds}) of {name!r}")
    rope_type = str(parameters.get("rope_type"))
    if rope_type not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise UnsupportedModelError(f"rope type {rope_type!r} of {name!r} (supported: {known})")
    return rope_type


def _refuse_unrotated_layers(config: Any) -> None:
    layers = getattr(config, "no_rope_layers", None) or []
    if not all(layers):  # the list holds 1 where a layer is rotated
        raise UnsupportedModelError(
            f"layers without rotary positions (no_rope_layers) of {config.model_type!r}"
        )


def _pairing(model_type: str) -> tuple[str, bool]:
    if model_type in HALF_SPLIT:
        return HALF_SPLIT[model_type], False
    if model_type in INTERLEAVED:
        return INTERLEAVED[model_type], True
    raise UnsupportedModelError(f"model type {model_type!r}: its rotary pairing is not known")


def _transformers_table(config: Any, name: str) -> tuple[tuple[float, ...], float]:
    """`inv_freq` and attention factor of the model's own rotary module."""
    kind = config.model_type
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    # An engine may have set another default device (cuda, meta) while it loads a model.
    with torch.device("cpu"):
        rotary = getattr(modeling, f"{name}RotaryEmbedding")(config)
    return tuple(rotary.inv_freq.to(torch.float32).tolist()), float(rotary.attention_scaling)
