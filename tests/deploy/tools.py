"""Programs that the deployment tests run, fetched once into a cache when they are not installed.

A program that cannot be had fails the test with what to do; nothing is skipped.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvxfer" / "tools"
_SECONDS = 600


class ToolError(RuntimeError):
    """A program is not there and could not be fetched; the message says what to install."""


def promtool() -> Path:
    return _debian("promtool", "prometheus")


def prometheus() -> Path:
    return _debian("prometheus", "prometheus")


def browser() -> Path:
    """A Chromium without a window; installed with apt, as root, when there is none."""
    names = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        with _locked("browser"):
            _apt("install", "-y", "--no-install-recommends", "chromium-headless-shell")
        found = shutil.which("chromium-headless-shell")
    if found is None:
        raise ToolError("no browser; as root: apt-get install chromium-headless-shell")
    return Path(found)


def _debian(program: str, package: str) -> Path:
    """Installed, or unpacked from the distribution's package: these programs are one file each."""
    found = shutil.which(program)
    if found:
        return Path(found)
    folder = CACHE / package
    path = folder / "usr" / "bin" / program
    with _locked(package):
        if not path.exists():
            work = CACHE / f"{package}.part"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            _apt("download", package, cwd=work)
            archive = next(work.glob("*.deb"))
            subprocess.run(["dpkg", "-x", archive, work / "root"], check=True, timeout=_SECONDS)
            shutil.rmtree(folder, ignore_errors=True)
            (work / "root").rename(folder)
    return path


def _apt(*words: str, cwd: Path | None = None) -> None:
    """apt-get, with the lists of packages brought up to date when it fails at first."""
    if shutil.which("apt-get") is None:
        raise ToolError(f"not on Debian or Ubuntu: install {words[-1]} and put it on PATH")
    for attempt in (["apt-get", *words], ["apt-get", "update"], ["apt-get", *words]):
        done = subprocess.run(
            attempt, cwd=cwd, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode == 0 and attempt[1] != "update":
            return
    raise ToolError(
        f"apt-get {' '.join(words)} failed; install {words[-1]} and put it on PATH\n{done.stderr}"
    )


def _locked(name: str):
    CACHE.mkdir(parents=True, exist_ok=True)
    handle = (CACHE / f"{name}.lock").open("w")
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle
