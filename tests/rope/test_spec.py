"""RopeSpec is what transformers computes, and everything else is refused by name."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvstore_xfer.errors import UnsupportedModelError
from kvstore_xfer.rope.rotate import apply_rope, rope_tables, strip_rope
from kvstore_xfer.rope.spec import HALF_SPLIT, INTERLEAVED, RopeSpec, rope_from_config

# As published in each model's config.json (the fields that RoPE and its config class need).
PUBLISHED = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "head_dim": 64,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
    },
    "Qwen3-14B": {
        "model_type": "qwen3",
        "head_dim": 128,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "num_hidden_layers": 40,
        "max_position_embeddings": 40960,
        "max_window_layers": 40,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "Ministral-3-8B": {
        "model_type": "ministral3",
        "head_dim": 128,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "sliding_window": None,
    },
    "Phi-3-mini-4k": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
    },
    "Pythia-1.4B": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
    },
    "GLM-4-9B": {
        "model_type": "glm",
        "head_dim": 128,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
    },
    "Command-R": {
        "model_type": "cohere",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 8000000.0,
    },
    "Vicuna-7B-v1.5-16k": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
    },
}
# The long-context variant that Qwen3's model card describes.
PUBLISHED["Qwen3-14B-YaRN"] = {
    **PUBLISHED["Qwen3-14B"],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}
# Phi-4-mini's widths; its own rope type, longrope, is refused, so the partial rotation is shown
# with the default type.
PUBLISHED["Phi-4-mini-default"] = {
    **PUBLISHED["Phi-3-mini-4k"],
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "sliding_window": 262144,
}

EXPECTED = {  # rope type, head_dim, rotary_dim, attention factor, interleaved
    "Llama-3.1-8B": ("llama3", 128, 128, 1.0, False),
    "Llama-3.2-1B": ("llama3", 64, 64, 1.0, False),
    "Qwen2.5-7B": ("default", 128, 128, 1.0, False),
    "Qwen3-14B": ("default", 128, 128, 1.0, False),
    "Qwen3-14B-YaRN": ("yarn", 128, 128, 1.138629436111989, False),
    "Mistral-7B-v0.3": ("default", 128, 128, 1.0, False),
    "Ministral-3-8B": ("yarn", 128, 128, 1.0, False),
    "Phi-3-mini-4k": ("default", 96, 96, 1.0, False),
    "Phi-4-mini-default": ("default", 128, 96, 1.0, False),
    "Pythia-1.4B": ("default", 128, 32, 1.0, False),
    "GLM-4-9B": ("default", 128, 64, 1.0, True),
    "Command-R": ("default", 128, 128, 1.0, True),
    "Vicuna-7B-v1.5-16k": ("linear", 128, 128, 1.0, False),
}

EPS = torch.finfo(torch.float32).eps
POSITIONS = torch.tensor([*range(64), 2047, 4095, 8192, 32767, 65535, 99999, 131071, 131072])


def config_of(name):
    return AutoConfig.for_model(**PUBLISHED[name])


def transformers_rotation(config, keys, positions):
    """Keys ``[T, H, D]`` rotated by the model's own module and its own apply function.

    GPT-NeoX, Phi and StableLM cut the unrotated dimensions off before they call it; the others
    do it inside, and find nothing to cut.
    """
    kind = config.model_type
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = {**HALF_SPLIT, **INTERLEAVED}[kind]
    rotary = getattr(modeling, f"{name}RotaryEmbedding")(config)
    cos, sin = rotary(keys, positions[None])
    width = cos.shape[-1]
    heads_first = keys[None, ..., :width].transpose(1, 2)
    _, rotated = modeling.apply_rotary_pos_emb(heads_first, heads_first, cos, sin)
    return torch.cat((rotated.transpose(1, 2)[0], keys[..., width:]), dim=-1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_configs_give_their_known_parameters(name):
    spec = rope_from_config(config_of(name))
    rope_type, head_dim, rotary_dim, factor, interleaved = EXPECTED[name]
    assert (spec.rope_type, spec.head_dim, spec.rotary_dim) == (rope_type, head_dim, rotary_dim)
    assert spec.interleaved is interleaved
    assert spec.attention_factor == pytest.approx(factor, rel=1e-12)
    assert spec.inv_freq[0] == (0.25 if rope_type == "linear" else 1.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_apply_is_transformers_own_rotation(name):
    config = config_of(name)
    spec = rope_from_config(config)
    content = torch.randn(len(POSITIONS), 3, spec.head_dim)
    ours = apply_rope(content, spec, *rope_tables(spec, POSITIONS))
    theirs = transformers_rotation(config, content, POSITIONS)
    # Each output is two products and a sum: one rounding each, with or without fused multiply-add.
    assert (ours - theirs).abs().max() <= 2 * EPS * spec.attention_factor * content.abs().max()


@pytest.mark.parametrize("name", PUBLISHED)
def test_strip_undoes_transformers_own_rotation_up_to_position_131072(name):
    config = config_of(name)
    spec = rope_from_config(config)
    content = torch.randn(len(POSITIONS), 3, spec.head_dim)
    rotated = transformers_rotation(config, content, POSITIONS)
    stripped = strip_rope(rotated, spec, *rope_tables(spec, POSITIONS))
    assert (stripped - content).abs().max() <= 4 * EPS * content.abs().max()


def tiny_config(model_type):
    sizes = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
    }
    if model_type == "gpt_neox":
        del sizes["num_key_value_heads"], sizes["head_dim"]
    default = AutoConfig.for_model(model_type)
    if hasattr(default, "num_experts_per_tok"):
        experts = "num_experts" if hasattr(default, "num_experts") else "num_local_experts"
        sizes |= {experts: 4, "num_experts_per_tok": 2}
    return AutoConfig.for_model(model_type, **sizes)


@pytest.mark.parametrize("model_type", sorted(HALF_SPLIT | INTERLEAVED))
def test_each_listed_model_type_rotates_its_cached_keys_this_way(model_type):
    """In the first layer one token's keys differ by position through RoPE alone.

    So stripped keys of a repeated token are all alike, which holds only if pairing, width and
    factor are right and nothing touches the keys between rotation and cache.
    """
    config = tiny_config(model_type)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    positions = torch.tensor([0, 1, 2, 3, 5, 100, 1000, 131071])
    with torch.no_grad():
        outputs = model(
            input_ids=torch.full((1, len(positions)), 7),
            position_ids=positions[None],
            use_cache=True,
        )
    # Named `cache` in newer transformers, which also answers to the old name.
    keys = outputs.past_key_values.layers[0].keys[0].transpose(0, 1)  # [T, H, D]
    spec = rope_from_config(config)
    stripped = strip_rope(keys, spec, *rope_tables(spec, positions))
    assert (keys[1:] - keys[:1]).abs().amax((1, 2)).min() > 0.01 * keys.abs().max()
    assert (stripped - stripped[:1]).abs().max() <= 16 * EPS * keys.abs().max()
    other = replace(spec, interleaved=not spec.interleaved)
    wrong = strip_rope(keys, other, *rope_tables(other, positions))
    assert (wrong - wrong[:1]).abs().max() > 0.01 * keys.abs().max()


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (
            {
                "model_type": "phi3",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                },
            },
            "'longrope'",
        ),
        ({**LLAMA, "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral'"),
        ({"model_type": "gptj"}, "no rotary positions"),
        ({"model_type": "gemma3_text"}, "per layer type"),
        ({"model_type": "smollm3"}, "no_rope_layers"),
        ({"model_type": "persimmon"}, "model type 'persimmon'"),
        (
            {
                "model_type": "qwen2_vl",
                "text_config": {
                    "model_type": "qwen2_vl_text",
                    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
                },
            },
            "mrope_section",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(fields, named):
    with pytest.raises(UnsupportedModelError, match=named):
        rope_from_config(AutoConfig.for_model(**fields))


@pytest.mark.parametrize("name", PUBLISHED)
def test_json_keeps_every_bit(name):
    spec = rope_from_config(config_of(name))
    again = RopeSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.digest() == spec.digest()
    assert torch.tensor(again.inv_freq, dtype=torch.float32).tolist() == list(spec.inv_freq)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_type": "linear"},
        {"head_dim": 256},
        {"attention_factor": 1.0000001},
        {"interleaved": True},
        {"inv_freq": (1.0,) * 64},
        {"rotary_dim": 2, "inv_freq": (1.0,)},
    ],
)
def test_the_digest_changes_with_every_field(change):
    spec = rope_from_config(config_of("Llama-3.1-8B"))
    assert replace(spec, **change).digest() != spec.digest()


def test_a_model_that_is_built_under_another_default_device_and_dtype_is_read_alike():
    before = rope_from_config(config_of("Qwen3-14B-YaRN"))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert rope_from_config(config_of("Qwen3-14B-YaRN")) == before
    finally:
        torch.set_default_dtype(torch.float32)


def test_sizes_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="do not fit together"):
        RopeSpec("default", 64, 64, (1.0,), 1.0, False)
    with pytest.raises(ValueError, match="do not fit together"):
        RopeSpec("default", 2, 4, (1.0, 0.5), 1.0, False)
