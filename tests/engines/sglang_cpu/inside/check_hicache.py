"""`KvxferStorage` on host pools of SGLang's class, one per rank, without running engines.

What a rank's process would read from SGLang's runtime context is given here.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from real_pools import mha_pool
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
)

from kvstore_xfer.blocks.key import heads_of_rank
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.gate.record import ACCEPTED, GateRecord, subject
from kvstore_xfer.mapper.artifact import Artifact, record_gate, save
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads
from kvstore_xfer.models.attention import AttentionKind
from kvstore_xfer.models.description import ModelDescription
from kvstore_xfer.rope.spec import RopeSpec
from kvstore_xfer.store.local.store import LocalStore
from kvstore_xfer.tier import members
from kvxfer_sglang import attach, hicache
from kvxfer_sglang.facts import EngineFacts
from kvxfer_sglang.pool_view import PoolView
from kvxfer_sglang.weights import Weights

PAGE, PAGES, HEADS, DIM = 4, 7, 4, 8
LAYERS = {"source": 3, "target": 5}
KEYS = [f"page-{number}" for number in range(PAGES)]
SIZES = [(2, 2), (2, 1), (1, 2), (4, 2)]


def describe(role):
    frequencies = tuple(10_000.0 ** (-i / (DIM // 2)) for i in range(DIM // 2))
    return ModelDescription(
        name=role,
        model_type="llama",
        layers=LAYERS[role],
        query_heads=HEADS,
        kv_heads=HEADS,
        key_dim=DIM,
        value_dim=DIM,
        hidden_size=64,
        vocab_size=100,
        max_positions=4096,
        parameters=1000 * LAYERS[role],
        dtype="float32",
        rope=RopeSpec("default", DIM, DIM, frequencies, 1.0, False),
        tokenizer_digest="tokenizer",
        weights_digest=role,
        attention=AttentionKind.FULL,
        refusal=None,
    )


def make_mapper(folder, method):
    source, target = describe("source"), describe("target")
    generator = torch.Generator().manual_seed(1)
    wide = (2 * DIM * HEADS, HEADS * DIM)
    shape = (HEADS, 2 * DIM, DIM) if method is Method.HEAD_LOCAL else wide
    keys, values = (
        tuple(
            LayerMap(
                (layer % 2, 2),
                torch.randn(shape, generator=generator) / 4,
                torch.randn(HEADS, DIM, generator=generator),
            )
            for layer in range(target.layers)
        )
        for _ in range(2)
    )
    mapper = Mapper(method, source, target, assign_heads(HEADS, HEADS), keys, values)
    mapper = save(folder, Artifact(mapper)).mapper
    rates = {
        "prefill_tokens_per_second": 1.0,
        "conversion_tokens_per_second": 1e6,
        "longest_prefix_tokens": 4096,
    }
    record = GateRecord(ACCEPTED, "", **subject(mapper, "float32"), **rates)
    record_gate(folder, "float32", record.to_json())
    return mapper


@pytest.fixture(params=[Method.HEAD_LOCAL, Method.FULL_HEAD])
def family(request, tmp_path, monkeypatch):
    mapper = make_mapper(tmp_path / "mapper", request.param)
    manifest = {
        "family": "f",
        "store": f"local://{tmp_path}/store?min_free=0",
        "models": {"source": {"path": "source"}, "target": {"path": "target"}},
        "pairs": [{"source": "source", "target": "target", "mapper": "mapper"}],
    }
    (tmp_path / "family.yaml").write_text(yaml.safe_dump(manifest))
    for module in (attach, members):
        monkeypatch.setattr(
            module, "describe", lambda path, revision=None: describe(Path(path).name)
        )
    monkeypatch.setattr(hicache, "read_facts", lambda config, pool, names: config.facts)
    family = SimpleNamespace(folder=tmp_path, mapper=mapper, weights=None)
    monkeypatch.setattr(hicache, "weights_in_use", lambda: family.weights)
    watched = Weights()
    watched.watch()
    monkeypatch.setattr(hicache, "weights", watched)
    return family


def facts_of(role, rank, size, layout):
    first, last = heads_of_rank(HEADS, rank, size)
    return EngineFacts(
        sglang_version="0.5.23",
        served_name="served",
        model_path=role,
        revision=None,
        weight_version="default",
        alterations=(),
        compute_dtype="float32",
        kv_dtype="float32",
        pool_dtype="float32",
        page_size=PAGE,
        layout=layout,
        pool_class="MHATokenToKVPoolHost",
        pool_format=None,
        layers=LAYERS[role],
        draft_layers=0,
        first_layer=0,
        heads=last - first,
        head_range=(first, last),
        hash_scheme="sglang-sha256",
        is_mla=False,
        writes=True,
        lora=False,
        multimodal_rope=False,
        tp_rank=rank,
        tp_size=size,
        pp_size=1,
        context_parallel_size=1,
        sidecar_pools=(),
    )


class Rank:
    """One rank of one engine: its pool and its storage."""

    def __init__(self, family, role, rank, size, layout="page_first"):
        facts = facts_of(role, rank, size, layout)
        self.pool = mha_pool(
            layout,
            page_size=PAGE,
            layers=facts.layers,
            heads=facts.heads,
            dim=DIM,
            value_dim=DIM,
            dtype=torch.float32,
        )
        self.heads = slice(*facts.head_range)
        self.view = PoolView(self.pool, torch.float32)
        self.storage = hicache.KvxferStorage(
            SimpleNamespace(
                enable_storage_metrics=True,
                extra_config={"family": str(family.folder / "family.yaml")},
                facts=facts,
            ),
            {},
        )
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()

    def slots(self):
        """Pages of the pool that are not adjacent and not in order."""
        pages = torch.arange(2 * PAGES - 1, 0, -2)[:PAGES]
        return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()

    def pages(self):
        return self.view.pages_at(self.slots())


@pytest.fixture
def prompt():
    """The whole source's pages and, converted without sharding, the whole target's."""

    def pages(layers):
        shape = (layers, PAGE, HEADS, DIM)
        return [KvPage(torch.randn(shape), torch.randn(shape)) for _ in KEYS]

    torch.manual_seed(2)
    return SimpleNamespace(source=pages(LAYERS["source"]), target=pages(LAYERS["target"]))


def start(family, prompt, source_size, target_size):
    """Store the prompt from all ranks of the source; all ranks of the target."""
    family.weights = ("source", "default")
    for rank in range(source_size):
        source = Rank(family, "source", rank, source_size, "page_first_direct")
        for page, whole in zip(source.pages(), prompt.source, strict=True):
            page.keys.copy_(whole.keys[:, :, source.heads])
            page.values.copy_(whole.values[:, :, source.heads])
        info = HiCacheStorageExtraInfo(prefix_keys=["earlier"] * 3)
        assert all(source.storage.batch_set_v1(KEYS, source.slots(), info))
        source.storage.close()
    firsts = [(3 + number) * PAGE for number in range(PAGES)]
    TorchConverter(family.mapper, torch.float32).convert(prompt.source, firsts, prompt.target)
    family.weights = ("target", "default")
    return [Rank(family, "target", rank, target_size) for rank in range(target_size)]


@pytest.mark.parametrize(("source_size", "target_size"), SIZES)
def test_each_rank_gets_its_slice_of_the_unsharded_conversion(
    family, prompt, source_size, target_size
):
    ranks = start(family, prompt, source_size, target_size)
    for rank in ranks:
        assert rank.storage.batch_exists(KEYS) == PAGES
        assert rank.storage.batch_get_v1(KEYS, rank.slots()) == [True] * PAGES
        for page, whole in zip(rank.pages(), prompt.target, strict=True):
            assert torch.equal(page.keys, whole.keys[:, :, rank.heads])
            assert torch.equal(page.values, whole.values[:, :, rank.heads])
    for rank in ranks:
        rank.storage.close()


def test_all_ranks_say_the_same_when_one_shard_of_the_source_is_gone(family, prompt):
    ranks = start(family, prompt, 4, 2)
    with LocalStore(family.folder / "store") as store:
        (lost,) = [r.key for r in store.scan() if f"h3-4.l0-3/native/{KEYS[5]}" in r.key]
        assert store.delete([lost]) == [True]
    assert [rank.storage.batch_exists(KEYS) for rank in ranks] == [5, 5]
    for rank in ranks:
        rank.storage.close()


def test_the_generic_interface_moves_the_same_pages(family, prompt):
    (rank,) = start(family, prompt, 1, 1)
    flat = [rank.pool.get_dummy_flat_data_page() for _ in KEYS]
    assert rank.storage.batch_get(KEYS, flat) == flat
    for page, slot in zip(flat, rank.slots()[::PAGE].tolist(), strict=True):
        rank.pool.set_from_flat_data_page(slot, page)
    for page, whole in zip(rank.pages(), prompt.target, strict=True):
        assert torch.equal(page.keys, whole.keys)
        assert torch.equal(page.values, whole.values)
    own = [rank.pool.get_data_page(slot) for slot in rank.slots()[::PAGE].tolist()]
    assert rank.storage.batch_set(["another"], own[:1]) is True
    assert rank.storage.get("another", torch.zeros_like(own[0])).equal(own[0])
    assert rank.storage.get("absent", own[0]) is None
    assert rank.storage.exists("another")
    rank.storage.close()


def test_stats_are_what_moved_since_the_last_call(family, prompt):
    (rank,) = start(family, prompt, 1, 1)
    rank.storage.batch_get_v1(KEYS, rank.slots())
    rank.storage.batch_set_v1(KEYS[:2], rank.slots()[: 2 * PAGE])
    stats = rank.storage.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([PAGES], [2])
    assert len(stats.prefetch_bandwidth) == len(stats.backup_bandwidth) == 1
    assert rank.storage.get_stats().prefetch_pgs == []
    rank.storage.close()


def test_a_sidecar_pool_that_comes_late_turns_the_tier_off(family, prompt):
    (rank,) = start(family, prompt, 1, 1)
    assert rank.storage.batch_exists(KEYS) == PAGES
    config = rank.storage._config
    config.facts = replace(config.facts, sidecar_pools=("mamba",))
    rank.storage.register_mem_host_pool_v2(rank.pool, "mamba")
    assert rank.storage.batch_exists(KEYS) == 0
    assert rank.storage.batch_get_v1(KEYS, rank.slots()) == [False] * PAGES
    assert rank.storage.batch_set_v1(KEYS, rank.slots()) == [True] * PAGES
    assert rank.storage.batch_exists_v2(KEYS).kv_hit_pages == 0
    rank.storage.close()


def test_nothing_raises_into_the_engine(family, prompt):
    (rank,) = start(family, prompt, 1, 1)
    outside = torch.full((PAGES * PAGE,), 10**6)
    assert rank.storage.batch_get_v1(KEYS, outside) == [False] * PAGES
    assert rank.storage.batch_set_v1(KEYS, outside) == [True] * PAGES
    rank.storage.close()
    rank.storage.close()
    assert rank.storage.batch_exists(KEYS) == 0
    assert rank.storage.batch_get_v1(KEYS, rank.slots()) == [False] * PAGES
    rank.storage.clear()


def test_weights_that_nobody_told_of_turn_the_tier_off(family, prompt):
    (rank,) = start(family, prompt, 1, 1)
    family.weights = ("target", "another version")
    assert rank.storage.batch_exists(KEYS) == 0
    family.weights = ("target", "default")
    assert rank.storage.batch_exists(KEYS) == 0  # off until it is attached again
    rank.storage.on_host_pools_registered()
    assert rank.storage.batch_exists(KEYS) == PAGES
    rank.storage.close()


def test_a_storage_attached_after_an_update_knows_of_it(family, prompt):
    """From tensors the model path stays: only the plug-in can tell the weights are others."""
    start(family, prompt, 1, 1)[0].storage.close()
    hicache.weights.updated(from_files=False, success=True, emptied=True)
    rank = Rank(family, "target", 0, 1)
    assert rank.storage.batch_exists(KEYS) == 0
    hicache.weights.updated(from_files=True, success=True, emptied=True)
    hicache.weights_changed()
    assert rank.storage.batch_exists(KEYS) == PAGES
    rank.storage.close()


@pytest.mark.parametrize("weights", [Weights(), "mixed"])
def test_nothing_is_stored_while_the_weights_are_uncertain(family, prompt, weights, monkeypatch):
    (rank,) = start(family, prompt, 1, 1)
    if weights == "mixed":
        hicache.weights.updating()
    else:
        monkeypatch.setattr(hicache, "weights", weights)  # nobody would tell of an update
    hicache.weights_changed()
    assert rank.storage.batch_exists(KEYS) == 0
    rank.storage.batch_set_v1(["new"], rank.slots()[:PAGE])
    assert rank.storage.batch_exists(["new"]) == 0
    rank.storage.close()


def test_the_injector_wraps_it(family, prompt):
    """SGLang's proxy forwards every method it knows, so each must exist with its signature."""
    (rank,) = start(family, prompt, 1, 1)
    wrapped = HiCacheStorageFailureInjector(rank.storage, 0.0, 0.0)
    assert wrapped.batch_exists(KEYS, HiCacheStorageExtraInfo()) == PAGES
    assert wrapped.batch_get_v1(KEYS, rank.slots(), HiCacheStorageExtraInfo(prefix_keys=[]))
    assert wrapped.batch_set_v2([]) == {}
    wrapped.close()
