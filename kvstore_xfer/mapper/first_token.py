"""Position 0 of converted blocks, which a mapper may hold as such (`LayerMap.first`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore_xfer.rope.rotate import apply_rope, rope_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.mapper.maps import LayerMap, Mapper


class FirstTokenWriter:
    """Overwrites the token at position 0; does nothing for a mapper that maps it like the rest."""

    def __init__(self, mapper: Mapper) -> None:
        self._keys, self._values = (
            None if layers[0].first is None else torch.stack([_first(layer) for layer in layers])
            for layers in (mapper.keys, mapper.values)
        )
        if self._keys is not None and mapper.target.rope is not None:
            # Position 0 turns nothing, but YaRN's attention factor scales it.
            tables = rope_tables(mapper.target.rope, torch.zeros(1, dtype=torch.long))
            self._keys = apply_rope(self._keys[:, None], mapper.target.rope, *tables)[:, 0]

    def write(self, first_tokens: Sequence[int], targets: Sequence[KvPage]) -> None:
        """Complete converted blocks; `first_tokens` are the positions of their first tokens."""
        if self._keys is None or self._values is None:
            return
        for first, target in zip(first_tokens, targets, strict=True):
            if first == 0:
                target.keys[:, 0].copy_(self._keys)
                target.values[:, 0].copy_(self._values)


def _first(layer: LayerMap) -> torch.Tensor:
    if layer.first is None:
        raise ValueError("a mapper holds position 0 of all its layers or of none")
    return layer.first
