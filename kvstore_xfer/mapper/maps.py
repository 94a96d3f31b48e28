"""The fitted maps of one ordered pair, in memory.

A map is affine: ``y = x W + b``. Keys are mapped without RoPE, values as they are. The input of
target layer l is the concatenation of the selected source layers, in the order of
``source_layers``; for every one of them

- head-local: the ``d_s`` numbers of the one source head that `head_assignment` gives, so that
  ``W`` is ``[H_t, k * d_s, d_t]`` (CacheBridge, arXiv 2609.00891);
- full-head: all source heads, ``H_s * d_s`` numbers, so that ``W`` is
  ``[k * H_s * d_s, H_t * d_t]`` (arXiv 2608.03893).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from kvstore_xfer.errors import ArtifactError

if TYPE_CHECKING:
    import torch

    from kvstore_xfer.models.description import ModelDescription


class Method(str, Enum):
    HEAD_LOCAL = "head-local"
    FULL_HEAD = "full-head"


@dataclass(frozen=True)
class LayerMap:
    """The affine map into one component of one target layer.

    `weight` is bf16, fp16 or fp32 with the shape the module docstring gives; `bias` is fp32
    ``[H_t, d_t]``.
    """

    source_layers: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class Mapper:
    """All maps of one ordered pair; one `LayerMap` per target layer and component.

    `digest` names these maps: weights, method, layers, head assignment and both fingerprints.
    """

    method: Method
    source: ModelDescription
    target: ModelDescription
    head_assignment: tuple[int, ...]
    keys: tuple[LayerMap, ...]
    values: tuple[LayerMap, ...]
    digest: str = ""

    @property
    def parameters(self) -> int:
        maps = (*self.keys, *self.values)
        return sum(layer.weight.numel() + layer.bias.numel() for layer in maps)

    def shard(self, first_head: int, last_head: int) -> Mapper:
        """The maps for target heads ``[first_head, last_head)``; source heads stay whole."""
        cut = slice(first_head, last_head)
        heads = self.target.kv_heads

        def narrow(layer: LayerMap) -> LayerMap:
            if self.method is Method.HEAD_LOCAL:
                return replace(layer, weight=layer.weight[cut], bias=layer.bias[cut])
            wide = layer.weight.view(layer.weight.shape[0], heads, -1)[:, cut]
            return replace(layer, weight=wide.flatten(1), bias=layer.bias[cut])

        return replace(
            self,
            head_assignment=self.head_assignment[cut],
            keys=tuple(narrow(layer) for layer in self.keys),
            values=tuple(narrow(layer) for layer in self.values),
        )

    def reading_from(self, first_head: int) -> Mapper:
        """The same maps for source pages whose heads start at `first_head` (head-local only)."""
        heads = tuple(head - first_head for head in self.head_assignment)
        return replace(self, head_assignment=heads)

    def validate(self) -> None:
        """Raises ArtifactError when a shape does not follow from the two models."""
        components = (
            ("key", self.keys, self.source.key_dim, self.target.key_dim),
            ("value", self.values, self.source.value_dim, self.target.value_dim),
        )
        heads = self.target.kv_heads
        _require(len(self.head_assignment) == heads, "head_assignment does not cover the target")
        _require(
            all(0 <= head < self.source.kv_heads for head in self.head_assignment),
            "head_assignment names a source head that does not exist",
        )
        for name, layers, source_dim, target_dim in components:
            _require(len(layers) == self.target.layers, f"{name} maps do not cover all layers")
            for index, layer in enumerate(layers):
                where = f"{name} map of layer {index}"
                known = all(0 <= s < self.source.layers for s in layer.source_layers)
                _require(known and bool(layer.source_layers), f"{where}: unknown source layer")
                width = len(layer.source_layers) * source_dim
                if self.method is Method.HEAD_LOCAL:
                    expected: tuple[int, ...] = (heads, width, target_dim)
                else:
                    expected = (width * self.source.kv_heads, heads * target_dim)
                _require(tuple(layer.weight.shape) == expected, f"{where}: shape of the weight")
                _require(tuple(layer.bias.shape) == (heads, target_dim), f"{where}: bias shape")


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ArtifactError(f"mapper: {complaint}; fit it again")


def assign_heads(source_heads: int, target_heads: int) -> tuple[int, ...]:
    """The source KV head that each target KV head reads: the one at the same relative place.

    Equal counts give the identity, which commutes with tensor-parallel sharding.
    """
    return tuple(head * source_heads // target_heads for head in range(target_heads))
