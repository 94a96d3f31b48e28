"""`kvxfer plan` on the family's own mapper: verdict first, figures of the gate, clear refusals."""

import json
from dataclasses import replace

import pytest
import yaml

from kvstore_xfer.cli.main import main
from kvstore_xfer.mapper.artifact import save

SWITCH = {
    "source": "small",
    "target": "large",
    "requests_per_hour": 1000.0,
    "switch_share": 0.3,
    "prefix_tokens": [1000],
    "prefill_tokens_per_second": 1000.0,
    "conversion_tokens_per_second": 4000.0,
}
FAR = {"max_beyond_checked": 8.0}  # the check measured 192 tokens


@pytest.fixture
def plan(tmp_path, family_mapper, capsys):
    """Runs the command; returns its JSON, or its error line."""

    def call(switch=SWITCH, mapper=family_mapper.folder, policy=None, gate=None, **traffic):
        manifest, file = tmp_path / "family.yaml", tmp_path / "traffic.yaml"
        pair = {"source": "small", "target": "large", "mapper": str(mapper)}
        family = {
            "family": "test",
            "store": "local:store?min_free=0",
            "models": {name: {"path": name} for name in ("small", "large")},
            "pairs": [{**pair, "policy": {**FAR, **(policy or {})}, "gate": gate or {}}],
        }
        manifest.write_text(yaml.safe_dump(family))
        file.write_text(yaml.safe_dump({"switches": [switch], **traffic}))
        code = main(["plan", str(manifest), "--traffic", str(file), "--json"])
        output = capsys.readouterr()
        return json.loads(output.out)["pairs"][0] if code == 0 else (code, output.err)

    return call


def test_an_accepted_pair_is_enabled_with_what_it_saves(plan, family_mapper):
    row = plan(gpu_hour_price=2.0)
    assert row["enable"]
    assert row["direction"] == "up"
    assert row["saving"]["seconds_per_switch"] == pytest.approx(0.75)
    assert row["saving"]["gpu_seconds_per_hour"] == pytest.approx(225)
    assert row["price_saved_per_month"] == pytest.approx(225 / 3600 * 730 * 2)
    assert row["retention"] == family_mapper.record.retention


def test_rates_come_from_the_gate_when_the_traffic_gives_none(plan, family_mapper):
    measured = {name: value for name, value in SWITCH.items() if "per_second" not in name}
    rates = family_mapper.record
    expected = 1000 / rates.prefill_tokens_per_second - 1000 / rates.conversion_tokens_per_second
    assert plan(measured)["saving"]["seconds_per_switch"] == pytest.approx(max(expected, 0))


def test_what_lies_far_beyond_the_check_is_not_counted(plan):
    row = plan(policy={"max_beyond_checked": 2.0})
    assert row["saving"]["converted_tokens_per_switch"] == 2 * 192


def test_pairs_not_to_enable(plan, family_mapper, tmp_path):
    assert "slower" in plan({**SWITCH, "conversion_tokens_per_second": 900.0})["why"]
    assert "no prefix" in plan(policy={"min_tokens": 2000})["why"]
    save(tmp_path / "unchecked", replace(family_mapper.artifact, gate={}))
    row = plan(mapper=tmp_path / "unchecked")
    assert (row["enable"], row["saving"]) == (False, None)
    assert "kvxfer check" in row["why"]


def test_the_manifests_own_gate_is_asked_too(plan):
    row = plan(gate={"max_kl_share": 0.001})
    assert (row["enable"], row["saving"]) == (False, None)
    assert row["why"].startswith("the manifest refuses it: kl_share.wrong: ")


def test_a_rejected_mapper_says_the_gates_reason(plan, family_mapper, tmp_path):
    record = replace(family_mapper.record, verdict="rejected", reason="top-1 0.5 is below 0.75")
    gate = {record.dtype: record.to_json()}
    save(tmp_path / "rejected", replace(family_mapper.artifact, gate=gate))
    assert "top-1 0.5 is below 0.75" in plan(mapper=tmp_path / "rejected")["why"]


def test_mistakes_in_the_traffic_are_one_line(plan, tmp_path):
    assert plan({**SWITCH, "switch_share": 2.0}) == (
        2,
        f"kvxfer: error: {tmp_path}/traffic.yaml:8: switches.0.switch_share: "
        "Input should be less than or equal to 1\n",
    )
    code, line = plan({**SWITCH, "source": "large", "target": "small"})
    assert (code, line.count("\n")) == (2, 1)
    assert "switches.0: no pair large to small" in line


def test_the_table_for_people(plan, tmp_path, capsys):
    plan()
    arguments = [str(tmp_path / "family.yaml"), "--traffic", str(tmp_path / "traffic.yaml")]
    assert main(["plan", *arguments]) == 0
    text = capsys.readouterr().out
    assert "small -> large (up): enable; 100% of switches are converted" in text
    assert "750 ms less at a switch" in text
    assert "225 GPU seconds an hour" in text
