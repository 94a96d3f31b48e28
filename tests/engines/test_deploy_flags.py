"""The arguments in deploy/ are ones that the engines take."""

import json
import subprocess
import sys

import pytest
from environments import REPOSITORY, engine_python

sys.path.insert(0, str(REPOSITORY / "tests" / "deploy"))

from rendered import OVERLAYS, compose, containers, overlay, pods

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


def _command_lines():
    services = compose()["services"]
    lines = [item["command"] for name, item in services.items() if name.startswith("sglang-")]
    for name in OVERLAYS:
        for _, pod in pods(overlay(name)):
            lines += [
                container["args"]
                for container in containers(pod)
                if container["name"] == "engine" and "sglang" in container["image"]
            ]
    return lines


def test_sglang_takes_the_arguments_of_every_server(sglang_python):
    lines = _command_lines()
    assert len(lines) >= 2 * len([name for name in OVERLAYS if name.startswith("sglang")])
    done = subprocess.run(
        [sglang_python, "-c", _SGLANG],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for parsed in json.loads(done.stdout.splitlines()[-1]):
        assert parsed["model_path"].startswith("Qwen/Qwen3-")
        assert (parsed["host"], parsed["port"]) == ("0.0.0.0", 30000)
        assert parsed["enable_metrics"]
        assert parsed["hicache_size"] > 0
