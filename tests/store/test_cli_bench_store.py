"""``kvxfer bench store`` prints its figures and cleans up; `make bench` says how large they are."""

import pytest

from kvstore_xfer.cli import bench_store
from kvstore_xfer.cli.main import main


def test_it_measures_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_store, "SHAPES", {"small": (4096, 40)})
    assert main(["bench", "store", str(tmp_path), "--blocks", "2000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("small  write")
    assert "2000 blocks indexed: opened in" in out
    assert "after a crash in" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["/no/such/folder"], ["--blocks", "3"]])
def test_a_wrong_argument_is_one_line(arguments, capsys):
    assert main(["bench", "store", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
