"""Each alert fires and clears, on what real tiers export before, during and after its fault.

Every scenario lives through `BEFORE`, `FAULT` and `AFTER` minutes; at each ``yield`` the registry
is scraped. The series then go through the rules in promtool.
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import tools
import torch
import yaml
from recorded import Recorder, forget

from kvstore_xfer import metrics
from kvstore_xfer.gate.record import ACCEPTED, REJECTED
from kvstore_xfer.gate.relation import Relation
from kvstore_xfer.gate.watch import WatchRecord, save_watch
from kvstore_xfer.mapper.artifact import Artifact, load, record_gate, save
from kvstore_xfer.store.url import open_store
from kvstore_xfer.tier import tier as tier_module
from kvstore_xfer.tier.open import open_tier
from kvstore_xfer.tier.store_gauges import StoreGauges
from kvxfer_lmcache import attach
from kvxfer_lmcache.refusals import Refusal

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "kvxfer.rules.yaml"
BEFORE, FAULT, AFTER = range(20), range(100), range(90)  # rules look back one hour
SHORT, LONG = 12, 64  # tokens of a prompt; only a long one can be compared


class World:
    """Two engines of the toy family over one store, opened from a manifest as engines do."""

    def __init__(self, toy, helpers, folder):
        self.toy, self.folder, self._make_faulty = toy, folder, helpers.FaultyStore
        save(folder / "mapper", Artifact(toy.mapper(toy.source, toy.target)))
        self.artifact = load(folder / "mapper")
        self._tiers, self._asked = [], 0
        self.check()

    def check(self, verdict=ACCEPTED):
        """Check the mapper (again)."""
        mapper, model = self.artifact.mapper, self.toy.target
        record = self.toy.record(mapper, verdict)
        record_gate(self.folder / "mapper", "float32", record.to_json())
        shape = (model.layers, model.kv_heads, 16, model.key_dim)
        probes = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
        relation = Relation(((1.0, 0.0),) * 8, (0.0,) * 8, 0.9)
        save_watch(self.folder / "mapper", "float32", WatchRecord(mapper.digest, relation, probes))

    def open(self, query="min_free=0", **policy):
        """Start the engines (again)."""
        self.close()
        forget()
        metrics.set_build_info("toy", "1")
        pair = {"source": "source", "target": "target", "mapper": "mapper", "policy": policy}
        models = {name: {"path": name} for name in ("source", "target")}
        content = {"family": "toy", "store": f"local:store?{query}", "models": models}
        manifest = self.folder / "family.yaml"
        manifest.write_text(yaml.safe_dump({**content, "pairs": [pair]}))
        self.store = self._make_faulty(open_store(content["store"], base=self.folder))
        self._tiers = [
            open_tier(manifest, name, self.toy.engine(model), store=self.store)
            for name, model in (("source", self.toy.source), ("target", self.toy.target))
        ]
        self.source, self.target = self._tiers
        self._gauges = StoreGauges(self.store, "local")

    def close(self):
        if self._tiers:
            self._gauges.close()
            for tier in self._tiers:
                tier.close()
            self.store.close()
            self._tiers = []

    def scrape(self, recorder):
        if self._tiers:
            self._gauges._refresh()  # not only every ten seconds
        recorder.scrape()

    def prompt(self, tokens):
        """One that nobody has asked before."""
        self._asked += 1
        return [self._asked, *range(tokens - 1)]

    def compute(self, tokens, *, like_converted=False):
        """The target computes a prompt, perhaps exactly what the mapper makes of the source's."""
        cache = self.toy.cache(self.toy.target, tokens)
        if like_converted:
            cache = self.toy.converted(self.artifact, tokens)
        self.target.write(self.toy.hashes(tokens), self.toy.blocks(cache), 0)
        self.target.flush()

    def sample(self, *, honest):
        """A prompt that the source has, is left to the target, and compared."""
        tokens = self.prompt(LONG)
        self.toy.prefill(self.source, self.toy.source, tokens)
        self.toy.ask(self.target, tokens)
        self.compute(tokens, like_converted=honest)

    def serve(self, tokens):
        """The target's own blocks."""
        self.compute(tokens)
        self.toy.ask(self.target, tokens)


@pytest.fixture
def world(toy, helpers, tmp_path):
    made = World(toy, helpers, tmp_path)
    yield made
    made.close()
    forget()


def pair_switched_off(world, _):
    world.open(sampled_share=1.0)
    for _ in BEFORE:
        world.sample(honest=True)
        yield
    for _ in FAULT:
        world.sample(honest=False)
        yield
    world.check()
    world.open(sampled_share=1.0)
    for _ in AFTER:
        yield


def retention_low(world, _):
    """Three bad samples do not switch a pair off; then nobody asks for a while."""
    world.open(sampled_share=1.0)
    for _ in BEFORE:
        world.sample(honest=True)
        yield
    for minute in FAULT:
        if minute in (0, 1, 2):
            world.sample(honest=False)
        yield
    world.check()
    world.open(sampled_share=1.0)
    for _ in AFTER:
        world.sample(honest=True)
        yield


def retention_not_observed(world, _):
    """The source's blocks are evicted before the target's arrive."""
    world.open(sampled_share=1.0)
    for _ in BEFORE:
        world.sample(honest=True)
        yield
    for _ in FAULT:
        tokens = world.prompt(LONG)
        world.toy.prefill(world.source, world.toy.source, tokens)
        world.toy.ask(world.target, tokens)
        world.source.clear()
        world.compute(tokens)
        yield
    for _ in AFTER:
        world.sample(honest=True)
        yield


def gate_closed(world, _):
    world.open()
    for _ in BEFORE:
        yield
    world.check(REJECTED)
    world.open()
    for _ in FAULT:
        yield
    world.check()
    world.open()
    for _ in AFTER:
        yield


def conversion_refused(world, _):
    world.open()
    for _ in BEFORE:
        yield
    attach._announce("target", [(Refusal.KV_DTYPE, "fp8 without scales")], stored=True)
    for _ in FAULT:
        yield
    world.open()
    for _ in AFTER:
        yield


def errors(world, _):
    """One now and then, and the first counts."""
    world.open()
    tokens = world.prompt(SHORT)
    world.serve(tokens)
    for _ in BEFORE:
        world.serve(tokens)
        yield
    for minute in FAULT:
        world.store.broken = set() if minute % 8 else {"read"}
        world.toy.ask(world.target, tokens)
        yield
    world.store.broken = set()
    for _ in AFTER:
        world.serve(tokens)
        yield


def nothing_served(world, _):
    world.open()
    known = world.prompt(SHORT)
    for _ in BEFORE:
        world.serve(known)
        yield
    for _ in FAULT:
        world.toy.ask(world.target, world.prompt(SHORT))
        yield
    for _ in AFTER:
        world.serve(known)
        yield


def slow_lookups(world, monkeypatch):
    """A store that takes three seconds for a read, by the clock that the tier looks at."""
    seconds = 0.0

    def wait(method, _):
        nonlocal seconds
        seconds += 3.0 if method == "read" else 0.0

    clock = SimpleNamespace(perf_counter=lambda: seconds, monotonic=lambda: seconds)
    monkeypatch.setattr(tier_module, "time", clock)
    world.open()
    tokens = world.prompt(SHORT)
    world.serve(tokens)
    idle = world.store.before
    for phase, before in ((BEFORE, idle), (FAULT, wait), (AFTER, idle)):
        world.store.before = before
        for _ in phase:
            world.toy.ask(world.target, tokens)
            yield


def store_down(world, _):
    world.open()
    for _ in BEFORE:
        yield
    world.store.inner.close()
    for _ in FAULT:
        yield
    world.open()
    for _ in AFTER:
        yield


def store_corrupt(world, _):
    world.open()
    tokens = world.prompt(SHORT)
    for _ in BEFORE:
        world.serve(tokens)
        yield
    for _ in FAULT:
        files = [path for path in (world.folder / "store" / "blocks").rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        largest.write_bytes(bytes(largest.stat().st_size))
        world.toy.ask(world.target, tokens)
        world.compute(tokens)
        yield
    for _ in AFTER:
        world.serve(tokens)
        yield


def store_full(world, _):
    """Something else fills the disk."""
    for phase, free in ((BEFORE, "0"), (FAULT, "100000TiB"), (AFTER, "0")):
        world.open(f"min_free={free}")
        for _ in phase:
            world.compute(world.prompt(SHORT))
            yield


def writes_dropped(world, _):
    """The store is gone while the engine computes."""
    world.open()
    for _ in BEFORE:
        world.compute(world.prompt(SHORT))
        yield
    world.store.inner.close()
    for _ in FAULT:
        world.compute(world.prompt(SHORT))
        yield
    world.open()
    for _ in AFTER:
        world.compute(world.prompt(SHORT))
        yield


def store_thrashing(world, _):
    world.open("max_size=64KiB&min_free=0")
    tokens = world.prompt(SHORT)
    for _ in BEFORE:
        world.serve(tokens)
        yield
    for _ in FAULT:
        world.compute(world.prompt(SHORT))
        yield
    for _ in AFTER:
        world.serve(tokens)
        yield


def metrics_absent(world, _):
    world.open()
    for _ in BEFORE:
        yield
    world.close()
    forget()
    for _ in FAULT:
        yield
    world.open()
    for _ in AFTER:
        yield


SCENARIOS = {
    "KvxferPairSwitchedOff": pair_switched_off,
    "KvxferRetentionLow": retention_low,
    "KvxferRetentionNotObserved": retention_not_observed,
    "KvxferGateClosed": gate_closed,
    "KvxferConversionRefused": conversion_refused,
    "KvxferErrors": errors,
    "KvxferNothingServed": nothing_served,
    "KvxferSlowLookups": slow_lookups,
    "KvxferStoreDown": store_down,
    "KvxferStoreCorrupt": store_corrupt,
    "KvxferStoreFull": store_full,
    "KvxferWritesDropped": writes_dropped,
    "KvxferStoreThrashing": store_thrashing,
    "KvxferMetricsAbsent": metrics_absent,
}


def test_every_alert_has_a_scenario():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert alerts == SCENARIOS.keys()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_alert_fires_and_clears(name, world, monkeypatch, tmp_path):
    recorder = Recorder()
    for _ in SCENARIOS[name](world, monkeypatch):
        world.scrape(recorder)

    def expected(minute, value, alerts):
        count = f"(count(ALERTS{{{alerts}}}) or vector(0)) > bool 0"
        samples = [{"labels": "{}", "value": value}]
        return {"expr": count, "eval_time": f"{minute}m", "exp_samples": samples}

    end_of_fault = len(BEFORE) + len(FAULT) - 1
    firing = f'alertname="{name}",alertstate="firing"'
    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": recorder.input_series(),
                "promql_expr_test": [
                    expected(len(BEFORE) - 1, 0, 'alertstate="firing"'),  # none at all
                    expected(end_of_fault, 1, firing),
                    expected(end_of_fault + len(AFTER), 0, firing),
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [tools.promtool(), "test", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
