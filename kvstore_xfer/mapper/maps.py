"""The fitted maps of one ordered pair, in memory.

Keys are mapped without RoPE, values as they are. The input of target layer l is the concatenation
of the selected source layers, in the order of ``source_layers``.

- head-local: ``y = x W + b`` with, for every source layer, the ``d_s`` numbers of the one source
  head that `head_assignment` gives: ``W`` is ``[H_t, k * d_s, d_t]`` (CacheBridge, arXiv
  2609.00891).
- full-head: ``y = x W + b`` with all source heads, ``H_s * d_s`` numbers a layer: ``W`` is
  ``[k * H_s * d_s, H_t * d_t]`` (arXiv 2608.03893).
- low-rank: ``y = (x E) W + b``. x is the keys of the source layers, then their values, all heads;
  the encoder ``E`` ``[k * H_s * (dk_s + dv_s), r]`` is shared by all layers, heads and both
  components, ``W`` is ``[r, H_t * d_t]``.
- residual, for models of one geometry: ``y = x_l + (x_l D) W + b``, D ``[H_s * d_s, r]`` and W
  ``[r, H_t * d_t]``; r may be 0, which leaves the identity (and b).
- low-rank-residual, for models of one geometry: ``y = x_l + (x E) W + b``, the rest as low-rank.
- mlp: per target head two hidden layers with ReLU over the input of a head-local map (arXiv
  2608.03893).

Position 0 may be an exception: the same numbers for every text, `LayerMap.first`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from kvstore_xfer.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from kvstore_xfer.models.description import ModelDescription


class Method(str, Enum):
    HEAD_LOCAL = "head-local"
    FULL_HEAD = "full-head"
    LOW_RANK = "low-rank"
    RESIDUAL = "residual"
    LOW_RANK_RESIDUAL = "low-rank-residual"
    MLP = "mlp"

    @property
    def affine(self) -> bool:
        """One product per target layer, which the kernels know."""
        return self in (Method.HEAD_LOCAL, Method.FULL_HEAD)

    @property
    def encoded(self) -> bool:
        """All layers, heads and both components are decoded from one code."""
        return self in (Method.LOW_RANK, Method.LOW_RANK_RESIDUAL)

    @property
    def residual(self) -> bool:
        """Added to the source's own layer and head of the same place."""
        return self in (Method.RESIDUAL, Method.LOW_RANK_RESIDUAL)

    @property
    def per_head(self) -> bool:
        """Each target head reads one source head, so that a rank needs only its own."""
        return self in (Method.HEAD_LOCAL, Method.MLP)


@dataclass(frozen=True)
class LayerMap:
    """The map into one component of one target layer.

    `weight` is bf16, fp16 or fp32 with the shape the module docstring gives; `bias` is fp32
    ``[H_t, d_t]``. `before` holds what is applied first: residual ``(D,)``, mlp ``(W_1, b_1, W_2,
    b_2)`` with ``[H_t, p, n]``, ``[H_t, n]``, ``[H_t, n, n]``, ``[H_t, n]``, else nothing.
    `first` is what stands at position 0 whatever the source holds, fp32 ``[H_t, d_t]``, keys
    without RoPE; None if position 0 is mapped like the others.
    """

    source_layers: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor
    before: tuple[torch.Tensor, ...] = ()
    first: torch.Tensor | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (*self.before, self.weight, self.bias)
        if self.first is not None:
            yield self.first


@dataclass(frozen=True)
class Mapper:
    """All maps of one ordered pair; one `LayerMap` per target layer and component.

    `digest` names these maps: weights, method, layers, head assignment and both fingerprints.
    `encoder` is that of a low-rank mapper, residual or not, else None.
    """

    method: Method
    source: ModelDescription
    target: ModelDescription
    head_assignment: tuple[int, ...]
    keys: tuple[LayerMap, ...]
    values: tuple[LayerMap, ...]
    digest: str = ""
    encoder: torch.Tensor | None = None

    @property
    def parameters(self) -> int:
        maps = (tensor for layer in (*self.keys, *self.values) for tensor in layer.tensors())
        shared = 0 if self.encoder is None else self.encoder.numel()
        return shared + sum(tensor.numel() for tensor in maps)

    @property
    def inputs(self) -> int:
        """Numbers that the widest fitted map reads of a token; 0 where no map reads any."""
        if self.encoder is not None:
            return len(self.encoder)
        firsts = (layer.before or (layer.weight,) for layer in (*self.keys, *self.values))
        return max((first.shape[-2] for first, *_ in firsts if first.numel()), default=0)

    def shard(self, first_head: int, last_head: int) -> Mapper:
        """The maps for target heads ``[first_head, last_head)``; source heads stay whole."""
        cut = slice(first_head, last_head)
        heads = self.target.kv_heads

        def narrow(layer: LayerMap) -> LayerMap:
            first = None if layer.first is None else layer.first[cut]
            layer = replace(layer, bias=layer.bias[cut], first=first)
            if self.method.per_head:
                before = tuple(tensor[cut] for tensor in layer.before)
                return replace(layer, weight=layer.weight[cut], before=before)
            wide = layer.weight.view(layer.weight.shape[0], heads, layer.bias.shape[1])[:, cut]
            return replace(layer, weight=wide.flatten(1))

        return replace(
            self,
            head_assignment=self.head_assignment[cut],
            keys=tuple(narrow(layer) for layer in self.keys),
            values=tuple(narrow(layer) for layer in self.values),
        )

    def reading_from(self, first_head: int) -> Mapper:
        """The same maps for source pages whose heads start at `first_head` (per-head only)."""
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
        self._validate_shared(heads)
        for name, layers, source_dim, target_dim in components:
            _require(len(layers) == self.target.layers, f"{name} maps do not cover all layers")
            for index, layer in enumerate(layers):
                where = f"{name} map of layer {index}"
                known = all(0 <= s < self.source.layers for s in layer.source_layers)
                _require(known and bool(layer.source_layers), f"{where}: unknown source layer")
                before, weight = self._shapes(layer, source_dim, target_dim)
                found = tuple(tuple(tensor.shape) for tensor in layer.before)
                _require(found == before, f"{where}: shape of what comes before the weight")
                _require(tuple(layer.weight.shape) == weight, f"{where}: shape of the weight")
                _require(tuple(layer.bias.shape) == (heads, target_dim), f"{where}: bias shape")
                alike = (layer.first is None) == (self.keys[0].first is None)
                _require(alike, f"{where}: position 0 is there for some layers only")
                if layer.first is not None:
                    fits = layer.first.shape == layer.bias.shape
                    _require(fits, f"{where}: shape of position 0")

    def _validate_shared(self, heads: int) -> None:
        """What concerns the method as a whole."""
        encoded = self.encoder is not None
        _require(encoded == self.method.encoded, "encoder does not belong to the method")
        if self.encoder is not None:
            read = {layer.source_layers for layer in (*self.keys, *self.values)}
            _require(len(read) == 1, "maps of one encoder read different layers")
            width = self.source.kv_heads * (self.source.key_dim + self.source.value_dim)
            rows = len(read.pop()) * width
            _require(self.encoder.ndim == 2 and len(self.encoder) == rows, "shape of the encoder")
        if self.method.residual:
            _require(same_geometry(self.source, self.target), "residual between other geometries")
            _require(self.head_assignment == tuple(range(heads)), "residual with moved heads")
        if self.method is Method.RESIDUAL:
            for layers in (self.keys, self.values):
                own = all(layer.source_layers == (n,) for n, layer in enumerate(layers))
                _require(own, "residual of another layer")

    def _shapes(
        self, layer: LayerMap, source_dim: int, target_dim: int
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Shapes of `before` and of `weight` that belong to the method."""
        heads, width = self.target.kv_heads, len(layer.source_layers) * source_dim
        everything = width * self.source.kv_heads
        if self.method is Method.HEAD_LOCAL:
            return (), (heads, width, target_dim)
        if self.method is Method.FULL_HEAD:
            return (), (everything, heads * target_dim)
        if self.method.encoded:
            rank = 0 if self.encoder is None else self.encoder.shape[1]
            return (), (rank, heads * target_dim)
        rank = layer.weight.shape[-2] if layer.weight.ndim > 1 else 0
        if self.method is Method.RESIDUAL:
            return ((everything, rank),), (rank, heads * target_dim)
        hidden = ((heads, width, rank), (heads, rank), (heads, rank, rank), (heads, rank))
        return hidden, (heads, rank, target_dim)


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ArtifactError(f"mapper: {complaint}; fit it again")


def assign_heads(source_heads: int, target_heads: int) -> tuple[int, ...]:
    """The source KV head that each target KV head reads: the one at the same relative place.

    Equal counts give the identity, which commutes with tensor-parallel sharding.
    """
    return tuple(head * source_heads // target_heads for head in range(target_heads))


def same_geometry(source: ModelDescription, target: ModelDescription) -> bool:
    """Whether layer l, head h of one can stand for layer l, head h of the other."""
    fields = ("layers", "kv_heads", "key_dim", "value_dim")
    return all(getattr(source, name) == getattr(target, name) for name in fields)
