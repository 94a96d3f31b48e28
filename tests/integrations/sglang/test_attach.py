"""From facts to a tier, with the trained small model's files and a pool of its geometry."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from kvstore_xfer.blocks.page import KvPage
from kvxfer_sglang.attach import UNLISTED, attach
from kvxfer_sglang.config import Settings
from kvxfer_sglang.facts import EngineFacts
from kvxfer_sglang.refusals import Refusal

SMALL = Path(__file__).parents[2] / "data" / "family" / "small"
LAYERS, HEADS, DIM, TOKENS, PAGES = 6, 4, 32, 16, 3

FACTS = EngineFacts(
    sglang_version="0.5.23",
    served_name="served",
    model_path=str(SMALL),
    revision=None,
    weight_version="default",
    alterations=(),
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    pool_dtype="bfloat16",
    page_size=TOKENS,
    layout="page_first_direct",
    pool_class="MHATokenToKVPoolHost",
    pool_format=None,
    layers=LAYERS,
    draft_layers=0,
    first_layer=0,
    heads=HEADS,
    head_range=(0, HEADS),
    hash_scheme="sglang-sha256",
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


class MHATokenToKVPoolHost:
    def __init__(self, layers=LAYERS, heads=HEADS):
        self.kv_buffer = torch.zeros(2, PAGES, layers, TOKENS, heads, DIM, dtype=torch.bfloat16)
        self.layout, self.page_size, self.layer_num = "page_first_direct", TOKENS, layers
        self.head_num, self.head_dim, self.v_head_dim = heads, DIM, DIM


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("KVXFER_CACHE_DIR", str(tmp_path / "digests"))
    models = {"small": {"path": str(SMALL)}}
    manifest = {"family": "f", "store": "local:store?min_free=0", "models": models}
    (tmp_path / "family.yaml").write_text(yaml.safe_dump(manifest))
    return Settings(tmp_path / "family.yaml")


@pytest.fixture
def attached(settings):
    """``attached(pool, private, **changed_facts)``; its tiers are closed at the end."""
    opened = []

    def make(pool=None, *, private=False, **changes):
        facts = replace(FACTS, **changes)
        pool = pool or MHATokenToKVPoolHost()
        opened.append(attach(settings, facts, pool, private=private))
        return opened[-1]

    yield make
    for attachment in opened:
        if attachment.tier is not None:
            attachment.tier.close()


def reasons(attachment):
    return [reason for reason, _ in attachment.refusals]


def test_a_listed_model_gets_a_tier_of_its_name(attached):
    attachment = attached()
    assert (attachment.name, attachment.refusals) == ("small", [])
    page = attachment.view.page(TOKENS)
    assert attachment.tier.shape == page.shape == KvPage.empty(page.shape).shape


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sglang_version": "0.5.24"}, Refusal.SGLANG_VERSION),
        ({"lora": True}, Refusal.LORA),
        ({"pp_size": 2}, Refusal.PIPELINE_PARALLEL),
        ({"weight_version": None}, Refusal.UNKNOWN_FACT),
        ({"alterations": (("quantization", "fp8"),)}, Refusal.ALTERED_MODEL),
    ],
)
def test_what_rules_conversion_out_leaves_a_plain_store(change, reason, attached):
    attachment = attached(**change)
    assert reasons(attachment) == [reason]
    assert attachment.tier is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sidecar_pools": ("mamba",)}, Refusal.SIDECAR_POOL),
        ({"model_path": None}, Refusal.UNKNOWN_FACT),
        ({"kv_dtype": None}, Refusal.UNKNOWN_FACT),
        ({"model_path": "/no/such/model"}, Refusal.MODEL),
    ],
)
def test_pages_of_nobody_in_particular_are_not_stored(change, reason, attached):
    attachment = attached(**change)
    assert (reasons(attachment), attachment.tier, attachment.name) == ([reason], None, UNLISTED)


def test_a_pool_of_another_geometry_is_stored_under_its_own_shape(attached):
    attachment = attached(MHATokenToKVPoolHost(layers=LAYERS + 1))
    assert reasons(attachment) == [Refusal.GEOMETRY]
    assert attachment.tier.shape.layers == LAYERS + 1


def test_an_unknown_pool_is_refused(attached):
    pool = MHATokenToKVPoolHost()
    pool.layout = "page_unified"
    assert reasons(attached(pool)) == [Refusal.POOL]


def test_a_model_outside_the_family_is_named_and_stored_plainly(settings, attached):
    manifest = yaml.safe_load(settings.manifest.read_text())
    manifest["models"] = {"other": {"path": "org/other"}}
    settings.manifest.write_text(yaml.safe_dump(manifest))
    attachment = attached()
    assert (reasons(attachment), attachment.name) == ([Refusal.NOT_IN_FAMILY], UNLISTED)
    assert str(SMALL) in attachment.refusals[0][1]
    assert attachment.tier is not None


def test_a_name_that_the_manifest_gives_to_another_model_stores_nothing(settings):
    manifest = yaml.safe_load(settings.manifest.read_text())
    manifest["models"]["other"] = {"path": str(SMALL.with_name("large"))}
    settings.manifest.write_text(yaml.safe_dump(manifest))
    found = attach(replace(settings, member="other"), FACTS, MHATokenToKVPoolHost(), private=False)
    assert found.tier is None
    ((refusal, text),) = found.refusals
    assert refusal is Refusal.CONFIG
    assert text.startswith("extra config: model: other is")


def test_a_wrong_manifest_or_store_stores_nothing(settings, attached):
    good = settings.manifest.read_text()
    settings.manifest.write_text(good.replace("local:store?min_free=0", "local:family.yaml"))
    assert reasons(attached()) == [Refusal.STORE]
    settings.manifest.write_text(good + "typo: 1\n")
    assert reasons(attached()) == [Refusal.CONFIG]


def test_an_identity_follows_what_is_in_the_files_and_nothing_else(attached):
    plain = attached().tier.identity
    assert attached(served_name="another", revision="r").tier.identity == plain
    quantized = attached(alterations=(("quantization", "fp8"),)).tier.identity
    assert quantized != plain
    assert attached(alterations=(("quantization", "fp8"),)).tier.identity == quantized


@pytest.mark.parametrize(
    "change",
    [
        {"private": True},
        {"lora": True},
        {"alterations": (("load_format", "dummy"),)},
        {"context_parallel_size": 2},
    ],
)
def test_what_is_in_no_file_is_shared_with_nobody(change, attached):
    first, second = attached(**change).tier, attached(**change).tier
    assert first.identity != second.identity


def test_ranks_of_an_engine_are_one_identity_and_different_shards(attached):
    pool = MHATokenToKVPoolHost(heads=2)
    ranks = [
        attached(pool, tp_rank=rank, tp_size=2, heads=2, head_range=heads).tier
        for rank, heads in enumerate([(0, 2), (2, 4)])
    ]
    assert ranks[0].identity == ranks[1].identity
    page = KvPage.empty(ranks[0].shape)
    page.keys.zero_()
    page.values.zero_()
    ranks[0].write(["page"], [page], 0)
    assert [rank.find(["page"])[0].served for rank in ranks] == [False, False]
    ranks[1].write(["page"], [page], 0)
    assert [rank.find(["page"])[0].served for rank in ranks] == [True, True]
