"""Prefill and generate through the tier: what an engine's adapter does, for one sequence.

The prompt's whole blocks are looked up, the leading ones that can be had are read or converted
into one prefix, the model computes the rest, and the blocks it computed are written back.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from kvstore_xfer.blocks.chain import HASH_SCHEME, chain_hashes
from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ModelError
from kvstore_xfer.outcome import Outcome
from kvstore_xfer.tier.open import Engine
from kvxfer_transformers.cache import cache_of_page, page_of_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.tier.result import BlockResult
    from kvstore_xfer.tier.tier import Tier
    from kvxfer_transformers.model import LoadedModel


@dataclass(frozen=True)
class Prefill:
    """A prompt that was prefilled: its cache, the logits of the last token, and how it went.

    `tokens` counts the prompt's tokens by outcome; tokens behind the last whole block, and the last
    token (which is always computed), are missed. `seconds` is the time to the first token.
    """

    cache: DynamicCache
    logits: torch.Tensor
    tokens: dict[Outcome, int]
    seconds: float


def engine_of(model: LoadedModel, block_tokens: int) -> Engine:
    """What a loaded transformers model says about itself as an engine of the tier."""
    dtype = str(model.dtype).removeprefix("torch.")
    return Engine(model.description, dtype, block_tokens, HASH_SCHEME)


class Session:
    """One model behind one tier. `salt` keeps a tenant's blocks apart from all others.

    Raises ModelError when the tier is not that of this model in this dtype.
    """

    def __init__(self, model: LoadedModel, tier: Tier, salt: str = "") -> None:
        own = engine_of(model, tier.identity.block_tokens)
        if own.identity != tier.identity or own.block_shape != tier.shape:
            raise ModelError(
                f"tier {tier.name!r} is not that of {model.description.name} in {own.kv_dtype}; "
                "open it with engine_of(model, ...) of this model"
            )
        self._model = model
        self._tier = tier
        self._salt = salt

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> Prefill:
        """Prefill `prompt` (at least one token) through the tier.

        At least the last token is computed by the model, since its logits are needed.
        """
        started = time.perf_counter()
        block_tokens = self._tier.identity.block_tokens
        hashes = chain_hashes(prompt, block_tokens, self._salt)
        usable = (len(prompt) - 1) // block_tokens
        page, results = self._read(hashes[:usable])
        served = sum(result.served for result in results)
        start = served * block_tokens
        cache = DynamicCache() if not served else cache_of_page(page)
        logits = self._model.read(prompt[start:], cache, keep=1)[-1]
        seconds = time.perf_counter() - started
        self._write(hashes, cache, served)
        return Prefill(cache, logits, self._tokens(results, len(prompt)), seconds)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], Prefill]:
        """Greedy continuation of `new_tokens` tokens after a prefill through the tier."""
        prefill = self.prefill(prompt)
        return greedy(self._model, prefill.cache, prefill.logits, new_tokens), prefill

    def _read(self, hashes: list[str]) -> tuple[KvPage, list[BlockResult]]:
        plans = self._tier.find(hashes)
        served = next((i for i, plan in enumerate(plans) if not plan.served), len(plans))
        page = KvPage.empty_run(self._tier.shape, served, self._model.device)
        targets = page.split(self._tier.identity.block_tokens)
        spare = targets[-1:] * (len(plans) - served)  # never filled: their plans are not served
        results = self._tier.read(plans, [*targets, *spare] if targets else [page] * len(plans))
        tokens = sum(result.served for result in results) * self._tier.identity.block_tokens
        return page.cut(0, tokens), results

    def _write(self, hashes: list[str], cache: DynamicCache, served: int) -> None:
        block_tokens = self._tier.identity.block_tokens
        computed = page_of_cache(cache, served * block_tokens, len(hashes) * block_tokens)
        pages = computed.split(block_tokens)
        if pages:
            self._tier.write(hashes[served:], pages, served)

    def _tokens(self, results: list[BlockResult], prompt: int) -> dict[Outcome, int]:
        block_tokens = self._tier.identity.block_tokens
        counted = Counter[Outcome]()
        for result in results:
            counted[result.outcome] += block_tokens
        counted[Outcome.MISSED] += prompt - sum(counted.values())
        return {outcome: counted[outcome] for outcome in Outcome}


@torch.inference_mode()
def greedy(
    model: LoadedModel, cache: DynamicCache, logits: torch.Tensor, new_tokens: int
) -> list[int]:
    """The most likely continuation, token by token; `cache` grows with it."""
    tokens: list[int] = []
    for _ in range(new_tokens):
        tokens.append(int(logits.argmax()))
        logits = model.read(tokens[-1:], cache)[-1]
    return tokens
