"""The tier behind real transformers models: what is served is what was computed or converted."""

import pytest
import torch
from transformers import DynamicCache

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ConfigError, ModelError
from kvstore_xfer.mapper.artifact import load, record_gate
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.outcome import Outcome
from kvstore_xfer.tier.open import open_tier
from kvxfer_transformers.cache import cache_of_page
from kvxfer_transformers.model import load_model
from kvxfer_transformers.session import Session, engine_of, greedy

BLOCK = 16
PROMPT = 200  # twelve whole blocks and half a block


@pytest.fixture
def tiers(family_mapper, tmp_path):
    """Opens the tiers of `small` and `large` over one store."""
    opened = []
    manifest = tmp_path / "family.yaml"
    manifest.write_text(
        f"""
family: tiny
store: "local:store?min_free=0"
models: {{small: {{path: small}}, large: {{path: large}}}}
pairs: [{{source: small, target: large, mapper: "{family_mapper.folder}"}}]
"""
    )

    def open_member(member, model):
        opened.append(open_tier(manifest, member, engine_of(model, BLOCK)))
        return opened[-1]

    yield open_member
    for tier in opened:
        tier.close()


@pytest.fixture
def prompt(family_mapper):
    return list(family_mapper.passages[0].tokens[:PROMPT])


def _after_own_cache(model, prompt, served):
    """Logits of the last token when the first `served` tokens come from the model's own cache."""
    cache = cache_of_page(model.capture(prompt[:served]))
    return model.read(prompt[served:], cache, keep=1)[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_blocks_through_the_store_give_the_same_logits_bit_for_bit(
    family_models, tiers, prompt, dtype
):
    model = load_model(family_models.target.description.name, dtype=dtype)
    session = Session(model, tiers("large", model))
    assert session.prefill(prompt).tokens[Outcome.MISSED] == PROMPT
    # The prompt ends inside a block, so that the stored blocks came from one pass over them.
    whole = model.capture(prompt).cut(0, 192)
    again = session.prefill(prompt)
    assert again.tokens[Outcome.NATIVE] == 192
    expected = model.read(prompt[192:], cache_of_page(whole), keep=1)[-1]
    assert torch.equal(again.logits, expected)


def test_a_sibling_hit_is_the_offline_conversion_and_then_derived(family_mapper, tiers, prompt):
    source, target = family_mapper.source, family_mapper.target
    Session(source, tiers("small", source)).prefill(prompt)
    tier = tiers("large", target)
    session = Session(target, tier)
    first = session.prefill(prompt)
    tier.flush()
    again = session.prefill(prompt)
    assert first.tokens[Outcome.CONVERTED] == 192
    assert again.tokens[Outcome.DERIVED] == 192
    run = KvPage.empty_run(tier.shape, 12)
    converter = TorchConverter(family_mapper.artifact.mapper, torch.float32)
    converter.convert([source.capture(prompt).cut(0, 192)], [0], [run])
    offline = target.read(prompt[192:], cache_of_page(run), keep=1)[-1]
    assert torch.equal(again.logits, first.logits)
    torch.testing.assert_close(first.logits, offline)
    native = _after_own_cache(target, prompt, 192)
    assert not torch.equal(first.logits, native)


def test_a_longer_prompt_is_converted_at_the_right_positions(family_mapper, tiers, prompt):
    source, target = family_mapper.source, family_mapper.target
    small = Session(source, tiers("small", source))
    small.prefill(prompt[:104])
    small.prefill(prompt)  # the second half is stored by a request that found the first half
    tier = tiers("large", target)
    converted = Session(target, tier).prefill(prompt)
    assert converted.tokens[Outcome.CONVERTED] == 192
    run = KvPage.empty_run(tier.shape, 12)
    converter = TorchConverter(family_mapper.artifact.mapper, torch.float32)
    converter.convert([source.capture(prompt).cut(0, 192)], [0], [run])
    offline = target.read(prompt[192:], cache_of_page(run), keep=1)[-1]
    torch.testing.assert_close(converted.logits, offline, atol=1e-3, rtol=1e-3)


def test_a_model_in_another_dtype_shares_nothing(family_models, tiers, prompt):
    Session(family_models.target, tiers("large", family_models.target)).prefill(prompt)
    other = load_model(family_models.target.description.name, dtype=torch.bfloat16)
    assert Session(other, tiers("large", other)).prefill(prompt).tokens[Outcome.MISSED] == PROMPT


def test_tenants_with_different_salts_share_nothing(family_mapper, tiers, prompt):
    target = family_mapper.target
    tier = tiers("large", target)
    Session(target, tier, salt="a").prefill(prompt)
    assert Session(target, tier, salt="b").prefill(prompt).tokens[Outcome.MISSED] == PROMPT
    assert Session(target, tier, salt="a").prefill(prompt).tokens[Outcome.NATIVE] == 192


def test_a_rejected_mapper_converts_nothing_and_says_so(family_mapper, tiers, prompt):
    record = {**load(family_mapper.folder).gate["float32"], "verdict": "rejected"}
    accepted = load(family_mapper.folder).gate["float32"]
    record_gate(family_mapper.folder, "float32", record)
    try:
        source, target = family_mapper.source, family_mapper.target
        Session(source, tiers("small", source)).prefill(prompt)
        prefill = Session(target, tiers("large", target)).prefill(prompt)
    finally:
        record_gate(family_mapper.folder, "float32", accepted)
    # The first block says why, those behind it are missed after a gap.
    assert prefill.tokens[Outcome.DECLINED] > 0
    assert prefill.tokens[Outcome.CONVERTED] == 0
    whole = target.read(prompt, DynamicCache(), keep=1)[-1]
    assert torch.equal(prefill.logits, whole)


def test_generate_continues_greedily(family_models, tiers, prompt):
    model = family_models.target
    tokens, prefill = Session(model, tiers("large", model)).generate(prompt, 8)
    cache = DynamicCache()
    logits = model.read(prompt, cache, keep=1)[-1]
    assert tokens == greedy(model, cache, logits, 8)
    assert prefill.seconds > 0


def test_a_session_refuses_the_tier_of_another_model_or_dtype(family_models, tiers):
    tier = tiers("large", family_models.target)
    with pytest.raises(ModelError, match="is not that of"):
        Session(family_models.source, tier)
    other = load_model(family_models.target.description.name, dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="in bfloat16"):
        Session(other, tier)


@pytest.mark.parametrize("tokens", [0, -4, 1.5])
def test_blocks_have_a_whole_number_of_tokens(family_models, tokens):
    with pytest.raises(ConfigError, match="block_tokens"):
        engine_of(family_models.target, tokens)
