"""The shadow estimate against the gate's truth, on trained models: who is switched off, and when.

pytest -s tests/gate/test_watch_family.py    # prints the table
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.arms import run_arms
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.record import ACCEPTED, subject
from kvstore_xfer.gate.score import bootstrap, retention
from kvstore_xfer.gate.watch import make_watch, save_watch
from kvstore_xfer.mapper.artifact import load, record_gate, save
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.outcome import Reason
from kvstore_xfer.tier.open import open_tier
from kvxfer_transformers.queries import capture_queries
from kvxfer_transformers.session import Session, engine_of

pytestmark = pytest.mark.timeout(600)  # all cases, for whichever test comes first
BLOCK, PREFIX = 16, 192
SAMPLES = 32


def noise(share):
    """On every weight, with this share of the weights' standard deviation."""

    def noisy(layer):
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randn(layer.weight.shape, generator=generator)
        weight = layer.weight.float()
        changed = weight + share * weight.std() * drawn
        return replace(layer, weight=changed.to(layer.weight.dtype))

    return everywhere(noisy)


def scale(factor):
    def scaled(layer):
        weight = (layer.weight.float() * factor).to(layer.weight.dtype)
        return replace(layer, weight=weight, bias=layer.bias * factor)

    return scaled


def without_inputs(layer):
    """Half of the inputs, as after a fault in reading the source's layers."""
    weight = layer.weight.clone()
    weight[..., : weight.shape[-2] // 2, :] = 0
    return replace(layer, weight=weight)


def everywhere(change):
    def changed(mapper):
        keys, values = (tuple(map(change, maps)) for maps in (mapper.keys, mapper.values))
        return replace(mapper, keys=keys, values=values)

    return changed


def values_of(layer, change):
    def changed(mapper):
        values = list(mapper.values)
        values[layer] = change(values[layer])
        return replace(mapper, values=tuple(values))

    return changed


def swapped(first, second):
    def swap(layers):
        order = list(layers)
        order[first], order[second] = order[second], order[first]
        return tuple(order)

    return lambda m: replace(m, keys=swap(m.keys), values=swap(m.values))


CASES = {
    "as fitted": lambda mapper: mapper,
    "weights drifted by 3 %": everywhere(scale(1.03)),
    "noise of 0.1 deviations": noise(0.1),
    "noise of 0.3 deviations": noise(0.3),
    "values half as large": lambda m: replace(m, values=tuple(map(scale(0.5), m.values))),
    "values of the first layer lost": values_of(0, scale(0.0)),
    "values of the last layer lost": values_of(-1, scale(0.0)),
    "two layers swapped": swapped(3, 4),
    "noise of 1 deviation": noise(1.0),
    "half of the inputs lost": everywhere(without_inputs),
    "layers out of order": lambda m: replace(
        m, keys=(*m.keys[1:], m.keys[0]), values=(*m.values[1:], m.values[0])
    ),
}
STAY_ON = {"as fitted", "weights drifted by 3 %", "noise of 0.1 deviations"}
REJECTED = {
    "values of the first layer lost",
    "values of the last layer lost",
    "two layers swapped",
    "noise of 1 deviation",
    "half of the inputs lost",
    "layers out of order",
}


@pytest.fixture(scope="module")
def watch(family_mapper):
    pair = family_mapper
    return make_watch(
        pair.artifact.mapper.digest,
        pair.source,
        pair.target,
        TorchConverter(pair.artifact.mapper, torch.float32),
        lambda page, tokens: capture_queries(pair.target, page, tokens),
        cut_sequences(pair.heldout, pair.source.tokenize, tokens=256, count=16),
        PREFIX,
    )


def folder_of(pair, watch, degrade, folder):
    """A mapper that serves although it is not what the gate accepted."""
    artifact = save(folder, replace(pair.artifact, mapper=degrade(pair.artifact.mapper), gate={}))
    accepted = replace(pair.record, verdict=ACCEPTED, **subject(artifact.mapper, "float32"))
    record_gate(folder, "float32", accepted.to_json())
    save_watch(folder, "float32", replace(watch, mapper_digest=artifact.mapper.digest))
    return folder


def measured_retention(pair, mapper):
    """As the gate measures it; the gate itself stops at the first stage that a mapper fails."""
    converter = TorchConverter(mapper, torch.float32)
    arms = ("native", "mapped")
    scores = run_arms(pair.source, pair.target, converter, pair.passages, PREFIX, arms)
    losses = zip(*([score.loss for score in scores.scores[arm]] for arm in arms), strict=True)
    return bootstrap(scores.documents, list(losses), lambda means: retention(*means))


def run_traffic(pair, mapper, folder):
    """Every prompt is sampled; retention, samples, refusal of the target's pair at the end."""
    manifest = folder / "family.yaml"
    names = {"small": pair.source, "large": pair.target}
    policy = {"sampled_share": 1.0}
    entry = {"source": "small", "target": "large", "mapper": str(mapper), "policy": policy}
    content = {
        "family": "watch",
        "store": "local:store?min_free=0",
        "models": {name: {"path": str(m.description.name)} for name, m in names.items()},
        "pairs": [entry],
    }
    manifest.write_text(yaml.safe_dump(content))
    tiers = [open_tier(manifest, n, engine_of(m, BLOCK)) for n, m in names.items()]
    passages = cut_sequences(pair.heldout, pair.source.tokenize, tokens=PREFIX + 1, count=80)
    sessions = [Session(m, tier) for m, tier in zip(names.values(), tiers, strict=True)]
    try:
        used = 0
        for passage in passages[-SAMPLES:]:  # others than those of the gate
            for session in sessions:
                session.prefill(list(passage.tokens))
            tiers[1].flush()
            used += 1
            if tiers[1].pairs[0].refusal is not None:
                break
        estimate = next(iter(tiers[1]._watcher._retention.values()))
        interval = estimate.record.relation.estimate(estimate.samples)
        return interval, estimate.threshold, used, tiers[1].pairs[0].refusal
    finally:
        for tier in tiers:
            tier.close()


@pytest.fixture(scope="module")
def production(family_mapper, watch, tmp_path_factory):
    """Per case: the gate's verdict and retention, the estimate, samples, and the pair's refusal."""
    pair, rows = family_mapper, {}
    print("\n| mapper | gate | its retention | estimate in production | samples | |")
    print("|---|---|---|---|---|---|")
    for name, degrade in CASES.items():
        folder = tmp_path_factory.mktemp("case")
        mapper = folder_of(pair, watch, degrade, folder / "mapper")
        record = check(load(mapper), pair.source, pair.target, pair.passages, PREFIX)
        truth = measured_retention(pair, load(mapper).mapper)
        estimate, threshold, used, refusal = run_traffic(pair, mapper, folder)
        rows[name] = SimpleNamespace(
            verdict=record.verdict, truth=truth, estimate=estimate, used=used, refusal=refusal
        )
        print(
            f"| {name} | {record.verdict}{f' ({record.stage})' if record.stage else ''} "
            f"| {shown(truth)} | {shown(estimate)} | {used} "
            f"| {'stays on' if refusal is None else 'switched off'} |",
            flush=True,
        )
    print(f"threshold {threshold:.4f}")
    return rows


def shown(interval):
    return f"{interval.mean:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def test_honest_mappers_stay_on(production):
    honest = production["as fitted"]
    assert honest.verdict == ACCEPTED
    assert honest.estimate.low <= honest.truth.high
    assert honest.estimate.high >= honest.truth.low
    for name in STAY_ON:
        assert production[name].verdict == ACCEPTED, name
        assert production[name].refusal is None, name
        assert production[name].used == SAMPLES, name


def test_whatever_the_gate_rejects_is_switched_off(production):
    rejected = {name for name, row in production.items() if row.verdict != ACCEPTED}
    assert rejected >= REJECTED
    for name in rejected:
        assert production[name].refusal is Reason.RETENTION, name
        assert production[name].used < SAMPLES, name


def test_what_loses_a_tenth_is_switched_off_though_the_gate_may_accept_it(production):
    lossy = [name for name, row in production.items() if row.truth.high < 0.9]
    assert len(lossy) > 3
    assert [name for name in lossy if production[name].refusal is None] == []


def test_what_the_gate_finds_worse_production_finds_worse(production):
    honest = production["as fitted"]
    for name in REJECTED:
        assert production[name].estimate.mean < honest.estimate.mean, name
