"""Recording and alert rules: valid, about metrics that exist, and each alert fires and clears."""

import re
import subprocess
from pathlib import Path

import pytest
import tools
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "kvxfer.rules.yaml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALL = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL if "alert" in rule}
PAIR = 'source="small",target="large",direction="up"'
T = 'target="large"'
HOURS = 60  # samples of a minute each

# Series per alert, in promtool's notation, one sample a minute: bad for two hours, then good for
# three. The alert must fire at 1 h 55 min and be gone at 4 h 55 min.
BAD, GOOD = 2 * HOURS, 3 * HOURS
CASES = {
    "KvxferPairSwitchedOff": {f"kvxfer_pair_switched_off{{{PAIR}}}": f"1x{BAD} 0x{GOOD}"},
    "KvxferRetentionLow": {
        f'kvxfer_observed_retention{{{PAIR},bound="low"}}': f"0.90x{BAD} 0.97x{GOOD}",
        f"kvxfer_retention_threshold{{{PAIR}}}": f"0.94x{BAD + GOOD}",
    },
    "KvxferRetentionNotObserved": {
        f'kvxfer_samples_total{{{PAIR},status="declined"}}': f"0+2x{BAD + GOOD}",
        f'kvxfer_samples_total{{{PAIR},status="dropped"}}': f"0+2x{BAD} {2 * BAD}x{GOOD}",
    },
    "KvxferGateClosed": {
        f"kvxfer_gate_open{{{PAIR}}}": f"0x{BAD} 1x{GOOD}",
        f"kvxfer_pair_switched_off{{{PAIR}}}": f"0x{BAD + GOOD}",
    },
    "KvxferConversionRefused": {
        f'kvxfer_conversion_refused{{{T},reason="lora"}}': f"1x{BAD} 0x{GOOD}"
    },
    "KvxferErrors": {
        f'kvxfer_errors_total{{{T},call="read"}}': f"0+1x{BAD} {BAD}x{GOOD}",
    },
    "KvxferNothingServed": {
        f'kvxfer_lookup_tokens_total{{{T},outcome="missed",reason="absent"}}': f"0+64x{BAD + GOOD}",
        f'kvxfer_lookup_tokens_total{{{T},outcome="native",reason="none"}}': f"0x{BAD} 0+64x{GOOD}",
    },
    "KvxferSlowLookups": {
        f'kvxfer_stage_seconds_bucket{{{T},stage="serve",le="1"}}': f"0x{BAD} 0+9x{GOOD}",
        f'kvxfer_stage_seconds_bucket{{{T},stage="serve",le="5"}}': f"0+9x{BAD + GOOD}",
        f'kvxfer_stage_seconds_bucket{{{T},stage="serve",le="+Inf"}}': f"0+9x{BAD + GOOD}",
    },
    "KvxferStoreDown": {'kvxfer_store_up{store="valkey"}': f"0x{BAD} 1x{GOOD}"},
    "KvxferStoreCorrupt": {'kvxfer_store_corrupt_blocks{store="local"}': f"0+1x{BAD} {BAD}x{GOOD}"},
    "KvxferStoreFull": {
        f'kvxfer_written_blocks_total{{{T},kind="native",status="full"}}': (
            f"0+5x{BAD} {5 * BAD}x{GOOD}"
        )
    },
    "KvxferWritesDropped": {
        f'kvxfer_written_blocks_total{{{T},kind="derived",status="dropped"}}': (
            f"0+5x{BAD} {5 * BAD}x{GOOD}"
        )
    },
    "KvxferStoreThrashing": {
        'kvxfer_evicted_blocks_total{store="local",reason="size_cap"}': (
            f"0+9x{BAD} {9 * BAD}x{GOOD}"
        ),
        'kvxfer_store_blocks{store="local"}': f"100x{BAD + GOOD}",
    },
    "KvxferMetricsAbsent": {
        'kvxfer_build_info{version="0"}': f"_x{BAD} 1x{GOOD}",
    },
}


def promtool(*words):
    return subprocess.run(
        [tools.promtool(), *words], capture_output=True, text=True, check=False, timeout=120
    )


def test_promtool_accepts_the_rules():
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_are_about_metrics_that_exist(rule, unknown_metrics):
    assert unknown_metrics(rule["expr"]) == set()
    recorded = {rule["record"] for rule in ALL if "record" in rule}
    assert set(re.findall(r"\b\w+:kvxfer\w+:\w+\b", rule["expr"])) <= recorded


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_links_to_its_section(name):
    page, _, anchor = ALERTS[name]["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert name in headings
    assert anchor == name.lower()


def test_every_alert_has_a_case():
    assert ALERTS.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_alert_fires_and_clears(name, tmp_path):
    """`ALERTS` counts the firing ones, so that the test need not repeat every annotation."""
    count = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'

    def samples(value):
        return [{"labels": "{}", "value": value}]

    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": series, "values": values} for series, values in CASES[name].items()
                ],
                "promql_expr_test": [
                    {"expr": count, "eval_time": "115m", "exp_samples": samples(1)},
                    {"expr": count, "eval_time": "295m", "exp_samples": samples(0)},
                ],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(content))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
