"""Hand-offs back and forth: how far do two models drift when each goes on from the other's cache?

The models take turns. The one whose turn it is has its own cache of its own turns, and of the
other's turns what the other's cache converts to: derived blocks are never a source, so errors are
not mapped twice, but each turn is computed on top of all that was converted before it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.gate.arms import Runner, converted
from kvstore_xfer.gate.score import PassageScore, bootstrap, score_passage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.mapper.convert import Converter


class Speaker(Runner, Protocol):
    """A model that can go on from a cache and show what it added to it."""

    def extend(self, page: KvPage | None, tokens: Sequence[int]) -> tuple[KvPage, torch.Tensor]: ...


@dataclass(frozen=True)
class Drift:
    """One turn: who spoke after how many hand-offs, against its own cache of all before it."""

    handoffs: int
    speaker: str
    kl: dict[str, float]
    top1: dict[str, float]
    excess_loss: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_handoffs(
    models: tuple[Speaker, Speaker],
    converters: tuple[Converter, Converter],
    passages: Sequence[TokenSequence],
    turn_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Drift]:
    """Drift after every hand-off. The first model begins; ``converters[m]`` maps from model m.

    All passages are of one length, a turn is `turn_tokens` of it.
    """
    turns = len(passages[0].tokens) // turn_tokens
    scores: list[list[tuple[PassageScore, PassageScore]]] = [[] for _ in range(turns)]
    for number, passage in enumerate(passages):
        for turn, pair in enumerate(_conversation(models, converters, passage, turns, turn_tokens)):
            scores[turn].append(pair)
        progress(number + 1, len(passages))
    documents = [passage.document for passage in passages]
    names = [model.description.name for model in models]
    return [_drift(turn, names[turn % 2], documents, scores[turn]) for turn in range(1, turns)]


def _conversation(
    models: tuple[Speaker, Speaker],
    converters: tuple[Converter, Converter],
    passage: TokenSequence,
    turns: int,
    turn_tokens: int,
) -> list[tuple[PassageScore, PassageScore]]:
    """Scores of every turn on the exchanged cache, and on the speaker's own."""
    heard: tuple[list[KvPage], list[KvPage]] = ([], [])
    scores = []
    for turn in range(turns):
        start = turn * turn_tokens
        spoken = passage.tokens[start : start + turn_tokens]
        speaker, listener = turn % 2, 1 - turn % 2
        model = models[speaker]
        added, logits = model.extend(_joined(heard[speaker]), spoken)
        own = model.read_after(model.capture(passage.tokens[:start]) if turn else None, spoken)
        following = torch.tensor(spoken[1:], device=own.device)
        scores.append((score_passage(logits, own, following), score_passage(own, own, following)))
        heard[speaker].append(added)
        other = models[listener].description
        heard[listener].append(converted(converters[speaker], added, other, start))
    return scores


def _joined(pages: list[KvPage]) -> KvPage | None:
    if not pages:
        return None
    return KvPage(torch.cat([p.keys for p in pages], 1), torch.cat([p.values for p in pages], 1))


def _drift(
    handoffs: int,
    speaker: str,
    documents: Sequence[str],
    scores: Sequence[tuple[PassageScore, PassageScore]],
) -> Drift:
    def mean(values: list[float]) -> dict[str, float]:
        rows = [[value] for value in values]
        return asdict(bootstrap(documents, rows, lambda means: float(means[0])))

    return Drift(
        handoffs,
        speaker,
        kl=mean([mixed.kl for mixed, _ in scores]),
        top1=mean([mixed.top1 for mixed, _ in scores]),
        excess_loss=mean([mixed.loss - own.loss for mixed, own in scores]),
    )
