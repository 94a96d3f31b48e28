"""What metrics and sampling cost on the lookup path: ``python tests/bench/bench_observe.py``.

One prompt of the shipped pair's large model, asked again and again (find, then read) through two
tiers over one store, in turn: one as it is, with a pair whose retention is watched, and one without
counters, histograms, spans, off records and sampling. The large model's own blocks are there
(hits), the small model's (conversions), or nobody's (misses).
"""

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from kvstore_xfer.blocks.chain import HASH_SCHEME, chain_hashes
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.gate.record import ACCEPTED, GateRecord, subject
from kvstore_xfer.gate.relation import Relation
from kvstore_xfer.gate.watch import WatchRecord
from kvstore_xfer.mapper.artifact import Artifact, load, save
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads
from kvstore_xfer.models.description import describe
from kvstore_xfer.outcome import Outcome
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.tier.open import Engine, announce
from kvstore_xfer.tier.pair import make_pair
from kvstore_xfer.tier.policy import Policy, direction_of
from kvstore_xfer.tier.tier import Tier
from kvstore_xfer.tier.watch import is_sampled

FAMILY = Path(__file__).parents[1] / "data" / "family"
BLOCK = 64
SIZES = (2048, 8192)
SECONDS = 6.0  # of lookups per row of the table
OUTCOMES = {
    "hits": Outcome.NATIVE,
    "conversions": Outcome.CONVERTED,
    "misses": Outcome.MISSED,
}
_NOTHING = nullcontext()


class Nothing:
    """Neither stages nor samples."""

    next_look = float("inf")

    def observe(self, *_):
        pass

    def timed(self, *_):
        return _NOTHING

    def convert(self, converter, source, first, target):
        converter.convert([source], [first], [target])

    def decline_sampled(self, plans, _):
        return plans

    def arrived(self, _):
        pass

    def flush(self):
        pass

    close = flush


def blind(tier):
    """Take everything that observes out of a tier."""
    tier._watcher.close()
    tier._stages = tier._sources._stages = tier._watcher = Nothing()
    tier._count = tier._lookup_started = lambda *_: None
    tier._convert_traced = tier._convert
    return tier


def random_mapper(source, target):
    def layer(width_in, width_out):
        shape = (target.kv_heads, 2 * width_in, width_out)
        weight = torch.randn(shape) / (2 * width_in) ** 0.5
        return LayerMap((0, 1), weight.half(), torch.zeros(target.kv_heads, width_out))

    return Mapper(
        Method.HEAD_LOCAL,
        source,
        target,
        assign_heads(source.kv_heads, target.kv_heads),
        tuple(layer(source.key_dim, target.key_dim) for _ in range(target.layers)),
        tuple(layer(source.value_dim, target.value_dim) for _ in range(target.layers)),
    )


def open_tiers(store, folder):
    """The source's tier, and the target's twice: as it is, and blind."""
    source, target = (describe(FAMILY / name) for name in ("small", "large"))
    save(folder, Artifact(random_mapper(source, target)))
    artifact = load(folder)
    record = GateRecord(ACCEPTED, "", **subject(artifact.mapper, "float32"))
    rates = {"prefill_tokens_per_second": 1e3, "conversion_tokens_per_second": 1e6}
    record = replace(record, **rates, longest_prefix_tokens=4096)
    artifact = replace(artifact, gate={"float32": record.to_json()})
    probes = torch.randn(target.layers, target.kv_heads, 16, target.key_dim).half()
    watch = WatchRecord(artifact.mapper.digest, Relation(((1.0, 0.0),), (0.1,), 1e-9), probes)
    own = Engine(source, "float32", BLOCK, HASH_SCHEME)
    engine = Engine(target, "float32", BLOCK, HASH_SCHEME)
    announce(store, own)
    announce(store, engine)
    tiers = [Tier(store, "small", own.identity, own.own_shard, own.block_shape, [])]
    for _ in range(2):
        pair = make_pair(
            artifact,
            target,
            engine.identity,
            engine.own_shard,
            Policy(),
            direction_of(source, target),
            TorchConverter,
            watch=watch,
        )
        if pair.refusal is not None:
            raise SystemExit(f"the pair is off: {pair.refusal.value}")
        about = (engine.identity, engine.own_shard, engine.block_shape)
        tiers.append(Tier(store, "large", *about, [pair]))
    return tiers[0], tiers[1], blind(tiers[2])


class Case:
    """One prompt, what the store has of it, and lookups of it."""

    def __init__(self, name, tokens, store, folder):
        self.name = name
        self.source, self.watched, self.plain = open_tiers(store, folder)
        self.hashes = unsampled(tokens)
        self.pages = random_pages(self.watched.shape, len(self.hashes))
        if name == "hits":
            self.watched.write(self.hashes, self.pages, 0)
        if name == "conversions":
            blocks = random_pages(self.source.shape, len(self.hashes))
            self.source.write(self.hashes, blocks, 0)

    def lookup(self, tier):
        """Seconds of what an engine does: find, read what there is, tell what there is not."""
        started = time.perf_counter()
        plans = tier.find(self.hashes)
        results = tier.read(plans, [] if self.name == "misses" else self.pages)
        seconds = time.perf_counter() - started
        expected = OUTCOMES[self.name]
        if any(result.outcome is not expected for result in results):
            raise SystemExit(f"a block was not {expected.value}")
        if self.name == "conversions":  # what was made and stored would be a hit the next time
            tier.flush()
            tier.discard(self.hashes)
        return seconds

    def close(self):
        for tier in (self.source, self.watched, self.plain):
            tier.close()


def unsampled(tokens):
    """The hashes of a prompt that is not one of the sampled: those are answered differently."""
    prompts = ([first, *range(1, tokens)] for first in range(1000))
    candidates = (chain_hashes(prompt, BLOCK) for prompt in prompts)
    return next(h for h in candidates if not is_sampled(h[-1], Policy().sampled_share))


def random_pages(shape, count):
    pages = [KvPage.empty(shape) for _ in range(count)]
    for page in pages:
        page.keys.normal_()
        page.values.normal_()
    return pages


def compare(case):
    """Medians: seconds without, and the ratio with / without of neighbours in time."""
    pairs = []
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        order = [case.watched, case.plain][:: 1 if len(pairs) % 2 else -1]
        seconds = {tier: case.lookup(tier) for tier in order}
        pairs.append((seconds[case.watched], seconds[case.plain]))
    kept = pairs[len(pairs) // 10 :]  # the first ones warm up
    ratio = statistics.median(watched / plain for watched, plain in kept)
    return statistics.median(plain for _, plain in kept), ratio


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    print("| lookup | prompt | seconds without | more with metrics and sampling |")
    print("|---|---|---|---|")
    for name in OUTCOMES:
        for tokens in SIZES:
            with tempfile.TemporaryDirectory() as folder:
                store = LocalStore(Path(folder) / "store", min_free_bytes=0)
                with store:
                    case = Case(name, tokens, store, Path(folder) / "mapper")
                    plain, ratio = compare(case)
                    case.close()
            print(
                f"| {name} | {tokens:,} tokens, {tokens // BLOCK} blocks "
                f"| {plain * 1e3:.3f} ms | {ratio - 1:+.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
