"""Recording and alert rules: valid, and about metrics that exist.

That each alert fires and clears is in tests/tier/test_alerts.py.
"""

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
