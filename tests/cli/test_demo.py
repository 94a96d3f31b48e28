"""The main job on the shipped models, as a newcomer runs it."""

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_the_target_is_served_converted_blocks_and_then_derived_ones(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "kvstore_xfer.cli.main", "demo", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(figures.read_text())
    served = {"native": 0, "declined": 0, "missed": 8}
    assert result["lookups"] == [
        {**served, "derived": 0, "converted": 2048},
        {**served, "derived": 2048, "converted": 0},
    ]
    assert result["identity_max_abs_diff"] == 0.0
    assert result["verdict"] == "accepted"
    assert result["kl"] < 0.025
    assert result["top1_agreement"] > 0.89
    assert 0.98 < result["retention"] < 1
    assert 0.7 < result["gap_recovered"] < 1
    assert "first token" in done.stdout
    assert {"ttft_native_s", "ttft_converted_s", "ttft_derived_s"} < set(result)
