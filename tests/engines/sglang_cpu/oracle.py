"""What an engine must answer, computed without any engine: by transformers, in float32.

An answer depends on how much of the prompt came from converted blocks. Where two tokens are as
likely as one another to the last few bits of a float, two correct engines may differ, so answers
are compared up to the first such tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.convert import TorchConverter
from kvxfer_transformers.cache import cache_of_page

if TYPE_CHECKING:
    from collections.abc import Sequence

TIE = 2e-3  # logits; two float32 implementations of these models differ by a few 1e-5


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and by how much each was more likely than the next best."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]

    def agrees(self, given: Sequence[int]) -> bool:
        for token, margin, other in zip(self.tokens, self.margins, given, strict=True):
            if margin < TIE:
                return True
            if token != other:
                return False
        return True


class Oracle:
    """Answers of `target` alone, and after a prefix converted from `source`."""

    def __init__(self, source, target, mapper, new_tokens: int) -> None:
        self._source, self._target = source, target
        self._converter = TorchConverter(mapper, torch.float32)
        self._new_tokens = new_tokens
        self._known: dict[tuple[tuple[int, ...], int, str], Answer] = {}

    def of_target(self, prompt: Sequence[int], converted: int = 0) -> Answer:
        """The target's answer with its first `converted` tokens from the source's cache."""
        return self._remembered(prompt, converted, "target")

    def of_source(self, prompt: Sequence[int]) -> Answer:
        return self._remembered(prompt, 0, "source")

    def converted_page(self, tokens: Sequence[int]) -> KvPage:
        """The target's cache of `tokens`, converted from the source's."""
        page = self._source.capture(tokens)
        heads, layers = self._target.description.kv_heads, self._target.description.layers
        shape = (layers, len(tokens), heads, page.keys.shape[-1])
        converted = KvPage(torch.empty(shape), torch.empty(shape))
        self._converter.convert([page], [0], [converted])
        return converted

    def _remembered(self, prompt: Sequence[int], converted: int, role: str) -> Answer:
        key = (tuple(prompt), converted, role)
        if key not in self._known:
            model = self._target if role == "target" else self._source
            self._known[key] = self._compute(model, list(prompt), converted)
        return self._known[key]

    @torch.inference_mode()
    def _compute(self, model, prompt: list[int], converted: int) -> Answer:
        cache = DynamicCache()
        if converted:
            cache = cache_of_page(self.converted_page(prompt[:converted]))
        logits = model.read(prompt[converted:], cache, keep=1)[-1]
        tokens, margins = [], []
        for _ in range(self._new_tokens):
            best, second = logits.topk(2)[0].tolist()
            tokens.append(int(logits.argmax()))
            margins.append(best - second)
            logits = model.read(tokens[-1:], cache)[-1]
        return Answer(tuple(tokens), tuple(margins))
