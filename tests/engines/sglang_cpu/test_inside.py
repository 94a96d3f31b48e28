"""Runs the checks that need SGLang's classes in the interpreter that has them."""

import os
import subprocess
from pathlib import Path

import pytest

INSIDE = Path(__file__).parent / "inside"


@pytest.mark.parametrize("file", sorted(INSIDE.glob("check_*.py")), ids=lambda file: file.stem)
def test_inside_sglang(file, sglang_python, sglang_path, tmp_path):
    paths = [sglang_path, INSIDE.parent / "shim", INSIDE]
    pytest_options = ["-c", os.devnull, "--rootdir", str(INSIDE), "-p", "no:cacheprovider"]
    pytest_options += ["-o", "tmp_path_retention_policy=failed"]
    pytest_options += ["--disable-warnings"]  # they are those of SGLang's imports
    result = subprocess.run(
        [str(sglang_python), "-m", "pytest", "-q", *pytest_options, str(file)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
            "SGLANG_USE_CPU_ENGINE": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    # Status 5 is "no tests collected": a check that checks nothing fails here too.
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
