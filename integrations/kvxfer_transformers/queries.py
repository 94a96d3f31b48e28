"""The queries of a model's attention, whatever its architecture computes them from."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstore_xfer.rope.rotate import rope_tables, strip_rope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.blocks.page import KvPage
    from kvxfer_transformers.model import LoadedModel

_NAME = "kvxfer_recorded"
_BASE = "sdpa"


def capture_queries(
    loaded: LoadedModel, page: KvPage | None, tokens: Sequence[int]
) -> torch.Tensor:
    """Position-free, scaled queries ``[L, T, query_heads, key_dim]`` (float32) of `tokens`.

    They are read after the cache that `page` holds. Rotated to a position and multiplied with
    rotated keys they give attention logits: the model's own scaling is in them.
    """
    rope = loaded.description.rope
    if rope is None:
        raise ValueError(f"{loaded.description.name}: its RoPE is not supported")
    with recording(loaded.model) as recorded:
        loaded.read_after(page, tokens)
    first = 0 if page is None else page.keys.shape[1]
    tables = rope_tables(rope, torch.arange(first, first + len(tokens)))
    layers = [
        strip_rope(query[0].transpose(0, 1).cpu(), rope, *tables) * scaling
        for query, scaling in recorded
    ]
    return torch.stack(layers)


@contextmanager
def recording(model: Any) -> Iterator[list[tuple[torch.Tensor, float]]]:
    """Queries ``[1, H, T, D]`` and scaling of each layer's call, in order."""
    recorded: list[tuple[torch.Tensor, float]] = []

    def attend(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("scaling")
        recorded.append((query, query.shape[-1] ** -0.5 if scaling is None else float(scaling)))
        return ALL_ATTENTION_FUNCTIONS[_BASE](module, query, *args, **kwargs)

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[_BASE])
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield recorded
    finally:
        model.set_attn_implementation(before)
