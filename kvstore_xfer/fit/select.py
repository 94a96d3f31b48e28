"""Choice of source layers, of their number k, and of the ridge, on sequences held out of the fit.

Ranking: for every (source layer, target layer) a single-layer probe; its held-out R^2 is averaged
over heads and over keys and values, and the k best source layers are concatenated (arXiv
2608.03893). k and the relative ridge are those with the best held-out R^2: in-sample R^2 would rank
them backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.fit.solve import r_squared, solve_ridge

if TYPE_CHECKING:
    from kvstore_xfer.fit.moments import Moments

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2)
PROBE_RIDGE = 1e-3
MAX_AUTO_INPUTS = 4096  # the widest input that 'auto' tries: beyond, mapping costs a prefill


@dataclass(frozen=True)
class Component:
    """Moments of keys or of values, on fitted and on held-out sequences.

    Input columns are `source_width` wide per source layer, outputs `target_width` per target layer.
    """

    fitted: Moments
    held_out: Moments
    source_width: int
    target_width: int

    def inputs(self, layers: tuple[int, ...]) -> torch.Tensor:
        return _columns(layers, self.source_width)

    def outputs(self, layer: int) -> torch.Tensor:
        return _columns((layer,), self.target_width)


@dataclass(frozen=True)
class Choice:
    """What was picked, with the held-out R^2 (mean over heads) that it reached.

    `layers` holds source layers per target layer; `ridges` and `scores` have one row per component
    and one entry per target layer.
    """

    layers: tuple[tuple[int, ...], ...]
    ridges: tuple[tuple[float, ...], ...]
    scores: tuple[tuple[float, ...], ...]

    @property
    def mean_score(self) -> float:
        return sum(sum(row) for row in self.scores) / sum(len(row) for row in self.scores)


def rank_layers(
    components: tuple[Component, ...], source_layers: int, target_layers: int
) -> torch.Tensor:
    """Held-out R^2 of the single-layer probes, ``[target_layers, source_layers]``."""
    scores = torch.zeros(target_layers, source_layers, dtype=torch.float64)
    for source in range(source_layers):
        for component in components:
            columns = component.inputs((source,))
            everything = torch.arange(component.fitted.yy.shape[1])
            probe = solve_ridge(component.fitted, columns, everything, PROBE_RIDGE)
            for target in range(target_layers):
                outputs = component.outputs(target)
                part = type(probe)(probe.weight[:, :, outputs], probe.bias[:, outputs])
                score = r_squared(part, component.held_out, columns, outputs).mean()
                scores[target, source] += score / len(components)
    return scores


def choose(
    components: tuple[Component, ...],
    ranking: torch.Tensor,
    *,
    layers: int | None,
    ridge: float | None,
) -> Choice:
    """Pick k source layers per target layer and a ridge per target layer and component.

    `layers` or `ridge` given as numbers are taken as they are; None means: the best on held-out
    sequences, where k may not make the input wider than `MAX_AUTO_INPUTS`.
    """
    order = ranking.argsort(dim=1, descending=True)
    counts = _counts(order.shape[1], components[0].source_width) if layers is None else [layers]
    ridges = RIDGES if ridge is None else (ridge,)
    choices = [_choose_ridges(components, order[:, :count], ridges) for count in counts]
    return max(choices, key=lambda choice: choice.mean_score)


def _counts(source_layers: int, width: int) -> list[int]:
    ladder = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, source_layers)
    widest = max(1, min(source_layers, MAX_AUTO_INPUTS // width))
    return sorted({count for count in ladder if count <= widest} | {widest})


def _choose_ridges(
    components: tuple[Component, ...], order: torch.Tensor, ridges: tuple[float, ...]
) -> Choice:
    layers = tuple(tuple(sorted(row)) for row in order.tolist())
    picked, scores = [], []
    for component in components:
        best = [_best_ridge(component, target, row, ridges) for target, row in enumerate(layers)]
        picked.append(tuple(ridge for ridge, _ in best))
        scores.append(tuple(score for _, score in best))
    return Choice(layers, tuple(picked), tuple(scores))


def _best_ridge(
    component: Component, target: int, layers: tuple[int, ...], ridges: tuple[float, ...]
) -> tuple[float, float]:
    inputs, outputs = component.inputs(layers), component.outputs(target)

    def score(ridge: float) -> float:
        affine = solve_ridge(component.fitted, inputs, outputs, ridge)
        return float(r_squared(affine, component.held_out, inputs, outputs).mean())

    return max(((ridge, score(ridge)) for ridge in ridges), key=lambda pair: pair[1])


def _columns(layers: tuple[int, ...], width: int) -> torch.Tensor:
    return (torch.tensor(layers)[:, None] * width + torch.arange(width)).flatten()
