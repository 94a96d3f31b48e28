"""Engine workers without engines: paged KV tensors behind LMCache's own transfer contexts."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import (
    EngineDrivenTransferContext,
    create_transfer_context,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from kvstore_xfer.blocks.page import KvPage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK, BLOCKS, SECONDS = 16, 128, 30


@contextmanager
def connected(port: int) -> Iterator[object]:
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=context)
    try:
        yield client
    finally:
        client.close()
        context.term()


@dataclass(frozen=True)
class Cache:
    """What the worker's engine would say of its KV cache."""

    name: str
    layers: int
    heads: int
    dim: int
    dtype: torch.dtype = torch.float32


class Worker:
    """One worker of an engine like vLLM on a GPU: a tensor ``[2, blocks, BS, H, D]`` per layer.

    With `packed`, a block size, like vLLM on a CPU: ``[blocks, H, BS, 2 * D]``, for lookups only.
    """

    def __init__(
        self, client, cache: Cache, number: int, mode: str, chunk: int = 64, packed: int = 0
    ) -> None:
        self._client, self._cache, self._chunk = client, cache, chunk
        size = packed or BLOCK
        shape = (2, BLOCKS, BLOCK, cache.heads, cache.dim)
        if packed:
            shape = (BLOCKS, cache.heads, packed, 2 * cache.dim)
        self.kv = {f"layer.{i}": torch.zeros(shape, dtype=cache.dtype) for i in range(cache.layers)}
        self._transfer = (
            EngineDrivenTransferContext(number, client)
            if mode == "engine_driven"
            else create_transfer_context(self.kv, mode=mode, instance_id=number, req_client=client)
        )
        group = EngineGroupInfo(
            engine_group_id=0, layer_indices=tuple(range(cache.layers)), tokens_per_block=size
        )
        self._transfer.register(
            self.kv,
            cache.name,
            1,
            chunk // size,
            10.0,
            layout_hints={"kv_layout": "HND" if packed else "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )

    def look_up(self, tokens: Sequence[int], request: str, salt: str = "") -> int:
        """How many leading chunks LMCache can serve."""
        whole = len(tokens) // self._chunk * self._chunk
        key = self._key(tokens, request, 0, whole, None, salt)
        self._client.lookup(key, 1).result(timeout=SECONDS)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            found = self._client.query_prefetch_status(request).result(timeout=SECONDS)
            if found is not None:
                return int(found)
            time.sleep(0.002)
        raise TimeoutError(request)

    def store(
        self, tokens: Sequence[int], request: str, start: int, page: KvPage, salt: str = ""
    ) -> None:
        """Store the tokens from `start` on that `page` holds."""
        end = start + page.keys.shape[1]
        for layer, tensor in enumerate(self.kv.values()):
            for part, rows in zip(tensor, (page.keys[layer], page.values[layer]), strict=True):
                part.view(-1, *part.shape[2:])[start:end] = rows
        self._move("submit_store", tokens, request, start, end, salt)

    def retrieve(self, tokens: Sequence[int], request: str, end: int, salt: str = "") -> KvPage:
        for tensor in self.kv.values():
            tensor.zero_()
        self._move("submit_retrieve", tokens, request, 0, end, salt, skip_first_n_tokens=0)
        layers = [tensor.flatten(1, 2)[:, :end] for tensor in self.kv.values()]
        return KvPage(*(torch.stack([layer[i] for layer in layers]).clone() for i in (0, 1)))

    def end(self, request: str) -> None:
        self._client.end_session(request).result(timeout=SECONDS)

    def close(self) -> None:
        self._transfer.flush_inflight_stores()
        future = self._transfer.unregister()
        if future is not None:
            future.result(timeout=SECONDS)
        self._transfer.close()
        self.kv.clear()

    def _move(self, call, tokens, request, start, end, salt, **options) -> None:
        blocks = [list(range(start // BLOCK, end // BLOCK))]
        event = self._transfer.create_recorded_event()
        key = self._key(tokens, request, start, end, 0, salt)
        submit = getattr(self._transfer, call)
        future = submit(request, key, self.kv, blocks, event, self._chunk // BLOCK, **options)
        future.result(timeout=SECONDS)

    def _key(self, tokens, request, start, end, worker, salt) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=self._cache.name,
            world_size=1,
            num_kv_readers=1,
            worker_id=worker,
            token_ids=tuple(tokens),
            start=start,
            end=end,
            request_id=request,
            cache_salt=salt,
        )
