"""What a fit does with a folder that is not empty, and who may read what it writes."""

import stat
from pathlib import Path

import pytest

from kvstore_xfer.cli.main import main

FAMILY = Path(__file__).parents[1] / "data" / "family"
MODELS = ["--source", str(FAMILY / "small"), "--target", str(FAMILY / "large")]
FIT = ["fit", *MODELS, "--text", str(FAMILY / "text" / "calibration.jsonl"), "--layers", "1"]
SIZE = ["--sequences", "16", "--sequence-tokens", "32", "--dtype", "float32"]


@pytest.fixture
def mapper(tmp_path, capfd):
    out = tmp_path / "mapper"
    assert main([*FIT, *SIZE, "--out", str(out)]) == 0
    capfd.readouterr()
    return out


def test_a_mapper_is_not_replaced(mapper, fails):
    assert "holds a mapper; give another folder" in fails(*FIT, *SIZE, "--out", mapper)


def test_a_finished_fit_is_gone_on_with_by_leaving_it(mapper, capfd):
    before = {path: path.read_bytes() for path in mapper.iterdir()}
    assert main([*FIT, *SIZE, "--out", str(mapper), "--resume"]) == 0
    assert "next: kvxfer check" in capfd.readouterr().out
    assert {path: path.read_bytes() for path in mapper.iterdir()} == before


@pytest.mark.parametrize(
    ("more", "field"),
    [
        (["--sequence-tokens", "48"], "--sequence-tokens"),
        (["--method", "full-head"], "--method"),
        (["--weights", "attention"], "--weights"),
        (["--layers", "2"], "--layers"),
        (["--ridge", "1e-3"], "--ridge"),
        (["--sequences", "24"], "--text, --sequences or --sequence-tokens"),
        (["--source", FAMILY / "large", "--target", FAMILY / "small"], "--source"),
    ],
)
def test_another_fit_does_not_go_on_in_it(mapper, fails, more, field):
    line = fails(*FIT, *SIZE, "--out", mapper, "--resume", *more)
    assert "holds the mapper of another fit" in line
    assert field in line


def test_a_text_that_teaches_nothing_is_told_and_fitted(tmp_path, capfd):
    text = tmp_path / "same.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    out = tmp_path / "mapper"
    assert (
        main(["fit", *MODELS, *SIZE, "--layers", "1", "--text", str(text), "--out", str(out)]) == 0
    )
    told = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(told) == 1
    assert told[0].startswith(f"kvxfer: warning: --text {text}: 9")
    assert "repeat earlier ones, so there is little to learn; give text like" in told[0]
    assert (out / "manifest.json").exists()


def test_a_text_like_the_shipped_one_is_not_warned_of(tmp_path, capfd):
    assert main([*FIT, *SIZE, "--out", str(tmp_path / "mapper")]) == 0
    assert "warning" not in capfd.readouterr().err


def test_a_folder_with_other_files_is_left_alone(tmp_path, fails, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    assert "holds other files (notes.txt)" in fails(*FIT, *SIZE, "--out", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "holds other files (notes.txt)" in fails(*FIT, *SIZE, "--out", "")


def test_engines_of_other_users_can_read_it(mapper):
    files = [path for path in mapper.iterdir() if path.is_file()]
    assert len(files) == 2
    assert all(path.stat().st_mode & stat.S_IROTH for path in files)


def test_more_than_the_models_can_use_is_not_checked(mapper, fails):
    text = FAMILY / "text" / "heldout.jsonl"
    line = fails("check", mapper, "--text", text, "--dtype", "float32", "--max-tokens", "10")
    assert line.endswith("give fewer")
    assert "--prefix-tokens 24 and --tail-tokens 8 are more than the 10 tokens" in line
