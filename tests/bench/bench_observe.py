"""What metrics and sampling cost on the lookup path: ``python tests/bench/bench_observe.py``.

One prompt of the shipped pair's large model, asked again and again (find, then read all its
blocks) through two tiers over one store, in turn: one as it is, with a pair whose retention is
watched, and one without counters, histograms, off records and sampling.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import contextmanager
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
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.tier.open import Engine, announce
from kvstore_xfer.tier.pair import make_pair
from kvstore_xfer.tier.policy import Policy, direction_of
from kvstore_xfer.tier.tier import Tier

FAMILY = Path(__file__).parents[1] / "data" / "family"
BLOCK, ROUNDS = 64, 400
SIZES = {"2,048 tokens": 2048, "8,192 tokens": 8192}


class Nothing:
    """Neither stages nor samples."""

    def observe(self, *_):
        pass

    @contextmanager
    def timed(self, *_):
        yield

    def check_off(self, _):
        pass

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
    tier._count = lambda *_: None
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
    source, target = (describe(FAMILY / name) for name in ("small", "large"))
    save(folder, Artifact(random_mapper(source, target)))
    artifact = load(folder)
    record = GateRecord(ACCEPTED, "", **subject(artifact.mapper, "float32"))
    record = replace(record, prefill_tokens_per_second=1e3, conversion_tokens_per_second=1e6)
    artifact = replace(artifact, gate={"float32": record.to_json()})
    probes = torch.randn(target.layers, target.kv_heads, 16, target.key_dim).half()
    watch = WatchRecord(artifact.mapper.digest, Relation(((1.0, 0.0),), (0.1,), 1e-9), probes)
    engine = Engine(target, "float32", BLOCK, HASH_SCHEME)
    announce(store, engine)
    tiers = []
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
    return tiers[0], blind(tiers[1])


def lookup(tier, hashes, pages):
    started = time.perf_counter()
    results = tier.read(tier.find(hashes), pages)
    seconds = time.perf_counter() - started
    if not all(result.served for result in results):
        raise SystemExit("a block was not served")
    return seconds


def compare(store, folder, tokens):
    """Seconds without, and more seconds with: medians over lookups that take turns."""
    watched, plain = open_tiers(store, folder)
    hashes = chain_hashes(list(range(tokens)), BLOCK)
    pages = [KvPage.empty(watched.shape) for _ in hashes]
    for page in pages:
        page.keys.normal_()
        page.values.normal_()
    plain.write(hashes, pages, 0)
    seconds = {"with": [], "without": []}
    for number in range(ROUNDS):
        order = [("with", watched), ("without", plain)]
        for name, tier in order[:: 1 if number % 2 else -1]:
            seconds[name].append(lookup(tier, hashes, pages))
    watched.close()
    plain.close()
    rounds = list(zip(seconds["with"], seconds["without"], strict=True))[ROUNDS // 10 :]
    plainly = statistics.median(without for _, without in rounds)
    # Neighbours in time see the same machine: their difference is steadier than the medians'.
    return plainly, statistics.median(watching - without for watching, without in rounds)


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    print("| prompt | lookup without | more with metrics and sampling | |")
    print("|---|---|---|---|")
    for name, tokens in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            store = LocalStore(Path(folder) / "store", min_free_bytes=0)
            with store:
                plainly, more = compare(store, Path(folder) / "mapper", tokens)
        print(
            f"| {name}, {tokens // BLOCK} blocks | {plainly * 1e3:.3f} ms "
            f"| {more * 1e6:+.0f} us | {more / plainly:+.2%} |"
        )


if __name__ == "__main__":
    main()
