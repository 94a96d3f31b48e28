"""A real vLLM server on the CPU whose prefix cache continues in an LMCache server."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lmcache_cpu.inside.server import QUIET, eventually, free_port, http_call, stop_group

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BLOCK, BATCH = 32, 256  # tokens of a block, and of one step: longer prompts are prefilled in chunks
VOCABULARY = 2048
START_SECONDS = 420
ENVIRONMENT = {
    **QUIET,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Reply:
    """`cached` counts the prompt's tokens that were not computed; `logprobs` are those after it."""

    tokens: list[int]
    cached: int
    logprobs: torch.Tensor | None


class VllmServer:
    def __init__(self, python: Path, model: Path, work: Path, lmcache_port: int) -> None:
        self.port, self.model = free_port(), model
        self.log = work / f"vllm-{model.name}.log"
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": lmcache_port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            },
        }
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "1024", "--block-size", str(BLOCK)]
        command += ["--enforce-eager", "--max-logprobs", str(VOCABULARY)]
        command += ["--max-num-batched-tokens", str(BATCH), "--max-num-seqs", "4"]
        command += ["--enable-prompt-tokens-details"]
        command += ["--kv-transfer-config", json.dumps(connector)]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT},
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        eventually(self._is_ready, START_SECONDS)

    def stop(self) -> None:
        stop_group(self.process)

    def ask(
        self, prompt: Sequence[int], new_tokens: int = 4, salt: str = "", *, logprobs: bool = False
    ) -> Reply:
        """A greedy continuation of token ids."""
        body: dict[str, Any] = {
            "model": str(self.model),
            "prompt": list(prompt),
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt:
            body["cache_salt"] = salt
        if logprobs:
            body |= {"logprobs": VOCABULARY, "return_tokens_as_token_ids": True}
        answer = json.loads(self.call("POST", "/v1/completions", body))
        (choice,) = answer["choices"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        table = None
        if logprobs:
            table = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64)
            for name, value in choice["logprobs"]["top_logprobs"][0].items():
                table[int(name.removeprefix("token_id:"))] = value
        return Reply(choice["token_ids"], details.get("cached_tokens") or 0, table)

    def reset(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.call("POST", "/reset_prefix_cache", {})

    def call(self, method: str, path: str, body: Any = None) -> str:
        return http_call(self.port, method, path, body, seconds=120)

    def _is_ready(self) -> bool:
        last = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        assert self.process.poll() is None, f"vLLM ended with {self.process.returncode}:\n{last}"
        try:
            self.call("GET", "/health")
        except OSError:
            return False
        return True
