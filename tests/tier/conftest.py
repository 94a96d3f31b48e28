"""A toy family: caches in closed form, an accepted mapper, stores that fail on demand."""

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvstore_xfer.blocks.chain import HASH_SCHEME, chain_hashes
from kvstore_xfer.blocks.key import Shard
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.gate.record import ACCEPTED, GateRecord, subject
from kvstore_xfer.mapper.artifact import Artifact, load, save
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads
from kvstore_xfer.rope.rotate import apply_rope, rope_tables
from kvstore_xfer.store.base import BlockStore
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.tier.open import Engine, announce
from kvstore_xfer.tier.pair import make_pair
from kvstore_xfer.tier.policy import Policy, direction_of
from kvstore_xfer.tier.tier import Tier

BLOCK = 4
TESTS = Path(__file__).parents[1]
for folder in (TESTS / "tier", TESTS / "deploy", TESTS / "store"):
    sys.path.insert(0, str(folder))  # modules of no package


class FaultyStore(BlockStore):
    """A store in front of another that fails, hangs or waits as told.

    `broken` names methods that raise; `before` is called with the method and its arguments.
    """

    def __init__(self, inner):
        self.inner = inner
        self.broken = set()
        self.before = lambda method, argument: None

    def _call(self, method, argument, **options):
        self.before(method, argument)
        if method in self.broken:
            raise OSError(5, f"{method} is broken")
        return getattr(self.inner, method)(argument, **options)

    def exists(self, keys):
        return self._call("exists", keys)

    def read(self, requests):
        return self._call("read", requests)

    def write(self, requests, *, overwrite=False):
        return self._call("write", requests, overwrite=overwrite)

    def delete(self, keys):
        return self._call("delete", keys)

    def scan(self, prefix=""):
        return self._call("scan", prefix)

    def stats(self):
        return self.inner.stats()

    def close(self):
        self.inner.close()


class Toy:
    """Source, target and a third model; caches are functions of token, position and model."""

    def __init__(self, make_description, folder):
        self.source = make_description("source", 2, 4, 8, parameters=1000)
        self.target = make_description("target", 3, 4, 8, theta=500.0, parameters=5000)
        self.third = make_description("third", 2, 4, 8, theta=300.0, parameters=9000)
        self.folder = folder

    def mapper(self, source, target, method=Method.HEAD_LOCAL, seed=0):
        generator = torch.Generator().manual_seed(seed)
        spread = source.kv_heads if method is Method.FULL_HEAD else 1

        def layer(width_in, width_out):
            width = source.layers * width_in * spread
            shape = (target.kv_heads, width, width_out)
            if method is Method.FULL_HEAD:
                shape = (width, target.kv_heads * width_out)
            weight = torch.randn(shape, generator=generator) / width**0.5
            bias = torch.randn(target.kv_heads, width_out, generator=generator)
            return LayerMap(tuple(range(source.layers)), weight.half(), bias)

        return Mapper(
            method,
            source,
            target,
            assign_heads(source.kv_heads, target.kv_heads),
            tuple(layer(source.key_dim, target.key_dim) for _ in range(target.layers)),
            tuple(layer(source.value_dim, target.value_dim) for _ in range(target.layers)),
        )

    def artifact(self, source=None, target=None, method=Method.HEAD_LOCAL, seed=0):
        source, target = source or self.source, target or self.target
        folder = self.folder / f"{source.name}-{target.name}-{method.value}-{seed}"
        if not folder.exists():
            save(folder, Artifact(self.mapper(source, target, method, seed)))
        made = load(folder)
        return replace(made, gate={"float32": self.record(made.mapper).to_json()})

    @staticmethod
    def record(mapper, verdict=ACCEPTED, **fields):
        measured = {
            "prefill_tokens_per_second": 100.0,
            "conversion_tokens_per_second": 1000.0,
            "longest_prefix_tokens": 4096,
        }
        return GateRecord(verdict, "", **{**subject(mapper, "float32"), **measured, **fields})

    @staticmethod
    def engine(model, **fields):
        return Engine(model, "float32", BLOCK, HASH_SCHEME, **fields)

    def pair(self, engine, artifact=None, policy=None):
        artifact = artifact or self.artifact()
        return make_pair(
            artifact,
            engine.model,
            engine.identity,
            engine.own_shard,
            policy or Policy(),
            direction_of(artifact.mapper.source, artifact.mapper.target),
            TorchConverter,
        )

    def tier(
        self, store, model, *artifacts, policy=None, policies=None, read_seconds=2.0, **fields
    ):
        engine = self.engine(model, **fields)
        announce(store, engine)
        policies = policies or [policy] * len(artifacts)
        pairs = [self.pair(engine, *pair) for pair in zip(artifacts, policies, strict=True)]
        return Tier(
            store,
            model.name,
            engine.identity,
            engine.own_shard,
            engine.block_shape,
            pairs,
            layout=engine.layout or (),
            read_seconds=read_seconds,
        )

    @staticmethod
    def cache(model, tokens, heads=slice(None)):
        """Keys (rotated) and values ``[L, T, H, D]``: a sine of token, layer, head and width."""

        def content(width, phase):
            grids = torch.meshgrid(
                torch.arange(model.layers),
                torch.tensor(tokens),
                torch.arange(model.kv_heads),
                torch.arange(width),
                indexing="ij",
            )
            factors = (1.3, 0.37, 0.7, 0.11)
            return torch.sin(sum(f * g for f, g in zip(factors, grids, strict=True)) + phase)

        phase = float(len(model.name))
        keys = content(model.key_dim, phase)
        keys = apply_rope(keys, model.rope, *rope_tables(model.rope, torch.arange(len(tokens))))
        values = content(model.value_dim, phase + 0.5)
        return KvPage(keys[:, :, heads].contiguous(), values[:, :, heads].contiguous())

    def converted(self, artifact, tokens):
        """What the whole source cache of the tokens becomes, all heads."""
        like = self.cache(artifact.mapper.target, tokens)
        page = KvPage(torch.empty_like(like.keys), torch.empty_like(like.values))
        TorchConverter(artifact.mapper, torch.float32).convert(
            [self.cache(artifact.mapper.source, tokens)], [0], [page]
        )
        return page

    @staticmethod
    def blocks(page):
        cuts = [slice(start, start + BLOCK) for start in range(0, page.keys.shape[1], BLOCK)]
        return [KvPage(page.keys[:, cut], page.values[:, cut]) for cut in cuts]

    @staticmethod
    def hashes(tokens, salt=""):
        return chain_hashes(tokens, BLOCK, salt)

    @staticmethod
    def pages(tier, count):
        pages = [KvPage.empty(tier.shape) for _ in range(count)]
        for page in pages:
            page.keys.fill_(torch.nan)
            page.values.fill_(torch.nan)
        return pages

    def prefill(self, tier, model, tokens, first=0, blocks=slice(None), heads=slice(None)):
        """Write a model's own blocks of a prompt, as its engine would."""
        pages = self.blocks(self.cache(model, tokens, heads))[blocks]
        return tier.write(self.hashes(tokens)[blocks], pages, first)

    def ask(self, tier, tokens, **options):
        """Find and read; results and pages."""
        plans = tier.find(self.hashes(tokens), **options)
        pages = self.pages(tier, len(plans))
        return tier.read(plans, pages), pages


def equal(page, other):
    return torch.equal(page.keys, other.keys) and torch.equal(page.values, other.values)


def close(page, other):
    torch.testing.assert_close(page.keys, other.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(page.values, other.values, rtol=1e-5, atol=1e-5)


def layout(model, ranks):
    step = model.kv_heads // ranks
    return tuple(
        Shard(first, first + step, 0, model.layers) for first in range(0, model.kv_heads, step)
    )


@pytest.fixture(scope="session")
def toy(make_description, tmp_path_factory):
    return Toy(make_description, tmp_path_factory.mktemp("toy"))


@pytest.fixture
def store(tmp_path):
    with LocalStore(tmp_path / "store", min_free_bytes=0) as inner:
        yield FaultyStore(inner)


@pytest.fixture
def tiers(toy, store):
    """Tiers that are closed at the end: ``tiers(model, *artifacts, ...)``."""
    made = []

    def make(model, *artifacts, at=store, **fields):
        made.append(toy.tier(at, model, *artifacts, **fields))
        return made[-1]

    yield make
    store.before = lambda method, argument: None
    store.broken.clear()
    for tier in made:
        tier.close()


@pytest.fixture(scope="session")
def helpers():
    return SimpleNamespace(
        equal=equal, close=close, layout=layout, FaultyStore=FaultyStore, Barrier=threading.Event
    )
