"""The first position, which no map is fitted for: the mapper writes the target's mean instead.

Trained models park attention on the token at position 0 (the attention sink), whose keys and values
are far from all others and, behind the first layers, hardly depend on the token. Left among the
rows, it decides means and Gram matrices that are to serve all other tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore_xfer.fit.moments import Moments

if TYPE_CHECKING:
    import torch

    from kvstore_xfer.mapper.maps import LayerMap, Mapper
    from kvstore_xfer.models.description import ModelDescription


class FirstToken:
    """Streams the target's keys (RoPE stripped) and values at position 0 into their means."""

    def __init__(self, target: ModelDescription, device: str = "cpu") -> None:
        self._heads = target.kv_heads
        heads = target.layers * target.kv_heads
        self.moments = {
            f"first.{name}": Moments.zero(heads, width, 0, device=device)
            for name, width in (("keys", target.key_dim), ("values", target.value_dim))
        }

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add one sequence of the target from its position 0 on, each ``[L, T, H, d]``."""
        for name, part in (("keys", keys), ("values", values)):
            row = part[:, :1].transpose(1, 2).flatten(0, 1)  # [L * H, 1, d]
            self.moments[f"first.{name}"].update(row, row[..., :0])

    def give(self, mapper: Mapper) -> Mapper:
        """The mapper with what has been seen at position 0."""

        def completed(name: str, layers: tuple[LayerMap, ...]) -> tuple[LayerMap, ...]:
            mean = self.moments[f"first.{name}"].mean_x.to("cpu").float()
            rows = mean.view(len(layers), self._heads, -1)
            return tuple(
                replace(layer, first=row.contiguous())
                for layer, row in zip(layers, rows, strict=True)
            )

        mapper = replace(
            mapper,
            keys=completed("keys", mapper.keys),
            values=completed("values", mapper.values),
        )
        mapper.validate()
        return mapper
