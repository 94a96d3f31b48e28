"""Opening a tier from a manifest: the real pair, and every way it can be wrong."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ConfigError, StoreError
from kvstore_xfer.family import load_family
from kvstore_xfer.mapper.artifact import MANIFEST_FILE, WEIGHTS_FILE, record_gate
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.base import WriteStatus
from kvstore_xfer.tier.open import announce, off_line, open_tier
from kvstore_xfer.tier.policy import Direction
from kvxfer_transformers.session import engine_of

FAMILY = Path(__file__).parents[1] / "data" / "family"


@pytest.fixture
def manifest(family_mapper, tmp_path):
    """Writes a manifest of the pair; `pair` adds fields to it."""
    shutil.copytree(family_mapper.folder, tmp_path / "mapper")

    def write(pair="", store="local:store?min_free=0"):
        file = tmp_path / "family.yaml"
        file.write_text(
            f"family: tiny\nstore: '{store}'\n"
            "models: {small: {path: small}, large: {path: large}}\n"
            f"pairs: [{{source: small, target: large, mapper: mapper{pair}}}]\n"
        )
        return file

    return write


@pytest.fixture
def engine(family_mapper):
    return engine_of(family_mapper.target, 16)


def test_an_accepted_pair_serves_and_paths_are_relative_to_the_manifest(manifest, engine, tmp_path):
    tier = open_tier(manifest(), "large", engine)
    try:
        (pair,) = tier.pairs
        assert pair.refusal is None
        assert pair.direction is Direction.UP
        assert (tmp_path / "store").is_dir()
    finally:
        tier.close()


def test_the_member_must_be_in_the_manifest(manifest, engine):
    with pytest.raises(ConfigError, match="no 'huge'; known: large, small"):
        open_tier(manifest(), "huge", engine)


def test_a_stated_direction_must_be_the_models(manifest, engine):
    with pytest.raises(ConfigError, match="the models' sizes say up"):
        open_tier(manifest(", direction: down"), "large", engine)


def test_a_disabled_pair_is_kept_and_says_so(manifest, engine):
    tier = open_tier(manifest(", policy: {enabled: false}"), "large", engine)
    try:
        assert tier.pairs[0].refusal is Reason.DISABLED
    finally:
        tier.close()


@pytest.mark.parametrize(
    ("gate", "complaint"),
    [
        ("{max_kl_share: 0.001}", "kl_share.wrong: mapped KL may be"),
        ("{min_passages: 500}", "passages: measured on 20, needed are 500"),
        ("{min_cosine: 0.999}", "attention.mean: "),
        ("{lengths: [double]}", "lengths.double: not measured"),
        ("{min_top1: 0.5, lengths: [calibration]}", ""),
    ],
)
def test_the_manifests_own_thresholds_are_held(manifest, engine, caplog, gate, complaint):
    """Whatever thresholds the mapper was checked with."""
    tier = open_tier(manifest(f", gate: {gate}"), "large", engine)
    try:
        assert tier.pairs[0].refusal is (Reason.GATE_REJECTED if complaint else None)
        assert complaint in caplog.text
    finally:
        tier.close()


@pytest.mark.parametrize(("policy", "serves"), [("{}", False), ("{hold_back_tokens: 32}", True)])
def test_a_check_that_held_back_more_than_the_policy_does_not_hold(
    family_mapper, manifest, engine, tmp_path, caplog, policy, serves
):
    file = manifest(f", policy: {policy}")
    record = replace(family_mapper.record, hold_back_tokens=32)
    record_gate(tmp_path / "mapper", "float32", record.to_json())
    tier = open_tier(file, "large", engine)
    try:
        assert tier.pairs[0].refusal is (None if serves else Reason.GATE_REJECTED)
        assert ("set hold_back_tokens: 32 under policy" in caplog.text) is not serves
    finally:
        tier.close()


def test_a_damaged_mapper_turns_its_pair_off_and_nothing_else(manifest, engine, tmp_path, caplog):
    (tmp_path / "mapper" / MANIFEST_FILE).write_text("{}")
    tier = open_tier(manifest(), "large", engine)
    try:
        assert tier.pairs == ()
        assert "kvxfer: pair small -> large is off (mapper): " in caplog.text
        assert "damaged" in caplog.text
    finally:
        tier.close()


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_what_an_unreadable_mapper_would_serve_is_declined(
    manifest, family_mapper, engine, tmp_path, damage
):
    """The sibling had it, so it is not absent, and the direction is known."""
    small = engine_of(family_mapper.source, 16)
    (tmp_path / "small").symlink_to(FAMILY / "small")
    file = manifest()
    source = open_tier(file, "small", small)
    pages = KvPage.empty_run(small.block_shape, 2).split(16)
    for page in pages:
        page.keys.zero_()
        page.values.zero_()
    source.write(["aa", "bb"], pages, 0)
    source.close()
    if damage == "missing":
        shutil.rmtree(tmp_path / "mapper")
    else:
        weights = tmp_path / "mapper" / WEIGHTS_FILE
        weights.write_bytes(weights.read_bytes()[:1000])
    target = open_tier(file, "large", engine)
    try:
        plans = target.find(["aa", "bb", "cc"])
        assert [(p.outcome, p.reason) for p in plans] == [
            (Outcome.DECLINED, Reason.MAPPER),
            (Outcome.DECLINED, Reason.MAPPER),
            (Outcome.MISSED, Reason.ABSENT),
        ]
        assert target.pairs[0].labels == ("small", "large", "up")
    finally:
        target.close()


@pytest.mark.parametrize("reason", [Reason.GATE_DTYPE, Reason.GATE_MISSING, Reason.DISABLED])
def test_a_pair_that_is_off_is_one_line_with_mapper_and_remedy(manifest, tmp_path, reason):
    entry = load_family(manifest()).pairs[0]
    line = off_line(entry, tmp_path, "float32", reason)
    assert line.startswith(f"pair small -> large is off ({reason.value}): {tmp_path / 'mapper'}: ")
    assert "\n" not in line


def test_a_store_that_cannot_be_used_is_an_error(manifest, engine, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        open_tier(manifest(store="local:file"), "large", engine)


def test_an_identity_record_that_cannot_be_written_is_an_error(engine, tmp_path):
    from kvstore_xfer.store.local import LocalStore

    class FullStore(LocalStore):
        def write(self, requests, *, overwrite=False):
            return [WriteStatus.FULL for _ in requests]

    with FullStore(tmp_path / "store") as store, pytest.raises(StoreError, match="full"):
        announce(store, engine)
