"""Tiny model folders, made on the spot."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 5,
            "content": "<end>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4},
        "merges": [["a", "b"], ["ab", "c"]],
    },
}

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def digest_cache(tmp_path, monkeypatch):
    """No test sees or leaves digests in the user's own cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVXFER_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def tokenizer_json():
    return copy.deepcopy(TOKENIZER)


@pytest.fixture
def make_model(tmp_path):
    """Write a model folder: any config, random weights, a five-token vocabulary."""

    def make(name="model", seed=0, tokenizer=TOKENIZER, **fields):
        folder = tmp_path / name
        AutoConfig.for_model(**{**LLAMA, **fields}).save_pretrained(folder)
        generator = torch.Generator().manual_seed(seed)
        weights = {"w": torch.randn(32, 64, generator=generator), "b": torch.zeros(7)}
        save_file(weights, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return folder

    return make
