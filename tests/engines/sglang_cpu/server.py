"""The real SGLang server as a child process, without a GPU, and a client for what tests ask of it.

    with SglangServer(Launch(model, work=tmp_path, storage={...})) as engine:
        reply = engine.generate("text")

Servers are independent process groups that are stopped whole; two can live side by side. This
module needs nothing but the standard library: it runs in the development environment and starts
the interpreter of the engine environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SHIM = Path(__file__).resolve().parent / "shim"
ADMIN_KEY = "tests"
START_SECONDS = 240
STOP_SECONDS = 20


class ServerError(RuntimeError):
    """The server did not start, refused a request or ended; the message quotes its log."""


@dataclass(frozen=True)
class Launch:
    """What one server is started with.

    `storage` is the extra config of the ``dynamic`` backend, None starts without storage; `paths`
    goes to PYTHONPATH; `work` receives the log; `arguments` are further command line words. Without
    `hierarchical` no option of the hierarchical cache is given.
    """

    python: Path
    model: Path
    work: Path
    paths: Sequence[Path]
    storage: Mapping[str, Any] | None = None
    page_size: int = 16
    layout: str = "page_first_direct"
    dtype: str = "bfloat16"
    served_name: str | None = None
    max_total_tokens: int = 8192
    prefetch_policy: str = "wait_complete"
    hierarchical: bool = True
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        options = {
            "model-path": self.model,
            "served-model-name": self.served_name or self.model,
            "host": "127.0.0.1",
            "port": port,
            "admin-api-key": ADMIN_KEY,
            "device": "cpu",
            "attention-backend": "torch_native",
            "dtype": self.dtype,
            "max-total-tokens": self.max_total_tokens,
            "mem-fraction-static": 0.3,
        }
        words = [str(self.python), "-m", "sglang.launch_server", "--skip-server-warmup"]
        words += ["--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle"]
        if self.hierarchical:
            words.append("--enable-hierarchical-cache")
            options |= self._hierarchical_options()
        for name, value in options.items():
            words += [f"--{name}", str(value)]
        return [*words, *self.arguments]

    def _hierarchical_options(self) -> dict[str, Any]:
        io_backend = "direct" if self.layout in ("layer_first", "page_first_direct") else "kernel"
        options = {
            "page-size": self.page_size,
            "hicache-ratio": 2.0,
            "hicache-mem-layout": self.layout,
            "hicache-io-backend": io_backend,
            "hicache-write-policy": "write_through",
            "hicache-storage-prefetch-policy": self.prefetch_policy,
        }
        if self.storage is not None:
            options["hicache-storage-backend"] = "dynamic"
            options["hicache-storage-backend-extra-config"] = json.dumps(self.storage)
        return options

    def variables(self) -> dict[str, str]:
        """The parent's environment without its own PYTHONPATH, offline, on SGLang's CPU path.

        One thread, because the models are tiny and idle threads of two engines would spin for
        the same cores.
        """
        paths = [SHIM, *self.paths]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **self.environment,
        }


@dataclass(frozen=True)
class Reply:
    """One answer. `cached` counts prompt tokens by tier: device, host, storage."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached: dict[str, Any]
    meta: dict[str, Any]

    @property
    def from_storage(self) -> int:
        return int(self.cached.get("storage", 0))

    @property
    def in_any_tier(self) -> int:
        return sum(int(self.cached.get(tier, 0)) for tier in ("device", "host", "storage"))


class SglangServer:
    """A running server. Methods raise ServerError; leaving the context stops every process."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        launch.work.mkdir(parents=True, exist_ok=True)
        self.log = launch.work / "server.log"
        self.port = free_port()
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                launch.command(self.port),
                env=launch.variables(),
                cwd=launch.work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> SglangServer:
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        eventually(self._is_ready, START_SECONDS, lambda: self._complaint("did not start"))

    def stop(self) -> None:
        """End the whole process group: the scheduler and its helpers are children of the server."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def generate(
        self,
        prompt: str | list[int],
        *,
        max_new_tokens: int = 8,
        timeout: float = 120,
        **request: Any,
    ) -> Reply:
        """One greedy answer to text or token ids; `request` holds further fields of /generate."""
        field = "text" if isinstance(prompt, str) else "input_ids"
        body = {field: prompt, **_greedy(max_new_tokens), **request}
        return _reply(json.loads(self.call("POST", "/generate", body, timeout)))

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 8,
        timeout: float = 120,
        **request: Any,
    ) -> list[Reply]:
        """Greedy answers to prompts that the engine has all at once, in their order."""
        body = {"input_ids": list(prompts), **_greedy(max_new_tokens), **request}
        return [
            _reply(answer) for answer in json.loads(self.call("POST", "/generate", body, timeout))
        ]

    def flush_cache(self) -> None:
        """Empty the device and host tiers; storage stays. Waits for running requests."""
        self.call("POST", "/flush_cache?timeout=30")

    def attach_storage(self, extra_config: Mapping[str, Any]) -> None:
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": json.dumps(extra_config),
            "hicache_storage_prefetch_policy": self.launch.prefetch_policy,
        }
        self.call("PUT", "/hicache/storage-backend", body)

    def detach_storage(self) -> None:
        self.call("DELETE", "/hicache/storage-backend")

    def clear_storage(self) -> None:
        self.call("POST", "/hicache/storage-backend/clear")

    def call(self, method: str, path: str, body: Any = None, timeout: float = 60) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read().decode(errors="replace")
            raise ServerError(f"{method} {path}: HTTP {error.code}: {detail}") from None
        except OSError as error:
            raise ServerError(self._complaint(f"{method} {path}: {error}")) from error

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise ServerError(self._complaint(f"ended with status {self.process.returncode}"))
        try:
            self.call("GET", "/health", timeout=5)
        except ServerError:
            return False
        return True

    def _complaint(self, problem: str) -> str:
        last = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        return f"SGLang server for {self.launch.model.name}: {problem}; end of {self.log}:\n{last}"


def _greedy(max_new_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
    return {"sampling_params": sampling}


def _reply(answer: Mapping[str, Any]) -> Reply:
    meta = answer["meta_info"]
    return Reply(
        text=answer["text"],
        token_ids=answer["output_ids"],
        prompt_tokens=meta["prompt_tokens"],
        cached=meta.get("cached_tokens_details") or {},
        meta=meta,
    )


def eventually(
    condition: Callable[[], bool], seconds: float, complaint: Callable[[], str] = lambda: "timeout"
) -> None:
    """Wait for something another process does in the background. Raises ServerError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(complaint())
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
