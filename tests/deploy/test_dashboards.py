"""The checked-in dashboards are what the code makes, and ask for metrics that exist."""

import json
from pathlib import Path

import build
import dashboards
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", build.generated(), ids=lambda path: path.name)
def test_generated_files_are_what_the_code_makes(path):
    assert path.read_text() == build.generated()[path], "run 'make dashboards'"


@pytest.mark.parametrize("uid", dashboards.DASHBOARDS)
def test_every_query_is_about_metrics_that_exist(uid, unknown_metrics):
    content = json.loads((ROOT / "deploy" / "grafana" / f"{uid}.json").read_text())
    panels = [panel for panel in content["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels) >= 6
    for panel in panels:
        assert panel["targets"]
        for target in panel["targets"]:
            assert unknown_metrics(target["expr"]) == set()
            assert "kvxfer_" in target["expr"]
