"""A disk that is really full, and one that is really read-only, under the command itself."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAMILY = Path(__file__).parents[1] / "data" / "family"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB; the mapper of the shipped pair takes 900 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def _fit(out):
    models = ["--source", FAMILY / "small", "--target", FAMILY / "large"]
    text = ["--text", FAMILY / "text" / "calibration.jsonl", "--out", out]
    size = ["--sequences", "8", "--sequence-tokens", "32", "--layers", "6", "--ridge", "1e-3"]
    command = [sys.executable, "-m", "kvstore_xfer.cli.main", "fit", *models, *text, *size]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr.splitlines()[-1]


def test_a_full_disk_is_one_line_and_leaves_no_mapper(small_disk):
    code, line = _fit(small_disk / "mapper")
    assert code == 2
    assert line.startswith("kvxfer: error: ")
    assert "No space left" in line
    assert not (small_disk / "mapper" / "manifest.json").exists()


def test_a_read_only_disk_is_one_line(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    code, line = _fit(small_disk / "mapper")
    assert code == 2
    assert "--out" in line
    assert "Read-only file system" in line
