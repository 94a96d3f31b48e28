"""What deploy/ asks of the engines, asked of the real ones: arguments, and room for the package."""

import json
import os
import subprocess
import sys

import pytest
from environments import REPOSITORY, engine_python

sys.path.insert(0, str(REPOSITORY / "tests" / "deploy"))

from rendered import OVERLAYS, compose, containers, overlay, pods
from test_images import ENGINES, installed_as

_SGLANG = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
parsed = [vars(parser.parse_args(line)) for line in json.load(sys.stdin)]
print("\\n" + json.dumps(parsed, default=str))
"""


@pytest.fixture(scope="module")
def sglang_python():
    return engine_python("sglang")


def _arguments(container_name):
    """The arguments of each container of that name, in every overlay."""
    return [
        container["args"]
        for name in OVERLAYS
        for _, pod in pods(overlay(name))
        for container in containers(pod)
        if container["name"] == container_name
    ]


def _parsed(python, program, lines):
    done = subprocess.run(
        [python, "-c", program],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sglang_takes_the_arguments_of_every_server(sglang_python):
    services = compose()["services"]
    lines = [item["command"] for name, item in services.items() if name.startswith("sglang-")]
    lines += _arguments("engine")
    assert len(lines) == 2 + 2 * len([name for name in OVERLAYS if name.startswith("sglang")])
    for parsed in _parsed(sglang_python, _SGLANG, lines):
        assert parsed["model_path"].startswith("Qwen/Qwen3-")
        assert (parsed["host"], parsed["port"]) == ("0.0.0.0", 30000)
        assert parsed["enable_metrics"]
        assert parsed["hicache_size"] > 0


def test_the_package_fits_beside_sglang_as_it_is(sglang_python, tmp_path):
    """The Dockerfile's pip install, resolved against the engine's own versions."""
    pip = [sglang_python, "-m", "pip"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    frozen = subprocess.run(
        [*pip, "freeze"], capture_output=True, text=True, check=True, env=environment
    ).stdout
    kept = [line for line in frozen.splitlines() if line.startswith(("torch==", "transformers=="))]
    assert len(kept) == 2
    (tmp_path / "engine.txt").write_text("\n".join(kept))
    (file,) = [file for file in ENGINES if file.name.startswith("sglang")]
    requirement = installed_as(file).replace("file://${wheel}", REPOSITORY.as_uri())
    options = ["--quiet", "--dry-run", "--no-build-isolation", "--report", tmp_path / "report.json"]
    done = subprocess.run(
        [*pip, "install", *options, "--constraint", tmp_path / "engine.txt", requirement],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    added = {item["metadata"]["name"].lower() for item in report["install"]}
    assert {"kvstore-xfer", "valkey", "obstore"} <= added
    assert not added & {"torch", "transformers", "sglang", "numpy", "triton"}
