"""`kvxfer check` with several mappers of one pair: the cheapest accepted one is proposed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_xfer.cli.check import cheapest
from kvstore_xfer.cli.main import main
from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import fit
from kvstore_xfer.mapper.artifact import load
from kvxfer_transformers.remembered import RememberedModel

SIZE = ("--passages", "16", "--lengths", "calibration", "--dtype", "float32", "--json")


@pytest.fixture(scope="module")
def mappers(family_mapper, tmp_path_factory):
    """One layer, which is too little, the quick mapper, and more layers than it has."""
    f, work = family_mapper, tmp_path_factory.mktemp("mappers")
    models = [
        RememberedModel(model, work / name)
        for name, model in (("source", f.source), ("target", f.target))
    ]
    sides = [model.side for model in models]
    fit(*sides, f.sequences, work / "one", FitOptions(layers=1, ridge=1e-3))
    fit(*sides, f.sequences, work / "five", FitOptions(layers=5, ridge=1e-3))
    shutil.copytree(f.folder, work / "six")
    return work


def test_the_cheapest_accepted_mapper_is_proposed(mappers, family_mapper, capsys):
    folders = [str(mappers / name) for name in ("six", "one", "five")]
    assert main(["check", *folders, "--text", str(family_mapper.heldout), *SIZE]) == 0
    told = json.loads(capsys.readouterr().out)
    verdicts = {Path(name).name: record["verdict"] for name, record in told["records"].items()}
    assert verdicts == {"six": "accepted", "one": "rejected", "five": "accepted"}
    assert Path(told["proposed"]).name == "five"
    for folder in folders:
        kept = load(Path(folder)).gate["float32"]
        assert kept == told["records"][folder]


def test_none_is_proposed_where_none_is_accepted(family_mapper):
    record = family_mapper.record
    assert cheapest({Path("a"): (5, record), Path("b"): (4, record)}) == Path("b")
    arms = {**record.arms, "mapped": {"kl": {"mean": 0.0}}}
    better = replace(record, arms=arms)
    assert cheapest({Path("a"): (5, record), Path("b"): (5, better)}) == Path("b")
    rejected = replace(better, verdict="rejected")
    assert cheapest({Path("a"): (5, record), Path("b"): (4, rejected)}) == Path("a")
    assert cheapest({}) is None


def test_mappers_of_different_pairs_are_one_line(mappers, family_mapper, tmp_path, capsys):
    f = family_mapper
    back = tmp_path / "back"
    sides = [RememberedModel(m, tmp_path / str(n)).side for n, m in enumerate((f.target, f.source))]
    fit(*sides, f.sequences[:8], back, FitOptions(layers=1, ridge=1e-3))
    text = ("--text", str(f.heldout))
    assert main(["check", str(mappers / "six"), str(back), *text]) != 0
    assert "are of different pairs" in capsys.readouterr().err
    both = [str(mappers / name) for name in ("six", "one")]
    assert main(["check", *both, *text, "--report", str(tmp_path / "page.html")]) != 0
    assert "a page is about one mapper" in capsys.readouterr().err
