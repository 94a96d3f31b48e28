"""The Dockerfiles: linted, pinned, without root, and building the package from what they copy.

No container engine is here: what a RUN does inside the base images is not tried.
"""

import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest
from rendered import DEPLOY, OVERLAYS, ROOT, compose, containers, overlay, pods, program

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = DEPLOY / "docker"
FILES = sorted(FOLDER.glob("*.Dockerfile"))
ENGINES = [file for file in FILES if file.name != "mappers.Dockerfile"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
BASES = {"sglang": "lmsysorg/sglang", "lmcache": "lmcache/standalone"}


def _instructions(file, name):
    text = file.read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


def _engine(file):
    return file.name.removesuffix(".Dockerfile")


def installed_as(file):
    """The requirement by which the engine's image installs the package."""
    (requirement,) = re.findall(
        r'"(kvstore-xfer\[[\w,]+\] @ file://\$\{wheel\})"', file.read_text()
    )
    return requirement


def _copied(file):
    """The sources that come from the build context."""
    sources = [shlex.split(line)[:-1] for line in _instructions(file, "COPY")]
    return [name for names in sources for name in names if not name.startswith("--")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file):
    done = subprocess.run(
        [program("hadolint"), "--failure-threshold", "style", str(file)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_bases_are_pinned_and_the_image_runs_without_root(file):
    stages = {line.partition(" AS ")[2] for line in _instructions(file, "FROM")}
    for line in _instructions(file, "FROM"):
        base = line.partition(" AS ")[0]
        assert base in stages or re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", base), base
    user = _instructions(file, "USER")[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)


@pytest.mark.parametrize("file", ENGINES, ids=_engine)
def test_the_engine_is_the_version_that_we_are_tested_with(file):
    engine = _engine(file)
    (requirement,) = EXTRAS[engine]
    version = requirement.removeprefix(f"{engine}==")
    assert _instructions(file, "FROM")[-1] == f"{BASES[engine]}:v{version}"
    assert f"m.version('{engine}') == '{version}'" in file.read_text()


def test_vllm_is_the_image_of_the_same_lmcache():
    (requirement,) = EXTRAS["lmcache"]
    for name in OVERLAYS:
        if name.startswith("lmcache"):
            images = {c["image"] for _, pod in pods(overlay(name)) for c in containers(pod)}
            assert f"lmcache/vllm-openai:v{requirement.partition('==')[2]}" in images


@pytest.mark.parametrize("file", ENGINES, ids=_engine)
def test_extras_exist_and_the_user_is_the_pods(file):
    (extras,) = re.findall(r"kvstore-xfer\[([\w,]+)\]", file.read_text())
    assert set(extras.split(",")) <= set(EXTRAS)
    user, _, group = _instructions(file, "USER")[-1].partition(":")
    for name in OVERLAYS:
        for _, pod in pods(overlay(name)):
            if any(c["image"].startswith(f"kvxfer-{_engine(file)}:") for c in containers(pod)):
                context = pod["spec"]["securityContext"]
                assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))


def test_one_version_of_our_images_is_named_everywhere():
    """The package's version, in commands, compose file and overlays alike."""
    version = PROJECT["project"]["version"]
    named = {service["image"] for service in compose()["services"].values()}
    for name in OVERLAYS:
        named |= {c["image"] for _, pod in pods(overlay(name)) for c in containers(pod)}
    for file in ENGINES:
        named |= set(re.findall(r"-t (\S+)", file.read_text()))
    ours = {image for image in named if image.startswith(("kvxfer-sglang", "kvxfer-lmcache"))}
    assert ours == {f"kvxfer-sglang:{version}", f"kvxfer-lmcache:{version}"}


@pytest.mark.parametrize("file", ENGINES, ids=_engine)
def test_what_the_build_imports_to_see_that_it_works_is_in_the_package(file):
    (module,) = re.findall(r"; import ([\w.]+)\"", file.read_text())
    assert module.partition(".")[0] in PROJECT["tool"]["setuptools"]["packages"]


@pytest.mark.parametrize("file", ENGINES, ids=_engine)
def test_the_build_context_holds_what_is_copied(file):
    ignore = (FOLDER / f"{file.name}.dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    assert {line[1:] for line in ignore if line.startswith("!")} == set(_copied(file))


def _installs(wheel):
    """The requirement as the images state it is one that pip resolves, without its dependencies."""
    for file in ENGINES:
        requirement = installed_as(file).replace("${wheel}", str(wheel))
        options = ["--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, requirement],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr


def test_the_package_builds_from_what_is_copied(tmp_path):
    """The same `pip wheel`, on the same files."""
    copied = [_copied(file) for file in ENGINES]
    commands = [_instructions(file, "RUN")[0] for file in ENGINES]
    assert copied[1:] == copied[:-1]
    assert commands[1:] == commands[:-1]
    for name in copied[0]:
        source, target = ROOT / name, tmp_path / "src" / name
        if source.is_dir():
            shutil.copytree(
                source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    command = shlex.split(commands[0].replace("/wheels", str(tmp_path / "wheels")))
    assert command[:2] == ["pip", "wheel"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path / "src",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    inside = {name.rpartition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    _installs(wheel)
    packages = {name.replace(".", "/") for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert packages <= inside
