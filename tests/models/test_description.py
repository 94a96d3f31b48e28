"""A model is described from its files, and never loaded or run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from kvstore_xfer.errors import ModelError
from kvstore_xfer.models.attention import AttentionKind
from kvstore_xfer.models.description import ModelDescription, describe

FAMILY = Path(__file__).parents[1] / "data" / "family"


def test_a_llama_is_described_as_transformers_saved_it(make_model):
    folder = make_model()
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
    model.save_pretrained(folder)
    found = describe(folder)
    assert found.name == str(folder)
    assert (found.model_type, found.layers, found.hidden_size) == ("llama", 3, 64)
    assert (found.query_heads, found.kv_heads) == (4, 2)
    assert (found.key_dim, found.value_dim) == (16, 16)
    assert (found.vocab_size, found.max_positions) == (32, 512)
    assert (found.parameters, found.dtype) == (model.num_parameters(), "bfloat16")
    assert (found.attention, found.refusal, found.convertible) == (AttentionKind.FULL, None, True)
    assert found.rope.rotary_dim == 16
    assert found.kv_bytes_per_token("bfloat16") == 3 * 2 * (16 + 16) * 2
    assert found.kv_bytes_per_token(torch.float32) == 2 * found.kv_bytes_per_token("bfloat16")


def test_the_siblings_share_a_tokenizer_and_nothing_else():
    small, large = describe(FAMILY / "small"), describe(FAMILY / "large")
    assert small.tokenizer_digest == large.tokenizer_digest
    assert small.weights_digest != large.weights_digest
    assert small.fingerprint() != large.fingerprint()
    assert (small.layers, large.layers) == (6, 9)


DEEPSEEK = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("fields", "kind", "reason"),
    [
        ({"model_type": "deepseek_v2", **DEEPSEEK}, AttentionKind.MLA, "kv_lora_rank 32"),
        ({"model_type": "mistral", "sliding_window": 128}, AttentionKind.SLIDING_WINDOW, "128"),
        ({"model_type": "gemma2", "sliding_window": 64}, AttentionKind.SLIDING_WINDOW, "64"),
        ({"model_type": "mamba"}, AttentionKind.RECURRENT, "recurrent"),
        ({"model_type": "qwen3_next"}, AttentionKind.RECURRENT, "recurrent"),
        ({"model_type": "jamba"}, AttentionKind.RECURRENT, "recurrent"),
        ({"model_type": "llama4_text"}, AttentionKind.CHUNKED, "chunked"),
        ({"model_type": "t5"}, AttentionKind.ENCODER_DECODER, "encoder-decoder"),
        ({"model_type": "gpt2"}, AttentionKind.FULL, "no rotary positions"),
        ({"model_type": "persimmon"}, AttentionKind.FULL, "'persimmon'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            AttentionKind.FULL,
            "'dynamic'",
        ),
        (
            {
                "model_type": "qwen2_vl",
                "text_config": {"model_type": "qwen2_vl_text", "rope_scaling": MROPE},
            },
            AttentionKind.FULL,
            "mrope_section",
        ),
    ],
)
def test_what_must_not_be_converted_is_described_with_the_reason(make_model, fields, kind, reason):
    drop = {"rope_parameters": None} if fields.get("model_type", "llama") != "llama" else {}
    found = describe(make_model(**{**drop, **fields}))
    assert found.attention is kind
    assert not found.convertible
    assert reason in found.refusal
    assert "\n" not in found.refusal
    assert ModelDescription.from_json(found.to_json()) == found


def test_mla_counts_the_latent_that_its_cache_holds(make_model):
    found = describe(make_model(model_type="deepseek_v2", **DEEPSEEK))
    assert (found.kv_heads, found.key_dim, found.value_dim) == (1, 32 + 8, 0)
    assert found.kv_bytes_per_token("bfloat16") == 3 * 40 * 2


def test_a_window_longer_than_the_context_is_full_attention(make_model):
    assert describe(make_model(model_type="mistral", sliding_window=512)).convertible


def test_a_window_that_is_switched_off_is_full_attention(make_model):
    fields = {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}
    assert describe(make_model(**fields)).attention is AttentionKind.FULL
    fields |= {"use_sliding_window": True, "max_window_layers": 1}
    assert describe(make_model(**fields)).attention is AttentionKind.SLIDING_WINDOW


def test_a_multimodal_wrapper_is_described_by_its_language_model(make_model):
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    found = describe(make_model(model_type="llava", text_config=text, rope_parameters=None))
    assert (found.model_type, found.key_dim, found.convertible) == ("llama", 16, True)


def test_json_gives_an_equal_description_back(make_model):
    found = describe(make_model())
    again = ModelDescription.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert again.fingerprint() == found.fingerprint()


def test_the_fingerprint_covers_exactly_what_a_mapper_depends_on(make_model):
    found = describe(make_model())
    depends = {
        "model_type": "qwen3",
        "layers": 4,
        "query_heads": 8,
        "kv_heads": 4,
        "key_dim": 32,
        "value_dim": 32,
        "hidden_size": 128,
        "vocab_size": 33,
        "rope": replace(found.rope, attention_factor=1.25),
        "tokenizer_digest": "0" * 64,
        "weights_digest": "0" * 64,
        "attention": AttentionKind.OTHER,
    }
    free = {
        "name": "other",
        "max_positions": 4096,
        "parameters": 1,
        "dtype": "float16",
        "refusal": "x",
    }
    assert set(depends) | set(free) == set(vars(found))
    for field, value in depends.items():
        assert replace(found, **{field: value}).fingerprint() != found.fingerprint(), field
    for field, value in free.items():
        assert replace(found, **{field: value}).fingerprint() == found.fingerprint(), field


def test_equal_weights_with_another_tokenizer_are_another_model(make_model, tokenizer_json):
    one = describe(make_model("one"))
    tokenizer_json["model"]["vocab"] |= {"a": 1, "b": 0}
    other = describe(make_model("other", tokenizer=tokenizer_json))
    assert one.weights_digest == other.weights_digest
    assert one.tokenizer_digest != other.tokenizer_digest
    assert one.fingerprint() != other.fingerprint()


def test_a_copy_elsewhere_has_the_same_fingerprint(make_model, tmp_path):
    folder = make_model()
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert describe(folder).fingerprint() == describe(copy).fingerprint()


def test_an_unknown_dtype_is_refused(make_model):
    with pytest.raises(ValueError, match="'nonsense'"):
        describe(make_model()).kv_bytes_per_token("nonsense")


@pytest.mark.parametrize("model_type", ["llama", "homemade"])
def test_code_in_the_model_folder_is_never_run(make_model, tmp_path, model_type):
    folder = make_model()
    trap = tmp_path / "ran"
    (folder / "trap.py").write_text(f"open({str(trap)!r}, 'w')\n")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "trap.Config"}}
    file.write_text(json.dumps(config))
    if model_type == "llama":
        assert describe(folder).convertible
    else:
        with pytest.raises(ModelError, match="'homemade'"):
            describe(folder)
    assert not trap.exists()


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "no such model folder"),
        (remove("config.json"), r"config\.json: no such file"),
        (write("config.json", "{"), r"config\.json: cannot be read"),
        (write("config.json", "[]"), r"config\.json: expected a JSON object"),
        (write("config.json", '{"model_type": "nonesuch"}'), "'nonesuch'"),
        (remove("model.safetensors"), r"no \*\.safetensors"),
        (remove("tokenizer.json"), "no tokenizer; add"),
        (write("tokenizer.json", '{"model": 3}'), r"tokenizer\.json: not a tokenizer file"),
        (
            write("model.safetensors.index.json", '{"weight_map": {"w": "part-2.safetensors"}}'),
            r"part-2\.safetensors: missing",
        ),
    ],
)
def test_a_damaged_folder_is_told_in_one_line(make_model, damage, said):
    folder = make_model()
    damage(folder)
    with pytest.raises(ModelError, match=said) as told:
        describe(folder)
    assert "\n" not in str(told.value)
    assert str(folder) in str(told.value)
