"""`KvxferBackend` under LMCache's real in-process engine; only the copy to a GPU is replaced."""

import itertools

import pytest
import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from toy import DIM, HEADS, LAYERS, Counted, wait

from kvstore_xfer.blocks.page import KvPage

CHUNK, CHUNKS = 16, 5
TOKENS = CHUNK * CHUNKS
numbers = itertools.count()


class CpuConnector(GPUConnectorInterface):
    """The engine's KV cache is a tensor ``[2, L, tokens, H * D]``, a token's slot its position."""

    def __init__(self, layers):
        self.layers = layers

    def get_shape(self, num_tokens):
        return torch.Size([2, self.layers, num_tokens, HEADS * DIM])

    def to_gpu(self, memory_obj, start, end, **kwargs):
        kwargs["kvcache"][:, :, start:end].copy_(memory_obj.tensor)

    def from_gpu(self, memory_obj, start, end, **kwargs):
        memory_obj.tensor.copy_(kwargs["kvcache"][:, :, start:end])

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for row in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*row, **kwargs)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for row in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*row, **kwargs)


class Answers:
    """Stands for the process that waits for the results of asynchronous lookups."""

    def __init__(self):
        self.of = {}

    def send_response_to_scheduler(self, lookup_id, retrieved_length):
        self.of[lookup_id] = retrieved_length


class Engine:
    def __init__(self, toy, role, *, asynchronous, local_cpu=False, dtype=torch.float32):
        self.role, self.asynchronous = role, asynchronous
        self.name = f"{role}-{next(numbers)}"
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            local_cpu=local_cpu,
            max_local_cpu_size=0.05,
            enable_async_loading=asynchronous,
            storage_plugins=["kvxfer"],
            save_unfull_chunk=True,
            extra_config={
                "storage_plugin.kvxfer.module_path": "kvxfer_lmcache.storage_plugin",
                "storage_plugin.kvxfer.class_name": "KvxferBackend",
                "kvxfer.family": str(toy.folder / "family.yaml"),
            },
        )
        metadata = LMCacheMetadata(
            model_name=role,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=dtype,
            kv_shape=(LAYERS[role], 2, CHUNK, HEADS, DIM),
            chunk_size=CHUNK,
        )
        self.answers, self.dtype = Answers(), dtype
        connector = CpuConnector(LAYERS[role])
        broadcasts = (mock_up_broadcast_fn, mock_up_broadcast_object_fn)
        self.engine = LMCacheEngineBuilder.get_or_create(
            self.name, config, metadata, connector, *broadcasts
        )
        self.engine.post_init(async_lookup_server=self.answers)
        backends = self.engine.storage_manager.storage_backends
        (self.backend,) = [b for b in backends.values() if type(b).__name__ == "KvxferBackend"]
        self.local = backends.get("LocalCPUBackend")
        wait(lambda: self.backend._attachment() is not None)

    def store(self, tokens, cache):
        counted = Counted()
        self.engine.store(tokens=tokens, kvcache=cache, req_id=f"w{next(numbers)}")
        wait(lambda: counted.written() == CHUNKS)

    def load(self, tokens):
        """How many tokens were found, and the engine's cache after they were loaded."""
        request = f"r{next(numbers)}"
        if self.asynchronous:
            self.engine.async_lookup_and_prefetch(request, tokens=tokens, pin=True)
            wait(lambda: request in self.answers.of)
            found = self.answers.of[request]
        else:
            found = self.engine.lookup(tokens=tokens, lookup_id=request, pin=True)
        cache = torch.zeros(2, LAYERS[self.role], 128, HEADS * DIM, dtype=self.dtype)
        if found:
            self.engine.retrieve(tokens, kvcache=cache, req_id=request)
        if not self.asynchronous:
            self.engine.lookup_unpin(request)
        return found, cache[:, :, :TOKENS]

    def close(self):
        LMCacheEngineBuilder.destroy(self.name)


@pytest.fixture
def engine(toy):
    made = []

    def make(role, **options):
        made.append(Engine(toy, role, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt():
    seed = next(numbers)
    return [(seed * 7919 + 31 * i) % 2000 for i in range(TOKENS + 3)]


def cache_of(role, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, LAYERS[role], 128, HEADS * DIM, generator=generator).to(dtype)


def converted(toy, cache):
    halves = cache[:, :, :TOKENS].view(2, -1, TOKENS, HEADS, DIM)
    whole = KvPage(halves[0], halves[1])
    blocks = toy.converted(whole.split(CHUNK))
    joined = [torch.cat([getattr(b, name) for b in blocks], 1) for name in ("keys", "values")]
    return torch.stack(joined).view(2, LAYERS["large"], TOKENS, HEADS * DIM)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_reads_what_it_stored(engine, asynchronous):
    small, cache, tokens = engine("small", asynchronous=asynchronous), cache_of("small"), prompt()
    assert small.load(tokens)[0] == 0
    small.store(tokens, cache)
    found, loaded = small.load(tokens)
    assert found == TOKENS
    assert torch.equal(loaded, cache[:, :, :TOKENS])


def test_a_sibling_is_converted_for_with_asynchronous_loading(toy, engine):
    small, large = engine("small", asynchronous=True), engine("large", asynchronous=True)
    cache, tokens, counted = cache_of("small"), prompt(), Counted()
    small.store(tokens, cache)
    for outcome in ("converted", "derived"):
        found, loaded = large.load(tokens)
        assert found == TOKENS
        assert torch.equal(loaded, converted(toy, cache))
        assert counted.blocks(outcome) == CHUNKS
        large.backend._attachments.flush()


def test_nothing_is_converted_without_asynchronous_loading(engine):
    small, large = engine("small", asynchronous=False), engine("large", asynchronous=False)
    tokens, counted = prompt(), Counted()
    small.store(tokens, cache_of("small"))
    assert large.load(tokens)[0] == 0
    assert counted.blocks("converted") == 0
    assert counted.now("kvxfer_conversion_refused", reason="synchronous_loading") >= 1


def test_places_stay_right_when_lmcache_holds_the_first_chunks_itself(toy, engine):
    small = engine("small", asynchronous=True)
    large = engine("large", asynchronous=True, local_cpu=True)
    cache, tokens = cache_of("small"), prompt()
    small.store(tokens, cache)
    found, loaded = large.load(tokens)
    expected = converted(toy, cache)
    assert found == TOKENS
    assert torch.equal(loaded, expected)
    for number, (_, _, key) in enumerate(large.engine.token_database.process_tokens(tokens)):
        if number >= 2:
            large.local.remove(key)
            large.backend.remove(key)
    found, loaded = large.load(tokens)
    assert found == TOKENS
    assert torch.equal(loaded, expected)


def test_runs_in_two_dtypes_are_never_mixed(engine):
    tokens = prompt()
    full, half = (
        engine("small", asynchronous=True, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    full.store(tokens, cache_of("small"))
    assert half.load(tokens)[0] == 0


def test_a_store_that_fails_is_a_miss(engine, monkeypatch):
    small, tokens, counted = engine("small", asynchronous=True), prompt(), Counted()
    small.store(tokens, cache_of("small"))

    def broken(*_):
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(small.backend._attachments._store, "read", broken)
    found, _ = small.load(tokens)
    assert found == 0
    assert counted.blocks("missed", "store_error") == CHUNKS
