"""Maps between fine-tunes of one base: the source's cache, corrected as far as it pays.

``y = x_l + (x_l D) W + b`` for each layer and component, of models with one geometry. The ridge
solution for ``y - x_l`` is reduced to the smallest rank whose R^2 on held-out sequences is within
`TOLERANCE` of the best one; a layer that the fine-tune left alone gets no correction at all.
Position 0, by far the largest row, would be most of that variance, and is no row (`first_token`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore_xfer.fit.accumulate import (
    FitOptions,
    later_pairs,
    require_memory,
    require_options,
    require_rank,
    require_split,
    split_of,
    weight_dtype,
)
from kvstore_xfer.fit.first_token import FirstToken
from kvstore_xfer.fit.moments import Moments
from kvstore_xfer.fit.select import RIDGES, Choice
from kvstore_xfer.fit.solve import Affine, r_squared, solve_ridge
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads

if TYPE_CHECKING:
    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.models.description import ModelDescription

TOLERANCE = 0.002
_COMPONENTS = ("keys", "values")


class ResidualAccumulator:
    """Streams caches into moments of each layer against its own difference.

    Raises ModelError and ConfigError as `Accumulator` does, and ConfigError when the models are not
    of one geometry.
    """

    def __init__(
        self,
        source: ModelDescription,
        target: ModelDescription,
        options: FitOptions,
        device: str = "cpu",
    ) -> None:
        require_options(source, target, options)
        self._source, self._target, self._options = source, target, options
        widths = [source.kv_heads * width for width in (source.key_dim, source.value_dim)]
        require_rank(options.rank, min(widths))
        needed = 4 * sum(Moments.bytes_needed(source.layers, w, w) for w in widths)
        require_memory(needed, device)
        self.moments = {
            f"{name}.{split}": Moments.zero(source.layers, width, width, device=device)
            for name, width in zip(_COMPONENTS, widths, strict=True)
            for split in ("fitted", "held_out")
        }
        self._first = FirstToken(target, device)
        self.moments |= self._first.moments

    def add(self, index: int, source: KvPage, target: KvPage) -> None:
        """Add one sequence."""
        models = ((self._source, source), (self._target, target))
        pairs = later_pairs(index, *models, self._first)
        for name, (inputs, outputs) in pairs.items():
            x, y = inputs.double(), outputs.double()
            self.moments[f"{name}.{split_of(index)}"].update(x.flatten(2), (y - x).flatten(2))

    def finish(self) -> tuple[Mapper, Choice]:
        """Pick ridge and rank of every layer, solve, assemble the mapper."""
        require_split(self.moments["keys.fitted"].rows, self.moments["keys.held_out"].rows)
        maps, ridges, scores = [], [], []
        for name in _COMPONENTS:
            solved = [self._solve(name, layer) for layer in range(self._source.layers)]
            maps.append(tuple(layer for layer, _, _ in solved))
            ridges.append(tuple(ridge for _, ridge, _ in solved))
            scores.append(tuple(score for _, _, score in solved))
        source, target = self._source, self._target
        heads = assign_heads(source.kv_heads, target.kv_heads)
        mapper = Mapper(Method.RESIDUAL, source, target, heads, maps[0], maps[1])
        mapper.validate()
        if any(layer.weight.numel() or layer.bias.any() for layer in (*maps[0], *maps[1])):
            mapper = self._first.give(mapper)  # what nothing was changed in stays a plain copy
        layers = tuple((layer,) for layer in range(source.layers))
        return mapper, Choice(layers, tuple(ridges), tuple(scores))

    def _solve(self, name: str, layer: int) -> tuple[LayerMap, float, float]:
        """The map, its ridge and its held-out R^2 (of the target, not of the difference)."""
        fitted = _one(self.moments[f"{name}.fitted"], layer)
        held_out = _one(self.moments[f"{name}.held_out"], layer)
        columns = torch.arange(fitted.mean_x.shape[1])
        share = _share_of_difference(held_out)
        given = self._options.ridge

        def score(affine: Affine) -> float:
            return 1 - share * (1 - float(r_squared(affine, held_out, columns, columns)))

        ridges = RIDGES if given is None else (given,)
        ridge = max(ridges, key=lambda rho: score(solve_ridge(fitted, columns, columns, rho)))
        full = solve_ridge(fitted, columns, columns, ridge)
        tried = {rank: score(_reduced(full, fitted, rank)) for rank in self._ranks(len(columns))}
        untouched = score(Affine(torch.zeros_like(full.weight), torch.zeros_like(full.bias)))
        enough = max(*tried.values(), untouched) - TOLERANCE
        rank = next((rank for rank, reached in tried.items() if reached >= enough), 0)
        everything = fitted.plus(held_out)
        affine = _reduced(solve_ridge(everything, columns, columns, ridge), everything, rank)
        if self._options.rank is None and untouched >= enough:
            rank, affine = 0, Affine(torch.zeros_like(full.weight), torch.zeros_like(full.bias))
            tried = {0: untouched}
        return self._map(layer, affine, rank), ridge, tried[rank]

    def _ranks(self, width: int) -> list[int]:
        if self._options.rank is not None:
            return [self._options.rank]
        return [0, *(2**n for n in range(width.bit_length()) if 2**n < width), width]

    def _map(self, layer: int, affine: Affine, rank: int) -> LayerMap:
        left, strengths, right = torch.linalg.svd(affine.weight[0])
        root = strengths[:rank].sqrt()
        down, up = left[:, :rank] * root, root[:, None] * right[:rank]
        return LayerMap(
            (layer,),
            up.to("cpu", weight_dtype(up)),
            affine.bias.view(self._target.kv_heads, -1).to("cpu", torch.float32),
            (down.to("cpu", weight_dtype(down)),),
        )


def _one(moments: Moments, group: int) -> Moments:
    """The moments of one group."""
    cut = slice(group, group + 1)
    names = ("mean_x", "mean_y", "xx", "xy", "yy", "squares")
    return Moments(moments.rows, **{name: getattr(moments, name)[cut] for name in names})


def _share_of_difference(moments: Moments) -> float:
    """Variance of target minus source, as a share of the target's variance."""
    target = moments.xx.diagonal(dim1=1, dim2=2) + 2 * moments.xy.diagonal(dim1=1, dim2=2)
    return float(moments.yy.sum() / (target + moments.yy).sum().clamp_min(1e-300))


def _reduced(affine: Affine, moments: Moments, rank: int) -> Affine:
    """The best approximation of rank `rank` in the norm of the inputs, and its bias."""
    image = affine.weight[0].T @ moments.xx[0] @ affine.weight[0]
    vectors = torch.linalg.eigh(image).eigenvectors[:, max(0, len(image) - rank) :]
    weight = affine.weight @ vectors @ vectors.T
    return Affine(weight, moments.mean_y - torch.bmm(moments.mean_x[:, None], weight)[:, 0])
