"""Queries and sensitivities of a model, against what they are for."""

from pathlib import Path

import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.rope.rotate import apply_rope, rope_tables
from kvxfer_transformers.model import load_model

FAMILY = Path(__file__).parents[2] / "data" / "family"
TOKENS = [11, 502, 77, 1900, 3, 640, 12, 88, 901, 15, 15, 203, 9, 1200, 44, 7]


@pytest.fixture(scope="module")
def model():
    return load_model(FAMILY / "small", dtype=torch.float32)


def test_queries_and_keys_give_the_models_attention(model):
    page, queries = model.capture_queries(TOKENS)
    plain = model.capture(TOKENS)
    assert torch.equal(page.keys, plain.keys)
    before = model.model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model.model(input_ids=torch.tensor([TOKENS]), output_attentions=True)
    model.model.set_attn_implementation(before)
    groups = queries.shape[2] // page.keys.shape[2]
    keys = page.keys.repeat_interleave(groups, 2)
    logits = torch.einsum("lqhd,lkhd->lhqk", queries, keys)
    later = torch.ones(len(TOKENS), len(TOKENS)).triu(1).bool()
    found = logits.masked_fill(later, -torch.inf).softmax(-1)
    expected = torch.stack([layer[0] for layer in output.attentions])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-3)


def test_sensitivities_tell_the_divergence_that_an_error_of_the_cache_causes(model):
    """KL(own || moved) is half the mean of (g . error)^2, to second order."""
    start = len(TOKENS) * 3 // 4
    rope, tail = model.description.rope, TOKENS[start:]
    page = model.capture(TOKENS[:start])
    generator = torch.Generator().manual_seed(5)
    errors = [0.02 * torch.randn(page.keys.shape, generator=generator) for _ in range(2)]
    turned = apply_rope(errors[0], rope, *rope_tables(rope, torch.arange(start)))
    moved = KvPage(page.keys + turned, page.values + errors[1])
    own, other = (torch.log_softmax(model.read_after(p, tail).double(), -1) for p in (page, moved))
    divergence = float((own.exp() * (own - other)).sum())
    draws = [model.sensitivity(TOKENS, seed) for seed in range(300)]
    slopes = torch.stack([(g.keys * errors[0]).sum() + (g.values * errors[1]).sum() for g in draws])
    assert float(slopes.square().mean()) / 2 == pytest.approx(divergence, rel=0.3)
    again = model.sensitivity(TOKENS, 0)
    assert torch.equal(again.keys, draws[0].keys)
    assert draws[0].keys.shape == page.keys.shape
