from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvstore_xfer.blocks.key import heads_of_rank
from kvxfer_sglang.facts import (
    BIGRAM_HASHES,
    UNIGRAM_HASHES,
    EngineFacts,
    logical_dtype,
    read_facts,
)
from kvxfer_sglang.refusals import Refusal, conversion_refusals

PLAIN = EngineFacts(
    sglang_version="0.5.23",
    served_name="served",
    model_path="/models/one",
    revision=None,
    weight_version="default",
    alterations=(),
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    pool_dtype="bfloat16",
    page_size=64,
    layout="page_first",
    pool_class="MHATokenToKVPoolHost",
    pool_format=None,
    layers=40,
    draft_layers=0,
    first_layer=0,
    heads=8,
    head_range=(0, 8),
    hash_scheme=UNIGRAM_HASHES,
    is_mla=False,
    writes=True,
    lora=False,
    multimodal_rope=False,
    tp_rank=0,
    tp_size=1,
    pp_size=1,
    context_parallel_size=1,
    sidecar_pools=(),
)


def test_a_plain_dense_model_may_be_converted():
    assert conversion_refusals(PLAIN) == []


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        ({"sglang_version": "0.5.24"}, Refusal.SGLANG_VERSION, "0.5.24"),
        ({"sglang_version": None}, Refusal.SGLANG_VERSION, "0.5.23"),
        ({"model_path": None}, Refusal.UNKNOWN_FACT, "model_path"),
        ({"weight_version": None}, Refusal.UNKNOWN_FACT, "weight_version"),
        ({"alterations": None}, Refusal.UNKNOWN_FACT, "alterations"),
        ({"compute_dtype": None}, Refusal.UNKNOWN_FACT, "compute_dtype"),
        ({"kv_dtype": None}, Refusal.UNKNOWN_FACT, "kv_dtype"),
        ({"head_range": None}, Refusal.UNKNOWN_FACT, "head_range"),
        ({"hash_scheme": None}, Refusal.UNKNOWN_FACT, "hash_scheme"),
        ({"lora": None}, Refusal.UNKNOWN_FACT, "lora"),
        ({"multimodal_rope": None}, Refusal.UNKNOWN_FACT, "multimodal_rope"),
        ({"is_mla": True}, Refusal.MLA, "MLA"),
        ({"sidecar_pools": ("mamba", "swa")}, Refusal.SIDECAR_POOL, "mamba, swa"),
        ({"pool_format": "interleaved"}, Refusal.POOL_FORMAT, "interleaved"),
        ({"draft_layers": 2}, Refusal.DRAFT_LAYERS, "2 draft layers"),
        ({"hash_scheme": BIGRAM_HASHES}, Refusal.BIGRAM_HASHES, "EAGLE"),
        ({"context_parallel_size": 4}, Refusal.CONTEXT_PARALLEL, "4"),
        ({"pp_size": 2}, Refusal.PIPELINE_PARALLEL, "2"),
        ({"kv_dtype": "float8_e4m3fn"}, Refusal.KV_DTYPE, "float8_e4m3fn"),
        ({"lora": True}, Refusal.LORA, "LoRA"),
        ({"multimodal_rope": True}, Refusal.MULTIMODAL_ROPE, "RoPE"),
        (
            {"alterations": (("load_format", "dummy"), ("quantization", "fp8"))},
            Refusal.ALTERED_MODEL,
            "--load-format dummy, --quantization fp8",
        ),
    ],
)
def test_each_rule_refuses_by_itself_and_names_what_it_saw(change, reason, named):
    ((found, text),) = conversion_refusals(replace(PLAIN, **change))
    assert found is reason
    assert named in text


def test_every_rule_that_applies_is_listed():
    found = conversion_refusals(replace(PLAIN, is_mla=True, lora=True, pp_size=2))
    assert [reason for reason, _ in found] == [
        Refusal.MLA,
        Refusal.PIPELINE_PARALLEL,
        Refusal.LORA,
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_split_the_heads_without_gap_or_overlap(size):
    ranges = [heads_of_rank(8, rank, size) for rank in range(size)]
    assert [head for first, last in ranges for head in range(first, last)] == list(range(8))


def test_more_ranks_than_heads_hold_copies_of_neighbouring_heads():
    ranges = [heads_of_rank(2, rank, 8) for rank in range(8)]
    assert ranges == [(0, 1)] * 4 + [(1, 2)] * 4


@pytest.mark.parametrize(
    ("stored", "setting", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.uint8, "fp8_e4m3", torch.float8_e4m3fn),
        (torch.uint8, "fp8_e5m2", torch.float8_e5m2),
        (torch.uint8, "auto", None),
        (torch.uint8, "nvfp4", None),
        (torch.uint8, None, None),
    ],
)
def test_what_the_bytes_of_a_pool_mean(stored, setting, expected):
    assert logical_dtype(stored, setting) is expected


def test_eight_bit_floats_of_rocm_are_not_guessed(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert logical_dtype(torch.uint8, "fp8_e4m3") is None


def test_without_a_readable_engine_the_pool_is_described_and_nothing_converts():
    config = SimpleNamespace(
        model_name="served",
        is_mla_model=False,
        is_storage_writer=True,
        tp_rank=1,
        tp_size=2,
        pp_size=1,
        attn_cp_size=1,
        dcp_size=1,
    )
    pool = SimpleNamespace(
        dtype=torch.bfloat16,
        page_size=64,
        layout="page_first",
        storage_format_tag=None,
        layer_num=41,
        target_layer_num=40,
        start_layer=0,
        head_num=4,
    )
    facts = read_facts(config, pool, ["kv", "swa"])
    assert facts.layer_range == (0, 40)
    assert (facts.draft_layers, facts.sidecar_pools) == (1, ("swa",))
    assert (facts.model_path, facts.head_range, facts.lora) == (None, None, None)
    reasons = {reason for reason, _ in conversion_refusals(facts)}
    assert {Refusal.UNKNOWN_FACT, Refusal.SIDECAR_POOL, Refusal.DRAFT_LAYERS} <= reasons
