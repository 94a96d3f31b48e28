"""One loaded model with its tokenizer and description, and the few forward passes we need."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from kvstore_xfer.errors import ModelError
from kvstore_xfer.models.description import ModelDescription, describe
from kvxfer_transformers.cache import cache_of_page, page_of_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore_xfer.blocks.page import KvPage


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready to run, in one dtype on one device."""

    model: Any
    tokenizer: Any
    description: ModelDescription

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def tokenize(self, text: str) -> list[int]:
        """Token ids as the tokenizer gives them by default; long documents are fine."""
        ids: list[int] = self.tokenizer(text, verbose=False).input_ids
        return ids

    @torch.inference_mode()
    def capture(self, tokens: Sequence[int]) -> KvPage:
        """The whole cache of one sequence, ``[L, T, H, D]`` (a `fit.run.Capture`)."""
        cache = DynamicCache()
        self.read(tokens, cache, keep=1)
        return page_of_cache(cache)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], cache: DynamicCache, keep: int = 0) -> torch.Tensor:
        """Read `tokens` after what `cache` holds (it grows); logits ``[keep or T, vocab]``."""
        ids = torch.tensor([list(tokens)], device=self.device)
        held = {_cache_argument(self.model): cache}
        output = self.model(input_ids=ids, logits_to_keep=keep, **held)
        logits: torch.Tensor = output.logits[0]
        return logits

    def read_after(self, page: KvPage | None, tokens: Sequence[int]) -> torch.Tensor:
        """Logits ``[T, vocab]`` of `tokens` after the tokens of `page` (a `gate.arms.Runner`)."""
        return self.read(tokens, DynamicCache() if page is None else cache_of_page(page))

    def attention_after(self, page: KvPage | None, tokens: Sequence[int]) -> torch.Tensor:
        """Outputs of all attention modules, ``[L, T, hidden]`` (a `gate.arms.Runner`).

        Raises ModelError when the model's attention modules cannot be told from their names.
        """
        outputs: dict[int, torch.Tensor] = {}

        def note(module: Any, _: Any, output: Any) -> None:
            outputs[module.layer_idx] = (output[0] if isinstance(output, tuple) else output)[0]

        hooks = [module.register_forward_hook(note) for module in self._attention_modules()]
        try:
            self.read_after(page, tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([outputs[layer] for layer in sorted(outputs)])

    def _attention_modules(self) -> list[Any]:
        """In transformers an attention module knows its layer, and is called so."""
        found = [
            module
            for module in self.model.modules()
            if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
        ]
        if len(found) != self.description.layers:
            raise ModelError(
                f"{self.description.name}: {len(found)} attention modules found, "
                f"{self.description.layers} expected; this architecture cannot be checked"
            )
        return found


def _cache_argument(model: Any) -> str:
    """`past_key_values` was renamed during transformers 5; the old name then warns."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar and no table of what is missing: that becomes an error of one line."""
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: str = "cpu",
    revision: str | None = None,
) -> LoadedModel:
    """Describe and load a model folder or hub id. Raises ModelError in one line."""
    description = describe(path, revision=revision)
    try:
        with _quiet_transformers():
            model, loading = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, revision=revision, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{path}: cannot be loaded ({reason}); check the folder") from None
    wrong = [*loading["missing_keys"], *loading["mismatched_keys"]]
    if wrong:
        raise ModelError(
            f"{path}: {len(wrong)} weights are missing or of another shape than config.json says, "
            f"such as {sorted(map(str, wrong))[0]}; check the folder"
        )
    return LoadedModel(model.to(device).eval(), tokenizer, description)
