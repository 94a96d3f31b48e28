"""The family manifest: every mistake is one line with file, line and field."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.family import (
    GateEntry,
    gate_of,
    json_schema,
    load_family,
    policy_of,
    thresholds_of,
)
from kvstore_xfer.gate.record import Thresholds
from kvstore_xfer.tier.policy import Direction, Policy

GOOD = """\
family: toys
store: local:store
models:
  small: {path: models/small}
  large: {path: owner/large, revision: abc}
pairs:
  - source: small
    target: large
    mapper: mappers/up
    direction: up
    policy:
      min_tokens: 64
      budget_seconds: 1.5
metrics: {port: 9100}
"""


@pytest.fixture
def load(tmp_path):
    def call(text):
        file = tmp_path / "family.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_family(file)

    return call


def test_a_good_manifest_is_read(load):
    family = load(GOOD)
    assert (family.family, family.store) == ("toys", "local:store")
    assert family.models["large"].revision == "abc"
    (pair,) = family.pairs
    assert (pair.source, pair.target, pair.direction) == ("small", "large", Direction.UP)
    assert policy_of(pair.policy) == Policy(min_tokens=64, budget_seconds=1.5)
    assert (family.metrics.port, family.metrics.address) == (9100, "127.0.0.1")


def test_what_is_left_out_has_the_policys_defaults(load):
    family = load(GOOD[: GOOD.index("    policy")])
    assert policy_of(family.pairs[0].policy) == Policy()


def test_the_gate_of_a_pair_is_laid_over_that_of_the_family(load):
    family = load(GOOD + "gate: {min_top1: 0.8, max_growth: 2, lengths: [short]}\n")
    (pair,) = family.pairs
    entry = gate_of(family, pair)
    assert entry.lengths == ["short"]
    assert thresholds_of(entry) == Thresholds(min_top1=0.8, max_growth=2)
    own = GateEntry(min_top1=0.9, max_tokens=512)
    entry = gate_of(family, pair.model_copy(update={"gate": own}))
    assert (entry.max_tokens, thresholds_of(entry)) == (512, Thresholds(min_top1=0.9, max_growth=2))
    assert gate_of(load(GOOD), pair) is None
    assert thresholds_of(None) == Thresholds()


def test_the_manifest_knows_every_threshold():
    assert set(GateEntry.model_fields) == {
        *(field.name for field in fields(Thresholds)),
        "lengths",
        "max_tokens",
    }


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new, 1)


BAD = {
    "unknown field": (changed("min_tokens", "min_token"), 12, "pairs.0.policy.min_token: unknown"),
    "unknown field on top": (GOOD + "extra: 1\n", 15, "extra: unknown field"),
    "missing field": (changed("    mapper: mappers/up\n", ""), 7, "pairs.0.mapper: Field required"),
    "missing on top": (changed("store: local:store\n", ""), 1, "store: Field required"),
    "missing by a slip": (
        changed("store: local", "stor: local"),
        2,
        "stor: unknown field; remove it or correct its name (missing: store)",
    ),
    "unknown model": (
        changed("target: large", "target: huge"),
        8,
        "pairs.0.target: no model 'huge' under models; known: small, large",
    ),
    "a block size that vLLM packs otherwise": (
        changed("  large:", "  cpu: {path: x, vllm_cpu_block_tokens: 33}\n  large:"),
        5,
        "models.cpu.vllm_cpu_block_tokens: 33 is not a multiple of 32",
    ),
    "the source itself": (
        changed("target: large", "target: small"),
        8,
        "pairs.0.target: is the so",
    ),
    "a pair twice": (
        changed("metrics", "  - {source: small, target: large, mapper: x}\nmetrics"),
        14,
        "pairs.1.target: this pair is given twice",
    ),
    "a key twice": (changed("metrics", "store: local:b\nmetrics"), 14, "store: given twice"),
    "a model twice": (changed("  large:", "  small:"), 5, "small: given twice"),
    "a word for a number": (changed("64", "many"), 12, "pairs.0.policy.min_tokens: Input should"),
    "a fraction of a token": (changed("64", "6.5"), 12, "pairs.0.policy.min_tokens: Input should"),
    "a negative number": (changed("64", "-1"), 12, "pairs.0.policy.min_tokens: Input should"),
    "no number": (changed("1.5", ".nan"), 13, "pairs.0.policy.budget_seconds: Input should"),
    "a word for a switch": (
        changed("min_tokens: 64", "enabled: '1'"),
        12,
        "pairs.0.policy.enabled",
    ),
    "unknown direction": (changed("direction: up", "direction: left"), 10, "pairs.0.direction"),
    "a port that is none": (changed("9100", "70000"), 14, "metrics.port: Input should"),
    "no models": (changed("models:\n", "models: {}\nmodel:\n"), 3, "models: "),
    "a list": ("- a\n", 1, "manifest: "),
    "nothing": ("", 1, "manifest: "),
    "broken YAML": ("family: [\nstore: x\n", 3, "expected"),
    "a list as a name": (GOOD + "? [a]\n: 1\n", 15, "a name must be plain text"),
    "a name of two lines": (GOOD + '"a\\nb": 1\n', 15, "a\\nb: unknown field"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_with_file_line_and_field(load, case):
    text, line, message = BAD[case]
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert f"family.yaml:{line}: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"\xff\xfe", GOOD.replace("toys", "2024-13-45"), GOOD.replace("toys", "\x00")]
)
def test_text_that_cannot_be_read_is_one_line(load, text):
    with pytest.raises(ConfigError, match=r"family\.yaml") as caught:
        load(text)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_contains_itself_is_one_line(load):
    with pytest.raises(ConfigError, match=r"family\.yaml:\d+: .*unknown field") as caught:
        load(GOOD + "loop: &a [*a]\n")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml: No such file or directory; give a readable"):
        load_family(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_family(tmp_path)


def test_the_published_schema_is_that_of_the_code():
    """``kvxfer family schema > docs/family.schema.json`` brings it up to date."""
    published = Path(__file__).parents[1] / "docs" / "family.schema.json"
    assert json.loads(published.read_text()) == json_schema()
