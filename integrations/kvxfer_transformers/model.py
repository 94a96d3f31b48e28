"""One loaded model with its tokenizer and description, and the few forward passes we need."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ModelError
from kvstore_xfer.models.description import ModelDescription, describe
from kvstore_xfer.rope.rotate import rope_tables, strip_rope
from kvxfer_transformers.cache import cache_of_page, page_of_cache
from kvxfer_transformers.queries import recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


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
    def capture_queries(self, tokens: Sequence[int]) -> tuple[KvPage, torch.Tensor]:
        """The whole cache, and all queries ``[L, T, H_q, D]``, rotated and scaled as in attention.

        Logits of attention are ``q . k``. Raises ModelError when the model's attention cannot be
        watched.
        """
        with recording(self.model) as recorded:
            page = self.capture(tokens)
        if len(recorded) != len(page.keys):
            raise ModelError(
                f"{self.description.name}: its attention does not go through transformers' "
                "attention interface; fit without --weights attention"
            )
        return page, torch.stack([q[0].transpose(0, 1).float() * scale for q, scale in recorded])

    def sensitivity(self, tokens: Sequence[int], seed: int) -> KvPage:
        """How what the model says at the end depends on its cache of what came before.

        The last quarter of the tokens is read after the cache of the others. For every token of it
        one next token is drawn from the model's own distribution; their log-likelihoods, each with
        a random sign, are added (so that the mean of ``g g'`` over draws is the Fisher
        information). Returned are the gradients by the cache, keys without RoPE.
        """
        if self.description.rope is None:
            raise ModelError(f"{self.description.name}: its RoPE is not supported")
        start = max(1, len(tokens) * 3 // 4)
        page = self.capture(tokens[:start])
        leaves = KvPage(*(part.clone().requires_grad_() for part in (page.keys, page.values)))
        output = self._run(tokens[start:], cache_of_page(leaves))
        said = torch.log_softmax(output.float(), -1)
        generator = torch.Generator().manual_seed(seed)
        draw = torch.multinomial(said.detach().exp().cpu(), 1, generator=generator)
        sign = torch.randint(0, 2, draw.shape, generator=generator) * 2.0 - 1
        total = (said.gather(1, draw.to(said.device)) * sign.to(said.device)).sum()
        keys, values = torch.autograd.grad(total, (leaves.keys, leaves.values))
        positions = torch.arange(start, device=keys.device)
        tables = rope_tables(self.description.rope, positions)
        return KvPage(strip_rope(keys, self.description.rope, *tables), values)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], cache: DynamicCache, keep: int = 0) -> torch.Tensor:
        """Read `tokens` after what `cache` holds (it grows); logits ``[keep or T, vocab]``."""
        return self._run(tokens, cache, keep)

    def _run(self, tokens: Sequence[int], cache: DynamicCache, keep: int = 0) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], device=self.device)
        held = {_cache_argument(self.model): cache}
        output = self.model(input_ids=ids, logits_to_keep=keep, **held)
        logits: torch.Tensor = output.logits[0]
        return logits

    def read_after(self, page: KvPage | None, tokens: Sequence[int]) -> torch.Tensor:
        """Logits ``[T, vocab]`` of `tokens` after the tokens of `page` (a `gate.arms.Runner`)."""
        return self.read(tokens, DynamicCache() if page is None else cache_of_page(page))

    def extend(self, page: KvPage | None, tokens: Sequence[int]) -> tuple[KvPage, torch.Tensor]:
        """Cache of `tokens` alone, read after `page`, and their logits (`gate.handoff.Speaker`)."""
        cache = DynamicCache() if page is None else cache_of_page(page)
        logits = self.read(tokens, cache)
        return page_of_cache(cache, 0 if page is None else page.keys.shape[1]), logits

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
    return LoadedModel(model.to(device).eval().requires_grad_(False), tokenizer, description)
