"""Runs the checks that need LMCache in the interpreter that has it."""

import os
import subprocess
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"


@pytest.mark.parametrize("file", sorted(INSIDE.glob("check_*.py")), ids=lambda file: file.stem)
def test_inside_lmcache(file, lmcache_python, lmcache_path, family_manifest, tmp_path):
    pytest_options = ["-c", os.devnull, "--rootdir", str(INSIDE), "-p", "no:cacheprovider"]
    pytest_options += ["-p", "toy_fixture", "-o", "tmp_path_retention_policy=failed"]
    pytest_options += ["--disable-warnings"]  # they are those of LMCache's imports
    result = subprocess.run(
        [str(lmcache_python), "-m", "pytest", "-q", *pytest_options, str(file)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(lmcache_path), str(INSIDE)]),
            "PYTHONHASHSEED": "0",
            "KVXFER_CONFIG": "",
            "TEST_MANIFEST": str(family_manifest()),
            "LMCACHE_TRACK_USAGE": "false",
            "DO_NOT_TRACK": "1",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "ERROR",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    # Status 5 is "no tests collected": a check that checks nothing fails here too.
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
