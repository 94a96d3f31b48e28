"""A model that runs every text once: several fits and checks then cost one prefill each.

What a model said is kept in files, named by what it was asked. Of reads only those after its own
caches are kept: what it reads after a converted one is asked once.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.fit.run import Side

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore_xfer.models.description import ModelDescription
    from kvxfer_transformers.model import LoadedModel

_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OwnPage(KvPage):
    """A model's own cache of `tokens`, as opposed to one that was converted."""

    tokens: tuple[int, ...] = ()


class RememberedModel:
    """A `gate.arms.Runner`, and by `side` one model of a fit.

    `folder` grows by every cache, by the gradients of a fit and, until `forget_reads`, by logits;
    it must be this model's alone.
    """

    def __init__(self, model: LoadedModel, folder: Path) -> None:
        self._model, self._pages, self._reads = model, folder / "pages", folder / "reads"
        for part in (self._pages, self._reads):
            part.mkdir(parents=True, exist_ok=True)

    @property
    def description(self) -> ModelDescription:
        return self._model.description

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def side(self) -> Side:
        """Queries are larger than what they are taken for, and not kept."""
        queries = self._model.capture_queries
        return Side(self.description, self.capture, queries, self.sensitivity)

    def tokenize(self, text: str) -> list[int]:
        return self._model.tokenize(text)

    def capture(self, tokens: Sequence[int]) -> OwnPage:
        return self._page("capture", tokens, lambda: self._model.capture(tokens))

    def sensitivity(self, tokens: Sequence[int], seed: int) -> OwnPage:
        what = f"sensitivity {seed}"
        return self._page(what, tokens, lambda: self._model.sensitivity(tokens, seed))

    def read_after(self, page: KvPage | None, tokens: Sequence[int]) -> torch.Tensor:
        return self._read("logits", page, tokens, self._model.read_after)

    def attention_after(self, page: KvPage | None, tokens: Sequence[int]) -> torch.Tensor:
        return self._read("attention", page, tokens, self._model.attention_after)

    def forget_reads(self) -> None:
        shutil.rmtree(self._reads)
        self._reads.mkdir()

    def _page(self, what: str, tokens: Sequence[int], run: Callable[[], KvPage]) -> OwnPage:
        def tensors() -> _Tensors:
            page = run()
            return {"keys": page.keys, "values": page.values}

        kept = self._kept(self._pages, (what, *tokens), tensors)
        return OwnPage(kept["keys"], kept["values"], tuple(tokens))

    def _read(
        self,
        what: str,
        page: KvPage | None,
        tokens: Sequence[int],
        run: Callable[[KvPage | None, Sequence[int]], torch.Tensor],
    ) -> torch.Tensor:
        if page is not None and not isinstance(page, OwnPage):
            return run(page, tokens)
        before = () if page is None else page.tokens
        question = (what, *before, "then", *tokens)
        kept = self._kept(self._reads, question, lambda: {"said": run(page, tokens)})
        return kept["said"]

    def _kept(
        self, folder: Path, question: tuple[object, ...], run: Callable[[], _Tensors]
    ) -> _Tensors:
        name = hashlib.blake2b(repr(question).encode(), digest_size=16).hexdigest()
        file = folder / name
        if not file.exists():
            partial = file.with_suffix(".partial")
            torch.save({name: tensor.clone() for name, tensor in run().items()}, partial)
            partial.replace(file)
        kept: _Tensors = torch.load(file, map_location=self._model.device, weights_only=True)
        return kept
