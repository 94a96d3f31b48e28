"""A model for lm-evaluation-harness that answers from a cache of the context.

The context (few-shot examples, passage) comes from a cache, the question and the answer are read
natively. An arm says whose cache it is, as in `kvstore_xfer.gate.arms`:

======== =================================================
native   the target's own
mapped   converted from the source's
none     no context: the target sees the question alone
source   the source answers by itself
======== =================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from transformers import DynamicCache

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.gate.arms import converted
from kvxfer_transformers.cache import cache_of_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.mapper.convert import Converter
    from kvxfer_transformers.model import LoadedModel

ARMS = ("native", "mapped", "none", "source")
_DEFAULT_NEW_TOKENS = 256
_DEFAULT_WINDOW = 2048
_METRICS = ("acc_norm", "acc", "exact_match", "f1", "word_perplexity")


@dataclass(frozen=True)
class Boundary:
    """Where the cached context ends: behind the last `text`, else `hold_back` tokens before the
    end. At least one token of a context is read natively."""

    text: str = "\n\n"
    hold_back: int = 16


class CachedModel(LM):  # type: ignore[misc]
    """One arm of one mapper, for `lm_eval.simple_evaluate`."""

    def __init__(
        self,
        arm: str,
        source: LoadedModel,
        target: LoadedModel,
        converter: Converter,
        boundary: Boundary | None = None,
    ) -> None:
        super().__init__()
        if arm not in ARMS:
            raise ValueError(f"arm {arm!r}: known are {', '.join(ARMS)}")
        self._arm, self._source, self._target = arm, source, target
        self._converter, self._boundary = converter, boundary or Boundary()
        self._reader = source if arm == "source" else target
        limits = [m.description.max_positions for m in (source, target)]
        self._longest = min(filter(None, limits), default=_DEFAULT_WINDOW)
        # Requests of one question follow each other with the same context.
        self._last: tuple[tuple[int, ...], KvPage | None] = ((), None)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        # docstring inherited
        return [self._likelihood(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        # docstring inherited
        return [self._rolling(self._encode(request.args[0])) for request in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        # docstring inherited
        return [self._generate(*request.args) for request in requests]

    def _likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        kept = context.rstrip()
        whole = self._encode(context + continuation)
        cached = self._split(context)
        asked = len(self._encode(kept)) if kept else 0
        if not asked:  # the first token of a text can only be predicted after a start token
            whole, asked = self._started(whole), 1
        answer = whole[asked:]
        logits = self._read(whole[:-1], min(cached, asked - 1))[-len(answer) :]
        return self._score(logits, answer)

    def _score(self, logits: torch.Tensor, answer: list[int]) -> tuple[float, bool]:
        logs = torch.log_softmax(logits.double(), -1).cpu()
        chosen = torch.tensor(answer)
        total = float(logs[torch.arange(len(answer)), chosen].sum())
        return total, bool((logs.argmax(-1) == chosen).all())

    def _rolling(self, tokens: list[int]) -> float:
        """Half a window from a cache, the next half read after it, so that every token counts
        once and has at least half a window of context, but at the text's beginning."""
        half, total = min(self._longest, _DEFAULT_WINDOW) // 2, 0.0
        tokens = self._started(tokens)
        for start in range(1, len(tokens), half):
            first, stop = max(0, start - half), min(start + half, len(tokens))
            logits = self._read(tokens[first : stop - 1], start - 1 - first)
            total += self._score(logits[-(stop - start) :], tokens[start:stop])[0]
        return total

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        tokens, cached = self._encode(context), self._split(context)
        limit = int(options.get("max_gen_toks", _DEFAULT_NEW_TOKENS))
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens, cached = self._fitting(tokens, min(cached, len(tokens) - 1), limit)
        page = self._page(tuple(tokens[:cached]))
        cache = cache_of_page(page) if page is not None else None
        return self._greedy(tokens[cached:], cache, limit, stops)

    def _greedy(self, tokens: list[int], cache: Any, limit: int, stops: list[str]) -> str:
        cache = DynamicCache() if cache is None else cache
        logits = self._reader.read(tokens, cache, keep=1)[-1]
        told: list[int] = []
        text = ""
        while len(told) < limit:
            told.append(int(logits.argmax()))
            if told[-1] == self._reader.tokenizer.eos_token_id:
                break
            text = str(self._reader.tokenizer.decode(told))
            found = [text.index(stop) for stop in stops if stop and stop in text]
            if found:
                return text[: min(found)]
            logits = self._reader.read(told[-1:], cache)[-1]
        return text

    def _read(self, tokens: list[int], cached: int) -> torch.Tensor:
        """Logits of the tokens behind the first `cached`, which come from a cache."""
        tokens, cached = self._fitting(tokens, cached, 0)
        return self._reader.read_after(self._page(tuple(tokens[:cached])), tokens[cached:])

    def _fitting(self, tokens: list[int], cached: int, more: int) -> tuple[list[int], int]:
        """Cut at the front to what both models can read, with room for `more` tokens."""
        cut = max(0, len(tokens) + more - self._longest)
        return tokens[cut:], max(0, cached - cut)

    def _page(self, context: tuple[int, ...]) -> KvPage | None:
        if not context or self._arm == "none":
            return None
        if self._last[0] != context:
            self._last = (context, self._made(context))
        return self._last[1]

    def _made(self, context: tuple[int, ...]) -> KvPage:
        if self._arm == "native":
            return self._target.capture(context)
        page = self._source.capture(context)
        if self._arm == "source":
            return page
        return converted(self._converter, page, self._target.description)

    def _split(self, context: str) -> int:
        """How many tokens of the context come from the cache."""
        head, found, _ = context.rpartition(self._boundary.text)
        if found:
            return len(self._encode(head + found))
        return max(0, len(self._encode(context)) - self._boundary.hold_back)

    def _encode(self, text: str) -> list[int]:
        return self._target.tokenize(text)

    def _started(self, tokens: list[int]) -> list[int]:
        """With a start token, which some tokenizers give by themselves."""
        tokenizer = self._target.tokenizer
        start = tokenizer.bos_token_id
        start = tokenizer.eos_token_id if start is None else start
        return tokens if tokens[:1] == [start] else [start, *tokens]


def evaluate(
    source: LoadedModel,
    target: LoadedModel,
    converter: Converter,
    tasks: Sequence[str],
    boundary: Boundary,
    *,
    include: Path | None = None,
    limit: int | None = None,
    few_shot: int | None = None,
) -> list[dict[str, Any]]:
    """All arms on all tasks of the harness; one row per task, as `cli.eval.TaskRow` takes them.

    Raises ConfigError when a task is unknown or its data cannot be had.
    """
    manager = _manager(tasks, include)
    results = {}
    for arm in ARMS:
        model = CachedModel(arm, source, target, converter, boundary)
        results[arm] = _run(model, tasks, manager, limit, few_shot)
    return [_row(name, results) for name in results["native"]["results"]]


def _manager(tasks: Sequence[str], include: Path | None) -> TaskManager:
    """Knows all `tasks`. The harness's own thousands are read only where they are needed."""
    if include is not None:
        own = TaskManager(include_path=str(include), include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(f"--tasks: the harness has no {unknown[0]!r}; --include names a folder")
    return manager


def _run(
    model: CachedModel,
    tasks: Sequence[str],
    manager: TaskManager,
    limit: int | None,
    few_shot: int | None,
) -> dict[str, Any]:
    try:
        found: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=few_shot,
            bootstrap_iters=0,
        )
    except (OSError, ConnectionError, ValueError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--tasks: the harness could not run them ({cause}); try others, or --include them"
        ) from None
    return found


def _row(task: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    scores = {arm: _score(result["results"][task]) for arm, result in results.items()}
    samples = results["native"]["samples"].get(task, [])
    chances = [_chance(sample) for sample in samples]
    _, metric, _ = scores["native"]
    return {
        "task": task,
        "metric": metric,
        "n": len(samples),
        "chance": sum(chances) / len(chances) if chances and metric.startswith("acc") else 0.0,
        "native": scores["native"][0],
        "mapped": scores["mapped"][0],
        "none": scores["none"][0],
        "source_alone": scores["source"][0],
        "stderr": scores["mapped"][2],
    }


def _score(row: dict[str, Any]) -> tuple[float, str, float]:
    """Value, name and standard error of the task's main metric.

    Perplexities become likelihoods per word, so that more is better everywhere.
    """
    for metric in _METRICS:
        for name, value in row.items():
            if name.split(",")[0] == metric and isinstance(value, (int, float)):
                if metric == "word_perplexity":
                    return 1 / float(value), "1 / word_perplexity", 0.0
                spread = row.get(name.replace(metric, f"{metric}_stderr", 1), 0.0)
                return float(value), metric, float(spread) if spread != "N/A" else 0.0
    raise ConfigError(
        f"--tasks: no known metric among {', '.join(sorted(row))}; leave out the task without "
        f"{', '.join(_METRICS)}"
    )


def _chance(sample: dict[str, Any]) -> float:
    """Guessing among the choices; 0 where the answer is generated."""
    choices = len(sample["arguments"])
    return 1 / choices if choices > 1 else 0.0
