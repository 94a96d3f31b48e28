"""The check of one mapper: stages in order, stopping at the first that fails, with its reason.

=========== ===================================================================================
stage       question
=========== ===================================================================================
models      are these the two models the mapper was fitted for?
held_out    is there enough text that the fit has not seen?
definition  tokenizer, geometry, RoPE, head map, size of the fit
identity    does the target's own cache survive a store?
structure   is every map in its place (`gate.structure`)?
attention   does the target's attention give the same on the mapped cache, in every layer?
lengths     the arms of `gate.arms`, at every length of `gate.lengths`
tasks       questions about a context (`gate.tasks`), where a file is given
=========== ===================================================================================
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ModelError, TextError
from kvstore_xfer.fit.text import sequences_digest
from kvstore_xfer.gate.arms import ARMS, ArmScores, Runner, run_arms
from kvstore_xfer.gate.attention import attention_cosines
from kvstore_xfer.gate.decide import (
    arms_failure,
    attention_failure,
    identity_failure,
    tasks_failure,
)
from kvstore_xfer.gate.definition import wrong_definition, wrong_models
from kvstore_xfer.gate.figures import (
    arm_figures,
    attention_figures,
    first_broken_arm,
    task_figures,
)
from kvstore_xfer.gate.fitted import FittedText
from kvstore_xfer.gate.lengths import CALIBRATION, Length, cannot_use
from kvstore_xfer.gate.record import ACCEPTED, REJECTED, GateRecord, Thresholds, subject
from kvstore_xfer.gate.structure import compare_caches
from kvstore_xfer.gate.tasks import run_tasks
from kvstore_xfer.mapper.convert_select import make_converter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.gate.tasks import TaskItem
    from kvstore_xfer.mapper.artifact import Artifact
    from kvstore_xfer.mapper.convert import Converter

_IDENTITY_PASSAGES = 4


def check(
    artifact: Artifact,
    source: Runner,
    target: Runner,
    passages: Sequence[TokenSequence],
    prefix: int,
    *,
    lengths: Sequence[Length] = (),
    tasks: Sequence[TaskItem] = (),
    thresholds: Thresholds | None = None,
    hold_back: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GateRecord:
    """Measure a mapper on held-out passages and decide.

    `passages` are of the calibration length, with `prefix` tokens from a cache; `lengths` are
    others to measure, `tasks` questions to answer. Documents that the fit has seen are left out
    everywhere. The newest `hold_back` tokens of every prefix are computed by the target, as by a
    tier whose policy says so; every prefix is longer. Raises ModelError when the two models run in
    different dtypes, TextError when the text decides nothing: too little of it, or longer than the
    models can read.
    """
    if source.dtype != target.dtype:
        raise ModelError("source and target must be checked in one dtype; give --dtype")
    limits = thresholds or Thresholds()
    run = _Check(artifact, source, target, limits, hold_back, progress)
    wrong = wrong_models(artifact.mapper, source, target)
    if wrong:
        return run.record("models", wrong)
    first = Length(CALIBRATION, prefix, passages)
    for length in (first, *lengths):
        _require_room(artifact, length)
    unseen, leak = _unseen(artifact, [first, *lengths], limits)
    items = _usable_items(artifact, tasks, limits, hold_back)
    if leak:
        return run.record("held_out", leak)
    return run.stages(unseen, items)


class _Progress:
    """One count over several loops, each of which counts from one."""

    def __init__(self, tell: Callable[[int, int], None], total: int) -> None:
        self._tell, self._total, self._before = tell, total, 0

    def __call__(self, done: int, of: int) -> None:
        self._tell(self._before + done, self._total)
        if done == of:
            self._before += of


@dataclass
class _Check:
    """One run through the stages; `facts` become fields of the record."""

    artifact: Artifact
    source: Runner
    target: Runner
    limits: Thresholds
    hold_back: int
    progress: Callable[[int, int], None]
    facts: dict[str, Any] = field(default_factory=dict)

    def record(self, stage: str, reason: str) -> GateRecord:
        dtype = str(self.target.dtype).removeprefix("torch.")
        about: dict[str, Any] = {**subject(self.artifact.mapper, dtype)}
        return GateRecord(
            REJECTED if reason else ACCEPTED,
            reason,
            **about,
            stage=stage if reason else "",
            mapper_parameters=self.artifact.mapper.parameters,
            thresholds=asdict(self.limits),
            **self.facts,
        )

    def stages(self, lengths: Sequence[Length], items: Sequence[TaskItem]) -> GateRecord:
        """What follows once models and text are the right ones; the first length is the
        calibration's."""
        first = lengths[0]
        self.facts |= self._size(first)
        token = first.passages[0].tokens[1]
        wrong = wrong_definition(self.artifact, self.source, self.target, self.limits, token)
        if wrong:
            return self.record("definition", wrong)
        self.facts["lengths"] = {n.name: {"skipped": n.skipped} for n in lengths if n.skipped}
        measured = [length for length in lengths if length.passages]
        passages = sum(len(length.passages) for length in (first, *measured))
        self.progress = _Progress(self.progress, _IDENTITY_PASSAGES + passages + len(items))
        converter = make_converter(self.artifact.mapper, self.target.dtype, "cpu")
        stages: tuple[tuple[str, Callable[[], str]], ...] = (
            ("identity", lambda: self._identity(first, converter)),
            ("structure", lambda: self._structure(first, converter)),
            ("attention", lambda: self._attention(first, converter)),
            ("lengths", lambda: self._lengths(measured, converter)),
            ("tasks", lambda: self._tasks(items, converter)),
        )
        for stage, run in stages:
            reason = run()
            if reason:
                return self.record(stage, reason)
        return self.record("", "")

    def _identity(self, length: Length, converter: Converter) -> str:
        few = length.passages[:: max(1, len(length.passages) // _IDENTITY_PASSAGES)]
        scores = self._run_arms(length, few[:_IDENTITY_PASSAGES], converter, ARMS[:2])
        self.facts["identity_max_abs_diff"] = scores.identity_max_abs_diff
        return _not_numbers(scores) or identity_failure(scores.identity_max_abs_diff, self.limits)

    def _structure(self, length: Length, converter: Converter) -> str:
        found = compare_caches(self.source, self.target, converter, length.passages)
        self.facts["structure"] = {"r2": found.r2, "layer_r2": found.layer_r2}
        return found.flaw

    def _attention(self, length: Length, converter: Converter) -> str:
        cosines = attention_cosines(
            self.source,
            self.target,
            converter,
            length.passages,
            length.prefix_tokens,
            self.progress,
            self.hold_back,
        )
        documents = [passage.document for passage in length.passages]
        self.facts["attention"] = attention_figures(documents, cosines)
        return attention_failure(self.facts["attention"], self.limits)

    def _lengths(self, lengths: Sequence[Length], converter: Converter) -> str:
        first: dict[str, Any] = {}
        for length in lengths:
            beyond = cannot_use(self.source, self.target, length) if first else ""
            if beyond:
                self.facts["lengths"][length.name] = {"skipped": beyond}
                continue
            arms = ARMS if not first else [arm for arm in ARMS if arm != "identity"]
            scores = self._run_arms(length, length.passages, converter, arms)
            reason = _not_numbers(scores)
            if reason:
                return reason
            figures = {**self._size(length), **arm_figures(scores)}
            if not first:
                first = figures
                self._keep_calibration(scores, figures)
                reason = identity_failure(scores.identity_max_abs_diff, self.limits)
            else:
                self.facts["lengths"][length.name] = figures
            reason = reason or arms_failure(length.name, figures, first, self.limits)
            if reason:
                return reason
            longest = max(self.facts["longest_prefix_tokens"], length.prefix_tokens)
            self.facts["longest_prefix_tokens"] = longest
        return ""

    def _size(self, length: Length) -> dict[str, Any]:
        return {
            "text_digest": sequences_digest(length.passages),
            "passages": len(length.passages),
            "documents": len({passage.document for passage in length.passages}),
            "prefix_tokens": length.prefix_tokens,
            "hold_back_tokens": self.hold_back,
            "tail_tokens": len(length.passages[0].tokens) - length.prefix_tokens,
        }

    def _keep_calibration(self, scores: ArmScores, figures: dict[str, Any]) -> None:
        self.facts |= figures
        self.facts |= {
            "longest_prefix_tokens": 0,
            "identity_max_abs_diff": scores.identity_max_abs_diff,
            "prefill_tokens_per_second": scores.prefix_tokens / scores.prefill_seconds,
            "conversion_tokens_per_second": scores.converted_tokens / scores.conversion_seconds,
        }

    def _tasks(self, items: Sequence[TaskItem], converter: Converter) -> str:
        if not items:
            return ""
        models = (self.source, self.target)
        scores = run_tasks(*models, converter, items, self.progress, self.hold_back)
        self.facts["tasks"] = task_figures(scores)
        return tasks_failure(self.facts["tasks"], self.limits)

    def _run_arms(
        self,
        length: Length,
        passages: Sequence[TokenSequence],
        converter: Converter,
        arms: Sequence[str],
    ) -> ArmScores:
        return run_arms(
            self.source,
            self.target,
            converter,
            passages,
            length.prefix_tokens,
            arms,
            self.progress,
            self.hold_back,
        )


def _not_numbers(scores: ArmScores) -> str:
    broken = first_broken_arm(scores)
    return f"logits: the {broken} arm gave values that are not numbers" if broken else ""


def _require_room(artifact: Artifact, length: Length) -> None:
    models = (artifact.mapper.source, artifact.mapper.target)
    longest = min((m.max_positions for m in models if m.max_positions), default=0)
    tokens = len(length.passages[0].tokens) if length.passages else 0
    if longest and tokens > longest:
        raise TextError(
            f"--max-tokens: passages of {tokens} tokens are longer than the models' {longest}; "
            f"give {longest} at most, in a manifest's gate too"
        )


def _unseen(
    artifact: Artifact, lengths: Sequence[Length], limits: Thresholds
) -> tuple[list[Length], str]:
    """The lengths without what the fit has seen, or why the text is no held-out text."""
    fitted = FittedText(artifact)
    kept = []
    for length in lengths:
        left = [p for p in length.passages if not fitted.has(p.document, p.tokens)]
        if not length.skipped and not _enough(left, limits):
            if _enough(length.passages, limits):
                return [], _leak(fitted, length.passages, limits)
            raise _too_little(length.name, left, limits)
        kept.append(replace(length, passages=left))
    return kept, ""


def _leak(fitted: FittedText, passages: Sequence[TokenSequence], limits: Thresholds) -> str:
    documents = {passage.document for passage in passages}
    used = len(documents & fitted.documents)
    if used:
        return (
            f"held_out: {used} of the text's {len(documents)} documents were used in the fit; "
            "give documents that the fit has not seen"
        )
    copies = sum(fitted.repeats(passage.tokens) for passage in passages)
    return (
        f"held_out: {copies} of {len(passages)} passages repeat text of the fit under another "
        f"document, which leaves fewer than {limits.min_passages}; give more passages, of text "
        "that the fit has not seen"
    )


def _enough(passages: Sequence[TokenSequence], limits: Thresholds) -> bool:
    documents = len({passage.document for passage in passages})
    return len(passages) >= limits.min_passages and documents >= _documents_needed(limits)


def _documents_needed(limits: Thresholds) -> int:
    return max(2, limits.min_documents)  # the control takes its cache from another document


def _too_little(name: str, passages: Sequence[TokenSequence], limits: Thresholds) -> TextError:
    documents = len({passage.document for passage in passages})
    remedy = f"longer documents, or leave the length {name!r} out with --lengths"
    if name == CALIBRATION:
        few = documents < _documents_needed(limits)
        remedy = "text of more documents (a .txt is one)" if few else "more text"
        remedy += ", or smaller --prefix-tokens and --tail-tokens"
    return TextError(
        f"--text: {len(passages)} passages of {documents} documents that the fit has not seen, "
        f"needed are {limits.min_passages} of {_documents_needed(limits)}; give {remedy}"
    )


def _usable_items(
    artifact: Artifact, items: Sequence[TaskItem], limits: Thresholds, hold_back: int
) -> list[TaskItem]:
    """Without what the fit has seen, and without contexts of which nothing would be converted."""
    fitted = FittedText(artifact)
    left = [item for item in items if not fitted.has(item.document, item.context)]
    left = [item for item in left if len(item.context) > hold_back]
    documents = len({item.document for item in left})
    if items and (len(left) < limits.min_task_items or documents < _documents_needed(limits)):
        longer = f" and that are longer than the {hold_back} held back" if hold_back else ""
        raise TextError(
            f"--tasks: {len(left)} questions about {documents} contexts that the fit has not seen"
            f"{longer}, needed are {limits.min_task_items} about {_documents_needed(limits)}; add "
            "to the file"
        )
    return left
