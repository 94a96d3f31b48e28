"""From what can be seen of a converted cache in production to what it costs.

In production nobody knows the loss that converted blocks would have caused, but the blocks that
the target computed itself can be compared with the converted ones. What is compared is the
attention output of stored probe queries over windows of the prefix: across mappers its cosine goes
with retention where R^2 does not (arXiv 2608.03893). A cosine does not see that an output is too
large or too small, so the likeness 2ab / (aa + bb) is taken, which is the cosine where a and b are
equally long; and a layer that is lost would drown in a mean over all, so the worst one counts. At
gate time likeness and loss are known, for the mapper and for caches that are made worse step by
step, so a relation is fitted from one to the other:

    loss increase, nats a token = b1 x + b2 x^2,    x = 1 - likeness of the worst layer

with b >= 0, and resampled over passages, so that an estimate carries its uncertainty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.gate.score import Interval, score_passage
from kvstore_xfer.rope.rotate import apply_rope, rope_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.gate.arms import Runner
    from kvstore_xfer.mapper.convert import Converter
    from kvstore_xfer.rope.spec import RopeSpec

    Queries = Callable[[KvPage | None, Sequence[int]], torch.Tensor]

WINDOW_TOKENS = 64
SINK_TOKENS = 4  # attention to a sequence's first tokens says nothing about the others
LEAST_TOKENS = SINK_TOKENS + WINDOW_TOKENS // 2  # of a prefix from its start
PROBES = 16
PASSAGES = 16
# How far the mapped cache is moved towards that of a wrong document, to see what worse ones cost.
BLENDS = (0.0, 0.25, 0.5, 1.0)
DRAWS = 200
MIN_SAMPLES = 8
# Twice the loss that the gate may have seen is no longer what was accepted.
_ALLOWED_FACTOR = 2.0
_SEED = 20_260_801


@dataclass(frozen=True)
class Relation:
    """`draws` ``[DRAWS, 2]`` are resampled coefficients; `threshold` the default least retention.

    `at_gate` are the x of the honest mapper on the gate's passages.
    """

    draws: tuple[tuple[float, float], ...]
    at_gate: tuple[float, ...]
    threshold: float

    def estimate(self, samples: Sequence[float]) -> Interval:
        """Retention of traffic whose sampled prefixes have these x, with its 95 % interval."""
        x = np.asarray(samples, dtype=np.float64)
        b = np.asarray(self.draws)
        drawn = np.random.default_rng(_SEED).integers(0, len(x), size=(len(b), len(x)))
        losses = _loss(b[:, :1], b[:, 1:], x[drawn]).mean(1)
        middle = float(_loss(b[:, :1], b[:, 1:], x[None, :]).mean())
        low, high = np.quantile(np.exp(-losses), (0.025, 0.975))
        return Interval(math.exp(-middle), float(low), float(high))


def _loss(
    b1: NDArray[np.float64], b2: NDArray[np.float64], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    loss: NDArray[np.float64] = b1 * x + b2 * x * x
    return loss


@dataclass(frozen=True)
class Comparison:
    """Converted against native blocks, per layer ``[L]``: attention outputs by cosine and by
    likeness, and relative errors."""

    cosines: torch.Tensor
    likeness: torch.Tensor
    key_errors: torch.Tensor
    value_errors: torch.Tensor

    @property
    def x(self) -> float:
        return float(1 - self.likeness.min())


def compare(
    native: KvPage, mapped: KvPage, probes: torch.Tensor, rope: RopeSpec, first_token: int
) -> Comparison | None:
    """Compare the caches of one run of tokens; None when it is shorter than half a window.

    Parameters
    ----------
    native, mapped
        ``[L, T, H, D]`` of the same tokens and heads; the first stands at position `first_token`.
    probes
        Position-free scaled queries ``[L, H, P, D]``.
    """
    tokens = native.keys.shape[1]
    starts = range(max(0, SINK_TOKENS - first_token), tokens, WINDOW_TOKENS)
    windows = [(s, min(s + WINDOW_TOKENS, tokens)) for s in starts]
    windows = [(s, e) for s, e in windows if e - s >= WINDOW_TOKENS // 2]
    if not windows:
        return None
    layers = range(native.keys.shape[0])
    cosines, likeness = torch.stack(
        [
            torch.stack(
                [
                    _outputs(native.cut(*w), mapped.cut(*w), probes[i], rope, first_token + w[1], i)
                    for w in windows
                ]
            ).mean(0)
            for i in layers
        ],
        dim=1,
    ).nan_to_num(0.0)
    keys, values = (
        torch.stack([_relative_error(a[i], b[i]) for i in layers])
        for a, b in ((native.keys, mapped.keys), (native.values, mapped.values))
    )
    return Comparison(cosines, likeness, keys, values)


def _outputs(
    native: KvPage, mapped: KvPage, probes: torch.Tensor, rope: RopeSpec, position: int, layer: int
) -> torch.Tensor:
    """Cosine and likeness ``[2]``, means over heads and probes, queries standing at `position`."""
    tables = rope_tables(rope, torch.full((probes.shape[1],), position))
    queries = apply_rope(probes.transpose(0, 1), rope, *tables)  # [P, H, D]
    own, other = (
        _attend(queries, page.keys[layer], page.values[layer]) for page in (native, mapped)
    )
    cosine = torch.nn.functional.cosine_similarity(own, other, dim=-1)
    likeness = 2 * (own * other).sum(-1) / (own.square() + other.square()).sum(-1)
    return torch.stack([cosine.mean(), likeness.mean()])


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    logits = torch.einsum("phd,thd->hpt", queries, keys.float())
    outputs: torch.Tensor = torch.einsum("hpt,thd->hpd", logits.softmax(-1), values.float())
    return outputs


def _relative_error(native: torch.Tensor, mapped: torch.Tensor) -> torch.Tensor:
    size = torch.linalg.vector_norm(native.float()).clamp_min(1e-12)
    error: torch.Tensor = torch.linalg.vector_norm(mapped.float() - native.float()) / size
    return error


@torch.inference_mode()
def make_probes(
    target: Runner, queries: Queries, passages: Sequence[TokenSequence], prefix: int
) -> torch.Tensor:
    """Probe queries ``[L, kv_heads, PROBES, D]``, fp16, of tokens after the prefix."""
    model = target.description
    chosen = passages[: min(len(passages), PROBES)]
    each = -(-PROBES // len(chosen))
    parts: list[torch.Tensor] = []
    for passage in chosen:
        seen = queries(target.capture(passage.tokens[:prefix]), passage.tokens[prefix:])
        places = torch.linspace(0, seen.shape[1] - 1, each).long()
        layers, _, query_heads, width = seen.shape
        group = query_heads // model.kv_heads
        grouped = seen[:, places].reshape(layers, each, model.kv_heads, group, width)
        for place in range(each):  # another query head of each group every time
            parts.append(grouped[:, place, :, len(parts) % group])
    return torch.stack(parts[:PROBES], dim=2).half().contiguous()


@torch.inference_mode()
def fit_relation(
    source: Runner,
    target: Runner,
    converter: Converter,
    passages: Sequence[TokenSequence],
    prefix: int,
    probes: torch.Tensor,
    progress: Callable[[int, int], None] = lambda done, total: None,
    hold_back: int = 0,
) -> Relation:
    """Fit the relation on `PASSAGES` held-out passages, `prefix` tokens from a cache.

    With `hold_back` the loss is what is lost by blocks that are converted up to there only, as in
    `gate.arms`.
    """
    chosen, cut = passages[:PASSAGES], prefix - hold_back
    rows = np.empty((len(chosen), len(BLENDS), 2))
    cache = _mapped(source, target, converter, chosen[-1].tokens[:cut])
    for number, passage in enumerate(chosen):
        wrong = cache
        cache = _mapped(source, target, converter, passage.tokens[:cut])
        rows[number] = _passage_rows(target, passage, prefix, cache, wrong, probes)
        progress(number + 1, len(chosen))
    return _relation(rows)


def _passage_rows(
    target: Runner,
    passage: TokenSequence,
    prefix: int,
    cache: KvPage,
    wrong: KvPage,
    probes: torch.Tensor,
) -> list[tuple[float, float]]:
    """x and loss increase of every blend; `prefix` tokens or fewer are in `cache` and `wrong`."""
    cut = cache.keys.shape[1]
    tail, own = passage.tokens[prefix:], target.capture(passage.tokens[:prefix])
    device, rope = own.keys.device, target.description.rope
    native = target.read_after(own, tail)
    following = torch.tensor(tail[1:], device=native.device)
    own_loss = score_passage(native, native, following).loss
    host = KvPage(own.keys.cpu(), own.values.cpu()).cut(0, cut)
    rows = []
    for blend in BLENDS:
        page = KvPage(
            torch.lerp(cache.keys, wrong.keys, blend), torch.lerp(cache.values, wrong.values, blend)
        )
        seen = None if rope is None else compare(host, page, probes.float(), rope, 0)
        if seen is None:
            raise ValueError(f"a prefix of {cut} tokens is too short for a relation")
        moved = KvPage(page.keys.to(device), page.values.to(device))
        logits = target.read_after(moved, passage.tokens[cut:])[prefix - cut :]
        rows.append((seen.x, score_passage(logits, native, following).loss - own_loss))
    return rows


def _mapped(source: Runner, target: Runner, converter: Converter, tokens: Sequence[int]) -> KvPage:
    cache, model = source.capture(tokens), target.description
    shape = (model.layers, len(tokens), model.kv_heads)
    keys = torch.empty(*shape, model.key_dim, dtype=target.dtype)
    page = KvPage(keys, torch.empty(*shape, model.value_dim, dtype=target.dtype))
    converter.convert([KvPage(cache.keys.cpu(), cache.values.cpu())], [0], [page])
    return page


def _relation(rows: NDArray[np.float64]) -> Relation:
    """From x and loss increase, ``[passages, blends, 2]``."""
    drawn = np.random.default_rng(_SEED).integers(0, len(rows), size=(DRAWS, len(rows)))
    draws = [_solve(rows[index].reshape(-1, 2)) for index in drawn]
    at_gate = tuple(float(x) for x in rows[:, 0, 0])
    low = Relation(tuple(draws), at_gate, 0.0).estimate(at_gate[:MIN_SAMPLES]).low
    return Relation(tuple(draws), at_gate, low**_ALLOWED_FACTOR)


def _solve(points: NDArray[np.float64]) -> tuple[float, float]:
    """Least squares with coefficients that are not negative: of two, one may have to go."""
    x, y = points.T
    columns = np.stack([x, x * x], axis=1)
    b1, b2 = np.linalg.lstsq(columns, y, rcond=None)[0]
    if b1 >= 0 and b2 >= 0:
        return float(b1), float(b2)
    alone = [max(0.0, float(c @ y / (c @ c))) for c in columns.T]
    errors = [float(((y - b * c) ** 2).sum()) for b, c in zip(alone, columns.T, strict=True)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
