"""A made-up family, and LMCache's own storage manager over this package's adapter."""

import time
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from prometheus_client import REGISTRY

from kvstore_xfer.blocks.page import KvPage, KvShape
from kvstore_xfer.gate.record import ACCEPTED, GateRecord, subject
from kvstore_xfer.mapper.artifact import Artifact, record_gate, save
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads
from kvstore_xfer.models.attention import AttentionKind
from kvstore_xfer.models.description import ModelDescription
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.rope.spec import RopeSpec
from kvstore_xfer.tier import members
from kvxfer_lmcache import facts
from kvxfer_lmcache.layouts import Kind, Layout

HEADS, DIM = 4, 32
LAYERS = {"small": 3, "large": 5}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def describe(name, **changed):
    frequencies = tuple(10_000.0 ** (-i / (DIM // 2)) for i in range(DIM // 2))
    fields = {
        "name": name,
        "model_type": "llama",
        "layers": LAYERS.get(name, 3),
        "query_heads": HEADS,
        "kv_heads": HEADS,
        "key_dim": DIM,
        "value_dim": DIM,
        "hidden_size": 64,
        "vocab_size": 100,
        "max_positions": 4096,
        "parameters": 1000 * LAYERS.get(name, 3),
        "dtype": "float32",
        "rope": RopeSpec("default", DIM, DIM, frequencies, 1.0, False),
        "tokenizer_digest": "tokenizer",
        "weights_digest": name,
        "attention": AttentionKind.FULL,
        "refusal": None,
    }
    return ModelDescription(**{**fields, **changed})


def make_mapper(folder):
    source, target = describe("small"), describe("large")
    generator = torch.Generator().manual_seed(1)
    keys, values = (
        tuple(
            LayerMap(
                (layer % 2, 2),
                torch.randn((HEADS, 2 * DIM, DIM), generator=generator) / 8,
                torch.randn(HEADS, DIM, generator=generator),
            )
            for layer in range(target.layers)
        )
        for _ in range(2)
    )
    mapper = Mapper(Method.HEAD_LOCAL, source, target, assign_heads(HEADS, HEADS), keys, values)
    mapper = save(folder, Artifact(mapper)).mapper
    rates = {
        "prefill_tokens_per_second": 1.0,
        "conversion_tokens_per_second": 1e6,
        "longest_prefix_tokens": 4096,
    }
    for dtype in DTYPES.values():
        record = GateRecord(ACCEPTED, "", **subject(mapper, dtype), **rates)
        record_gate(folder, dtype, record.to_json())
    return mapper


class Toy:
    """The family in a folder; `changed` alters the descriptions of its models."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.changed = folder, {}
        self.mapper = make_mapper(folder / "mapper")
        self.write_manifest()
        for module in (facts, members):
            monkeypatch.setattr(module, "describe", self.describe)

    def describe(self, path, revision=None):
        name = Path(path).name
        return describe(name, **self.changed.get(name, {}))

    def write_manifest(self, models=("small", "large"), **model):
        manifest = {
            "family": "toy",
            "store": f"local://{self.folder}/store?min_free=0",
            "models": {name: {"path": name, **model} for name in models},
        }
        if {"small", "large"} <= set(models):
            pair = {"source": "small", "target": "large", "mapper": "mapper"}
            # A sampled prompt is not converted, which these tests are about.
            manifest["pairs"] = [{**pair, "policy": {"sampled_share": 0.0}}]
        (self.folder / "family.yaml").write_text(yaml.safe_dump(manifest))

    def converted(self, pages, first_block=0):
        """The large model's blocks from the small one's, converted offline as one run."""
        tokens, dtype = pages[0].keys.shape[1], pages[0].keys.dtype
        source = KvPage(
            torch.cat([page.keys for page in pages], 1),
            torch.cat([page.values for page in pages], 1),
        )
        shape = KvShape(LAYERS["large"], tokens, HEADS, DIM, DIM, dtype)
        target = KvPage.empty_run(shape, len(pages))
        TorchConverter(self.mapper, dtype).convert([source], [first_block * tokens], [target])
        return target.split(tokens)

    @contextmanager
    def manager(self, policy="default", block_size=None, **params):
        """LMCache's storage manager with the adapter; yields both.

        `block_size` is what LMCache's server says of vLLM on CPUs, None without our server module.
        """
        given = {"family": str(self.folder / "family.yaml"), **params}
        plugin = PluginL2AdapterConfig("kvxfer_lmcache.l2_adapter", "KvxferL2Adapter", given)
        memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
        manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config=memory),
                eviction_config=EvictionConfig(eviction_policy="LRU"),
                l2_adapter_config=L2AdaptersConfig([plugin]),
                prefetch_policy=policy,
            )
        )
        ((_, adapter),) = manager.l2_adapters()
        if block_size is not None:
            known = [(name, ranks, block_size) for name in LAYERS for ranks in (1, 2, 4)]
            adapter.attachments.block_sizes.ask(lambda: known)
        try:
            yield manager, adapter
        finally:
            manager.close()


def layout_of(
    model, chunk, kind=Kind.SPLIT, dtype=torch.float32, *, moved=False, heads=HEADS, block=32
):
    """How LMCache describes the chunks of a model; `moved` by its server instead of the engine."""
    layers = LAYERS[model]
    shape = {
        Kind.SPLIT: (2, layers, chunk, heads * DIM),
        Kind.STACKED: (2 * layers, chunk, heads * DIM),
        Kind.PACKED: (layers, chunk, 2 * heads * DIM),
    }[kind]
    if moved and kind is not Kind.SPLIT:
        shape = (1, *shape)
    canonical = KvShape(layers, chunk, heads, DIM, DIM, dtype)
    layout = Layout(kind, canonical, shape, block if kind is Kind.PACKED else 0)
    return MemoryLayoutDesc([torch.Size(shape)], [dtype]), layout


def random_pages(layout, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        KvPage(*(torch.randn(layout.shape.key_shape, generator=generator) for _ in range(2)))
        for _ in range(count)
    ]


def in_dtype(page, dtype):
    return KvPage(page.keys.to(dtype), page.values.to(dtype))


def keys_of(model, tokens, chunk, salt="", ranks=1, rank=0):
    hasher = TokenHasher(chunk_size=chunk, hash_algorithm="blake3")
    kv_rank = ObjectKey.ComputeKVRank(ranks, rank, ranks, rank)
    return [
        ObjectKey(TokenHasher.hash_to_bytes(digest), model, kv_rank, cache_salt=salt)
        for digest in hasher.compute_chunk_hashes(tokens)
    ]


def raw_of(memory):
    return memory.raw_tensor.view(torch.uint8).view(-1)[: memory.get_size()]


def store(manager, keys, description, layout, pages):
    """Look up and store, as an engine does; returns when the adapter has stored all."""
    fetch(manager, keys, description, layout)
    put(manager, keys, description, layout, pages)
    clear(manager)


def put(manager, keys, description, layout, pages):
    """Store without a lookup before it; returns when the tier has all."""
    counted = Counted()
    write(manager, keys, description, layout, pages)
    wait(lambda: counted.written() == len(keys))


def write(manager, keys, description, layout, pages):
    objects = manager.reserve_write(keys, description)
    assert len(objects) == len(keys)
    for key, page in zip(keys, pages, strict=True):
        layout.pack(page, raw_of(objects[key]))
    manager.finish_write(keys)


def clear(manager):
    def cleared():
        manager.clear(force=False)
        return manager.get_l1_usage()[0] == 0

    wait(cleared)


def fetch(manager, keys, description, layout, seconds=20.0):
    """The leading chunks that LMCache serves, as blocks."""
    rows = {}
    for key in keys:
        rows.setdefault(key.kv_rank, []).append(key)
    groups = [GroupedObjectKeys(row, 0, description) for row in rows.values()]
    handle = manager.submit_prefetch_task(
        PrefetchTaskSpec(key_groups=groups), external_request_id="test"
    )
    assert manager.wait_prefetch_status(handle, seconds)
    result = manager.query_prefetch_status(handle)
    count = min(cells.count_leading_ones() for cells in result.hit_cells)
    got = [key for row in rows.values() for key in row[:count]]
    if not got:
        return []
    with manager.read_prefetched_results(got) as objects:
        blocks = [layout.unpack(raw_of(memory).clone()) for memory in objects]
    manager.finish_read_prefetched(got)
    return blocks


def wait(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def equal(blocks, expected):
    return len(blocks) == len(expected) and all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(blocks, expected, strict=True)
    )


class Counted:
    """How much counters grew since this was made."""

    def __init__(self):
        self._before = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                self._before[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def __call__(self, metric, **labels):
        return sum(
            sample.value - self._before.get((sample.name, tuple(sorted(sample.labels.items()))), 0)
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == metric and labels.items() <= sample.labels.items()
        )

    @staticmethod
    def now(metric, **labels):
        return sum(
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == metric and labels.items() <= sample.labels.items()
        )

    def written(self):
        """Blocks handed to the store by an engine, whatever became of them."""
        kinds = ("native", "unplaced")
        return sum(self("kvxfer_written_blocks_total", kind=kind) for kind in kinds)

    def outcomes(self):
        """Everything that grew, for a message."""
        return {
            (outcome.value, reason.value): count
            for outcome in Outcome
            for reason in Reason
            if (count := self.blocks(outcome.value, reason.value))
        }

    def blocks(self, outcome, reason=None):
        labels = {"outcome": outcome, **({} if reason is None else {"reason": reason})}
        return self("kvxfer_lookup_blocks_total", **labels)
