"""The mapped cache beside the target's own: which layer, head and source it really resembles.

Quality is not judged here: that is for the attention output and the arms. This finds maps that are
in the wrong place (layers or heads exchanged), that copy their source, or that give the same for
every token, and says so, where the arms could only say that the mapper is bad.

All sums are streamed over passages; keys are compared without RoPE.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvstore_xfer.fit.moments import Moments
from kvstore_xfer.fit.solve import r_squared, solve_ridge
from kvstore_xfer.gate.arms import converted
from kvstore_xfer.mapper.maps import assign_heads
from kvstore_xfer.rope.rotate import rope_tables, strip_rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.gate.arms import Runner
    from kvstore_xfer.mapper.convert import Converter
    from kvstore_xfer.models.description import ModelDescription

COMPONENTS = ("keys", "values")
_PASSAGES = 16
_PROBE_RIDGE = 1e-3
_CONSTANT = 1e-6  # share of the target's variance below which a head does not depend on its input
_COPY = 1e-3  # relative squared distance to a source layer below which a layer is a copy of it
_MARGIN = 0.1  # in correlation: how much more another layer or head must be resembled


@dataclass(frozen=True)
class Structure:
    """Per component (keys, values): how the mapped cache compares with the target's own.

    Attributes
    ----------
    r2
        Explained share of the target's variance, per target layer.
    layer_r2
        Held-out R^2 of one source layer alone for one target layer, ``[L_t][L_s]``; what the two
        models have in common, whatever the mapper does with it.
    flaw
        What is structurally wrong, empty when nothing is.
    """

    r2: dict[str, list[float]]
    layer_r2: dict[str, list[list[float]]]
    flaw: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_caches(
    source: Runner, target: Runner, converter: Converter, passages: Sequence[TokenSequence]
) -> Structure:
    """Convert whole passages (at most 16) and compare with the target's own cache of them."""
    few = passages[:: max(1, len(passages) // _PASSAGES)][:_PASSAGES]
    documents = sorted({passage.document for passage in few})
    sums = {name: _Sums() for name in COMPONENTS}
    probes = {name: _Probe(source.description, target.description, name) for name in COMPONENTS}
    for passage in few:
        given, own = source.capture(passage.tokens), target.capture(passage.tokens)
        mapped = converted(converter, given, target.description)
        parts = [
            _components(page, model)
            for page, model in (
                (given, source.description),
                (own, target.description),
                (mapped, target.description),
            )
        ]
        fitted = documents.index(passage.document) % 2 == 0
        for name, given_part, own_part, mapped_part in zip(COMPONENTS, *parts, strict=True):
            sums[name].add(given_part, own_part, mapped_part)
            probes[name].add(given_part, own_part, fitted=fitted)
    return Structure(
        {name: [round(x, 5) for x in sums[name].r2().tolist()] for name in COMPONENTS},
        {name: probes[name].r2() for name in COMPONENTS},
        next((flaw for name in COMPONENTS if (flaw := sums[name].flaw(name))), ""),
    )


def _components(page: KvPage, model: ModelDescription) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys without RoPE and values, ``[L, T, H, d]`` float64 on the CPU, behind position 0.

    The first token is far from all others in trained models, and would decide every sum.
    """
    keys = page.keys.cpu()
    if model.rope is not None:
        keys = strip_rope(keys, model.rope, *rope_tables(model.rope, torch.arange(keys.shape[1])))
    return keys[:, 1:].double(), page.values[:, 1:].cpu().double()


class _Sums:
    """Second moments of mapped (x), target (y) and source (s) caches, over the tokens given."""

    def __init__(self) -> None:
        self._rows = 0
        self._total: dict[str, torch.Tensor] = {}

    def add(self, s: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add one passage: ``[L_s, T, H_s, d_s]`` and twice ``[L_t, T, H_t, d_t]``."""
        self._rows += x.shape[1]
        new = {
            "x": x.sum(1),
            "y": y.sum(1),
            "xx": x.square().sum((1, 3)),
            "yy": y.square().sum((1, 3)),
            "xy": torch.einsum("lthd,mthd->lmh", x, y),
            "gh": torch.einsum("ltgd,lthd->lgh", x, y),
        }
        if s.shape[3] == x.shape[3]:
            s = s[:, :, list(assign_heads(s.shape[2], x.shape[2]))]
            new["xs"] = torch.einsum("lthd,mthd->lm", x, s)
            new["ss"] = s.square().sum((1, 2, 3))
        for name, value in new.items():
            self._total[name] = self._total[name] + value if name in self._total else value

    def r2(self) -> torch.Tensor:
        """``[L]``; 1 - error / variance."""
        t, matched = self._total, self._total["gh"].diagonal(dim1=1, dim2=2)
        error = (t["xx"] + t["yy"] - 2 * matched).sum(1)
        return 1 - error / self._variance("y").sum(1)

    def flaw(self, name: str) -> str:
        """The first thing that is structurally wrong with the maps of this component."""
        finite = all(value.isfinite().all() for value in self._total.values())
        if not finite:
            return f"structure.{name}: the mapped cache holds values that are not numbers"
        return self._constant(name) or self._copy(name) or self._layers(name) or self._heads(name)

    def _variance(self, which: str) -> torch.Tensor:
        """Centred sum of squares per layer and head, ``[L, H]``."""
        mean_part = self._total[which].square().sum(2) / self._rows
        return (self._total[which * 2] - mean_part).clamp_min(0)

    def _constant(self, name: str) -> str:
        share = self._variance("x") / self._variance("y")
        layer, head = divmod(int(share.argmin()), share.shape[1])
        if share[layer, head] > _CONSTANT:
            return ""
        return f"structure.{name}: layer {layer} head {head} is mapped to the same for every token"

    def _copy(self, name: str) -> str:
        """A copied layer is right only where it explains the target, as between fine-tunes."""
        if "xs" not in self._total:
            return ""
        square = self._total["xx"].sum(1)
        distance = square[:, None] - 2 * self._total["xs"] + self._total["ss"][None]
        copied = (distance / square[:, None]).amin(1) < _COPY
        bad = (copied & (self.r2() <= 0)).nonzero().flatten().tolist()
        if not bad:
            return ""
        return (
            f"structure.{name}: layer {bad[0]} is a copy of the source's, which explains nothing "
            f"of the target's (R^2 {float(self.r2()[bad[0]]):.2f})"
        )

    def _layers(self, name: str) -> str:
        cross = self._total["xy"].sum(2)
        cross = cross - torch.einsum("lhd,mhd->lm", self._total["x"], self._total["y"]) / self._rows
        norms = (self._variance("x").sum(1)[:, None] * self._variance("y").sum(1)[None]).sqrt()
        worst = _displaced((cross / norms)[None])
        if worst is None:
            return ""
        _, layer, other, own, theirs = worst
        return (
            f"structure.{name}: mapped layer {layer} resembles the target's layer {other} "
            f"(correlation {theirs:.2f}) more than its own ({own:.2f}); layers are exchanged"
        )

    def _heads(self, name: str) -> str:
        cross = self._total["gh"]
        cross = (
            cross - torch.einsum("lgd,lhd->lgh", self._total["x"], self._total["y"]) / self._rows
        )
        norms = (self._variance("x")[:, :, None] * self._variance("y")[:, None]).sqrt()
        worst = _displaced(cross / norms)
        if worst is None:
            return ""
        layer, head, other, own, theirs = worst
        return (
            f"structure.{name}: in layer {layer} mapped head {head} resembles the target's head "
            f"{other} (correlation {theirs:.2f}) more than its own ({own:.2f}); heads are exchanged"
        )


def _displaced(correlation: torch.Tensor) -> tuple[int, int, int, float, float] | None:
    """Where in ``[B, N, N]`` another entry beats the diagonal most, if by more than the margin."""
    own = correlation.diagonal(dim1=1, dim2=2)
    best, place = correlation.max(2)
    index = int((best - own).flatten().argmax())
    batch, row = divmod(index, own.shape[1])
    if not best[batch, row] > own[batch, row] + _MARGIN:
        return None
    other = int(place[batch, row])
    return batch, row, other, float(own[batch, row]), float(best[batch, row])


class _Probe:
    """Least-squares probes from each source layer alone, on the documents of one half.

    Head-matched and without the row weights of a real fit (arXiv 2608.03893).
    """

    def __init__(self, source: ModelDescription, target: ModelDescription, name: str) -> None:
        self._heads = list(assign_heads(source.kv_heads, target.kv_heads))
        self._layers = target.layers
        p, q = (
            (source.key_dim, target.key_dim)
            if name == "keys"
            else (source.value_dim, target.value_dim)
        )
        self._width = q
        self._moments = [
            [Moments.zero(target.kv_heads, p, target.layers * q) for _ in range(2)]
            for _ in range(source.layers)
        ]

    def add(self, s: torch.Tensor, y: torch.Tensor, *, fitted: bool) -> None:
        outputs = y.permute(2, 1, 0, 3).flatten(2)
        for layer, moments in zip(s[:, :, self._heads], self._moments, strict=True):
            moments[fitted].update(layer.transpose(0, 1), outputs)

    def r2(self) -> list[list[float]]:
        """``[L_t][L_s]``, mean over heads, on the documents of the other half."""
        rows: list[list[float]] = [[] for _ in range(self._layers)]
        for held_out, fitted in self._moments:
            inputs = torch.arange(fitted.xx.shape[1])
            probe = solve_ridge(fitted, inputs, torch.arange(fitted.yy.shape[1]), _PROBE_RIDGE)
            for target, row in enumerate(rows):
                columns = torch.arange(target * self._width, (target + 1) * self._width)
                part = type(probe)(probe.weight[:, :, columns], probe.bias[:, columns])
                row.append(round(float(r_squared(part, held_out, inputs, columns).mean()), 4))
        return rows
