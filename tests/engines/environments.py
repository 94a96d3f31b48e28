"""Engine environments: built once per version, outside the clone, and reused.

SGLang and LMCache are gigabytes each, pin their own torch, and exclude one another, so neither
lives in the development environment. ``engine_python("sglang")`` returns the interpreter of a
virtual environment that holds exactly what ``pyproject.toml`` says of that extra, this package's
dependencies and the test tools. This package itself is not in it: `PackageLinks` shows the clone
to an interpreter, entry points included, so that several clones share one environment.

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
import venv
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def engine_python(engine: str) -> Path:
    """The interpreter of the environment for one extra of this package, built when missing.

    Raises EnvironmentBuildError when pip fails.
    """
    requirements = requirements_of(engine)
    folder = environments_folder() / environment_name(engine, requirements)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(beside(folder, "lock")):
        if not is_intact(folder):
            _build(folder, engine, requirements)
    return folder / "bin" / "python"


def environments_folder() -> Path:
    chosen = os.environ.get("KVXFER_ENVS")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvxfer" / "envs"


def requirements_of(engine: str) -> list[str]:
    """Requirement lines: the extra, this package's dependencies, and the test tools."""
    project = read_pyproject()["project"]
    extras = project["optional-dependencies"]
    tools = [line for line in extras["dev"] if _project_name(line) in TEST_TOOLS]
    return [*extras[engine], *project["dependencies"], *tools]


def environment_name(engine: str, requirements: list[str]) -> str:
    """Readable and exact: other requirements, Python or machine give another environment."""
    pinned = next(line for line in requirements if _project_name(line) == engine)
    version = pinned.partition("==")[2] or "any"
    built_for = [*sorted(requirements), platform.python_version(), platform.machine()]
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


def _build(folder: Path, engine: str, requirements: list[str]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    log = beside(folder, "log")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input"]
    with log.open("w") as output:
        try:
            status = subprocess.run(
                [*pip, *requirements],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=BUILD_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    if status != 0:
        raise EnvironmentBuildError(_failure(engine, log))
    (folder / MARKER).write_text("\n".join(requirements) + "\n")


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
