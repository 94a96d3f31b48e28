"""Real servers for the stores' tests, started and stopped by the tests themselves."""

import contextlib
import ctypes.util
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

START_SECONDS = 20


def free_port():
    """Low enough for a cluster's second port, which is 10,000 higher."""
    while True:
        with socket.socket() as listener:
            port = random.randrange(20_000, 32_000)
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                return port


def debian_command(*commands, package):
    """Path of the first command there is; root on Debian gets the package, others are told."""
    return _found(lambda: _which(commands), f"none of {commands}", package)


def debian_library(name, *, package):
    return _found(lambda: ctypes.util.find_library(name), f"no lib{name}", package)


def _found(look, what, package):
    found = look()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
        # Runlevel 1: the package's own service is not started.
        env = os.environ | {"RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "-y", "--no-install-recommends", package]
        if subprocess.run(install, env=env, **quiet).returncode:
            subprocess.run(["apt-get", "update"], env=env, **quiet)
            subprocess.run(install, env=env, **quiet)
        found = look()
    if found is None:
        raise RuntimeError(f"{what} is installed; as root: apt-get install {package}")
    return found


def _which(commands):
    return next((path for name in commands if (path := shutil.which(name))), None)


class Process:
    """A server process; `alive()` is asked until it answers."""

    def __init__(self, command, folder, alive, env=None):
        self.command, self.folder, self.alive, self.env = command, Path(folder), alive, env
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "server.log"
        self._process = None
        self.start()

    def start(self):
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                list(map(str, self.command)),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=os.environ | (self.env or {}),
                start_new_session=True,
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"{self.command[0]} did not start:\n{self.log.read_text()}")
            time.sleep(0.05)

    def _answers(self):
        try:
            return self.alive()
        except Exception:  # noqa: BLE001 - whatever its client raises: not yet
            return False

    def kill(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def pause(self):
        """Reachable, accepting, and never answering: like a partition to its clients."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self):
        os.killpg(self._process.pid, signal.SIGCONT)


def connects(port):
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
