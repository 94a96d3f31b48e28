"""A real LMCache server with this package's plug-ins. Needs no LMCache in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

START_SECONDS, STOP_SECONDS = 120, 30
QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}


class LmcacheServer:
    """Started by the constructor, ready inside ``with``. `python` is LMCache's interpreter."""

    def __init__(
        self,
        python: str | Path,
        manifest: Path,
        work: Path,
        *,
        chunk: int = 64,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.http = free_port(), free_port()
        self.log = work / f"lmcache-{self.port}.log"
        adapter = {
            "type": "plugin",
            "module_path": "kvxfer_lmcache.l2_adapter",
            "class_name": "KvxferL2Adapter",
            "adapter_params": {"family": str(manifest)},
        }
        command = [str(python), "-m", "lmcache.cli.main", "server"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(self.http)]
        command += ["--l1-size-gb", "0.0625", "--no-l1-use-lazy", "--chunk-size", str(chunk)]
        command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
        command += ["--l2-adapter", json.dumps(adapter)]
        command += ["--server-module", json.dumps({"module_path": "kvxfer_lmcache.server_module"})]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env={**os.environ, **QUIET, "LMCACHE_LOG_LEVEL": "INFO", **(environment or {})},
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> LmcacheServer:
        try:
            eventually(self._is_ready, START_SECONDS)
        except BaseException:
            self.stop()
            print(self.log.read_text(errors="replace")[-4000:])
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        stop_group(self.process)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.call("GET", "/status"))
        return answer

    def adapter(self) -> dict[str, Any]:
        """What this package's adapter says of itself."""
        (report,) = self.status()["storage_manager"]["l2_adapters"]
        return dict(report)

    def clear(self) -> None:
        """Empty LMCache's own memory, so that the next lookup must come to the tier."""

        def cleared() -> bool:
            self.call("POST", "/cache/clear", {})
            return self.status()["storage_manager"]["l1_usage"][0] == 0

        eventually(cleared, 30)

    def total(self, metric: str, **labels: str) -> float:
        """Sum of a metric over the rows that have the labels."""
        rows = re.findall(rf"^{metric}{{(.*)}} (\S+)$", self.call("GET", "/metrics"), re.MULTILINE)
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        return sum(float(value) for row, value in rows if all(part in row for part in wanted))

    def call(self, method: str, path: str, body: Any = None) -> str:
        return http_call(self.http, method, path, body, seconds=20)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
        try:
            return json.loads(self.call("GET", "/healthcheck"))["status"] == "healthy"
        except OSError:
            return False


def http_call(port: int, method: str, path: str, body: Any = None, *, seconds: float) -> str:
    """The text that a server of this machine answers; `body` is sent as JSON."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return answer.read().decode()


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own session, and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
