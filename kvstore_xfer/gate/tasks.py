"""Questions about a context: does the target answer as well from the mapped cache?

A tasks file has one JSON object per line: ``context``, ``question``, and either ``answer`` (text
that greedy decoding must reproduce) or ``choices`` with ``answer`` the number of the right one,
from 0. The context comes from a cache, question and answer are read natively.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvstore_xfer.errors import TextError
from kvstore_xfer.fit.text import document_digest
from kvstore_xfer.gate.arms import converted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.fit.text import Tokenize
    from kvstore_xfer.gate.arms import Runner
    from kvstore_xfer.mapper.convert import Converter

TASK_ARMS = ("native", "mapped", "wrong", "none", "source")


@dataclass(frozen=True)
class TaskItem:
    """One question as token ids. `document` is the digest of the context's text.

    `choices` has one entry, the answer itself, where there is nothing to choose.
    """

    document: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    right: int

    @property
    def chance(self) -> float:
        """The score of guessing."""
        return 1 / len(self.choices) if len(self.choices) > 1 else 0.0


def read_tasks(path: Path, tokenize: Tokenize) -> list[TaskItem]:
    """All items of a tasks file. Raises TextError with the file, the line and what is expected."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise TextError(f"{path}: {reason}; give a readable tasks file") from None
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(_item(json.loads(line), tokenize))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            detail = f"no {error}" if isinstance(error, KeyError) else error
            raise TextError(
                f"{path}:{number}: expected a JSON object with context, question, and answer or "
                f"choices with the number of the right one ({detail}); correct the line"
            ) from None
    if not items:
        raise TextError(f"{path}: holds no question; give one JSON object a line")
    return items


def _item(row: dict[str, Any], tokenize: Tokenize) -> TaskItem:
    context, question, answer = row["context"], row["question"], row["answer"]
    texts = row.get("choices", [answer])
    right = answer if "choices" in row else 0
    if not all(isinstance(text, str) and text for text in (context, question, *texts)):
        raise ValueError("texts must be strings with something in them")
    if type(right) is not int or not 0 <= right < len(texts):
        raise ValueError("answer is not the number of a choice")
    ids, asked = tuple(tokenize(context)), _without_start(tokenize, question)
    choices = tuple(_without_start(tokenize, text) for text in texts)
    if not (ids and asked and all(choices)):
        raise ValueError("a text without tokens")
    return TaskItem(document_digest(context), ids, asked, choices, right)


def _without_start(tokenize: Tokenize, text: str) -> tuple[int, ...]:
    """The text's tokens without those that a tokenizer puts before every text."""
    start = tuple(tokenize(""))
    ids = tuple(tokenize(text))
    return ids[len(start) :] if start and ids[: len(start)] == start else ids


@dataclass(frozen=True)
class TaskScores:
    """Right (1) or wrong (0) per arm and item, with every item's document and chance."""

    documents: list[str]
    chance: list[float]
    right: dict[str, list[float]]


def run_tasks(
    source: Runner,
    target: Runner,
    converter: Converter,
    items: Sequence[TaskItem],
    progress: Callable[[int, int], None] = lambda done, total: None,
    hold_back: int = 0,
) -> TaskScores:
    """Answer all items in all arms; the wrong document is the next item's of another context.

    `hold_back` as in `gate.arms`; every context is longer.
    """
    right: dict[str, list[float]] = {arm: [] for arm in TASK_ARMS}
    for number, item in enumerate(items):
        other = _other_context(items, number)
        own, given = target.capture(item.context), source.capture(item.context)
        mapped, wrong = (
            converted(converter, page.cut(0, page.shape.tokens - hold_back), target.description)
            for page in (given, source.capture(other.context))
        )
        ends = len(item.context) - hold_back
        held = replace(item, question=(*item.context[ends:], *item.question))
        arms: dict[str, tuple[Runner, KvPage | None, TaskItem]] = {
            "native": (target, own, item),
            "mapped": (target, mapped, held),
            "wrong": (target, wrong, held),
            "none": (target, None, held),
            "source": (source, given, item),
        }
        for arm, (runner, page, asked) in arms.items():
            right[arm].append(float(_answers(runner, page, asked)))
        progress(number + 1, len(items))
    return TaskScores([item.document for item in items], [item.chance for item in items], right)


def _other_context(items: Sequence[TaskItem], number: int) -> TaskItem:
    later = [*items[number + 1 :], *items[:number]]
    return next(item for item in later if item.document != items[number].document)


def _answers(runner: Runner, page: KvPage | None, item: TaskItem) -> bool:
    """Choices that differ in their last token only need one read."""
    ends = {choice[:-1]: choice for choice in item.choices}
    reads = {start: _logits(runner, page, item, choice) for start, choice in ends.items()}
    logits = [reads[choice[:-1]] for choice in item.choices]
    if len(item.choices) == 1:
        return bool((logits[0].argmax(-1).cpu() == torch.tensor(item.choices[0])).all())
    scores = list(map(_likelihood, logits, item.choices))
    return max(range(len(scores)), key=scores.__getitem__) == item.right


def _likelihood(logits: torch.Tensor, choice: tuple[int, ...]) -> float:
    """Nats a token, so that a long choice is not at a disadvantage."""
    logs = torch.log_softmax(logits.double(), -1)
    return float(logs[torch.arange(len(choice)), torch.tensor(choice)].mean())


def _logits(
    runner: Runner, page: KvPage | None, item: TaskItem, choice: tuple[int, ...]
) -> torch.Tensor:
    """Logits ``[T, vocab]`` that predict the tokens of `choice` after the question."""
    read = (*item.question, *choice[:-1])
    return runner.read_after(page, read)[-len(choice) :]
