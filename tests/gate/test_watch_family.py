"""The shadow estimate against the gate's truth, on trained models: who is switched off, and when.

pytest -s tests/gate/test_watch_family.py    # prints the table
"""

from dataclasses import replace

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

BLOCK, PREFIX = 16, 192
SAMPLES = 32


def noisy(layer):
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(layer.weight.shape, generator=generator).to(layer.weight.dtype)
    return replace(layer, weight=layer.weight + noise * layer.weight.float().std().item())


def without_inputs(layer):
    """Half of the inputs, as after a fault in reading the source's layers."""
    weight = layer.weight.clone()
    weight[..., : weight.shape[-2] // 2, :] = 0
    return replace(layer, weight=weight)


DEGRADED = {
    "noise on the maps": lambda m: replace(
        m, keys=tuple(map(noisy, m.keys)), values=tuple(map(noisy, m.values))
    ),
    "half of the inputs lost": lambda m: replace(
        m, keys=tuple(map(without_inputs, m.keys)), values=tuple(map(without_inputs, m.values))
    ),
    "layers out of order": lambda m: replace(
        m, keys=(*m.keys[1:], m.keys[0]), values=(*m.values[1:], m.values[0])
    ),
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


@pytest.mark.timeout(600)
def test_the_honest_mapper_stays_on_and_degraded_ones_are_switched_off(
    family_mapper, watch, tmp_path
):
    pair = family_mapper
    cases = {"as fitted": lambda mapper: mapper, **DEGRADED}
    rows = {}
    for number, (name, degrade) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        mapper = folder_of(pair, watch, degrade, folder / "mapper")
        verdict = check(load(mapper), pair.source, pair.target, pair.passages, PREFIX).verdict
        truth = measured_retention(pair, load(mapper).mapper)
        interval, threshold, used, refusal = run_traffic(pair, mapper, folder)
        rows[name] = (truth, interval, used, refusal)
        assert (verdict == ACCEPTED) == (name == "as fitted")
        print(
            f"\n{name}: gate {verdict}, retention {truth.mean:.4f} "
            f"[{truth.low:.4f}, {truth.high:.4f}]; in production "
            f"{interval.mean:.4f} [{interval.low:.4f}, {interval.high:.4f}], threshold "
            f"{threshold:.4f}; {used} samples: {'stays on' if refusal is None else 'SWITCHED OFF'}"
        )
    truth, interval, used, refusal = rows.pop("as fitted")
    assert refusal is None
    assert used == SAMPLES
    assert interval.low <= truth.high
    assert interval.high >= truth.low
    assert [row[3] for row in rows.values()] == [Reason.RETENTION] * 3
    assert all(row[2] < SAMPLES for row in rows.values())
    # What the gate's figures say is worse, production says is worse.
    assert all(row[0].mean < truth.mean and row[1].mean < interval.mean for row in rows.values())
