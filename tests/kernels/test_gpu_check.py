"""The GPU check says what it could not run, and fails; the rest of it needs a GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture
def check():
    file = Path(__file__).parents[1] / "gpu" / "check.py"
    spec = importlib.util.spec_from_file_location("kvxfer_gpu_check", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_without_its_dependency_fails_and_is_named_last(check, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tier", None)
    outcome = check._outcome(check._tier_check)
    assert outcome.startswith("NOT RUN: ")
    assert check._summary([("kernels", "ok 1e-3"), (check.TIER, outcome)], 1.0) == 1
    assert "NOT RUN" in capsys.readouterr().out.splitlines()[-1]
    assert check._summary([("kernels", "ok 1e-3")], 1.0) == 0
