"""The fitting loop: captures of both models, one sequence at a time, into a saved artifact."""

from __future__ import annotations

import platform
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import transformers

from kvstore_xfer import __version__
from kvstore_xfer.fit.accumulate import HELD_OUT_EVERY, Accumulator, FitOptions
from kvstore_xfer.fit.checkpoint import FOLDER, drop_checkpoint, load_checkpoint, save_checkpoint
from kvstore_xfer.fit.low_rank import SENSITIVITY_SEQUENCES, LowRankAccumulator
from kvstore_xfer.fit.mlp import RowFiles, train
from kvstore_xfer.fit.overlap import sketch
from kvstore_xfer.fit.residual import ResidualAccumulator
from kvstore_xfer.fit.text import TokenSequence, sequences_digest
from kvstore_xfer.fit.weighted import WeightedAccumulator
from kvstore_xfer.mapper.artifact import Artifact, save
from kvstore_xfer.mapper.maps import Method

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.fit.moments import Moments
    from kvstore_xfer.fit.select import Choice
    from kvstore_xfer.mapper.maps import Mapper
    from kvstore_xfer.models.description import ModelDescription

CHECKPOINT_SECONDS = 60.0


class Capture(Protocol):
    """Runs one model over a sequence and returns its whole cache as one page."""

    def __call__(self, tokens: Sequence[int]) -> KvPage: ...


@dataclass(frozen=True)
class Side:
    """One model of the pair: what it is, and how to get its cache.

    Of the target, row weights need its `queries` with the cache (`fit.attention.row_weights`), and
    low-rank fits the gradients of its `sensitivity` (tokens and a seed; keys without RoPE).
    """

    model: ModelDescription
    capture: Capture
    queries: Callable[[Sequence[int]], tuple[KvPage, torch.Tensor]] | None = None
    sensitivity: Callable[[Sequence[int], int], KvPage] | None = None


class InterruptedFitError(KeyboardInterrupt):
    """Ctrl-C during a fit, after its checkpoint was written."""


def fit(
    source: Side,
    target: Side,
    sequences: Sequence[TokenSequence],
    out: Path,
    options: FitOptions,
    *,
    resume: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """Fit the maps of one ordered pair and write the mapper folder `out`.

    Moments are checkpointed once a minute and on Ctrl-C (InterruptedFitError); with `resume` the
    fit goes on after the last checkpoint. `dtype` is the one the captures run in, `progress` is
    told sequences done and in all.
    Raises ModelError and ConfigError as `Accumulator` does.
    """
    run = {**run_key(source.model, target.model, sequences, options), "--dtype": dtype}
    loop = _Loop(sequences, out, run, resume, progress)
    finish = {
        Method.LOW_RANK: _fit_low_rank,
        Method.LOW_RANK_RESIDUAL: _fit_low_rank,
        Method.RESIDUAL: _fit_residual,
        Method.MLP: _fit_mlp,
    }.get(options.method, _fit_affine)
    with _DeferredInterrupt() as loop.interrupted:
        mapper, choice = finish(loop, source, target, options, device)
    artifact = save(out, Artifact(mapper, _fit_record(sequences, options, choice)))
    drop_checkpoint(out)
    return artifact


class _Loop:
    """Passes over all sequences, each with moments and a checkpoint of its own."""

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        out: Path,
        run: dict[str, str],
        resume: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        self.sequences = sequences
        self.interrupted = threading.Event()
        self._out, self._run, self._resume, self._progress = out, run, resume, progress
        self._passes = 1
        self._done = 0

    @property
    def folder(self) -> Path:
        """Where the fit keeps what it needs until it is done."""
        return self._out / FOLDER

    def plan(self, passes: int) -> None:
        self._passes = passes

    def run(
        self,
        moments: dict[str, Moments],
        add: Callable[[int, TokenSequence], None],
        **facts: str,
    ) -> None:
        """One pass: `add` is called for every sequence that no checkpoint holds.

        `facts` are what the moments depend on beside the run, such as an earlier pass's choice.
        """
        number = self._done
        run, total = {**self._run, **facts}, len(self.sequences)
        # Without moments there is nothing to go on from: the pass is done anew.
        resumed = self._resume and bool(moments)
        start = load_checkpoint(self._out, run, moments, number) if resumed else 0
        saved = time.monotonic()
        for index in range(start, total):
            add(index, self.sequences[index])
            self._progress(number * total + index + 1, self._passes * total)
            last = index + 1 == total and number + 1 < self._passes
            due = time.monotonic() - saved > CHECKPOINT_SECONDS
            if moments and (due or last or self.interrupted.is_set()):
                save_checkpoint(self._out, run, moments, index + 1, number)
                saved = time.monotonic()
            if self.interrupted.is_set():
                raise InterruptedFitError(f"{index + 1} of {total} sequences are kept")
        self._done += 1


def _fit_affine(
    loop: _Loop, source: Side, target: Side, options: FitOptions, device: str
) -> tuple[Mapper, Choice]:
    """Head-local or full-head; with row weights in two passes."""
    accumulator = Accumulator(source.model, target.model, options, device)
    loop.plan(2 if options.weighted else 1)
    loop.run(
        accumulator.moments,
        lambda index, s: accumulator.add(index, source.capture(s.tokens), target.capture(s.tokens)),
    )
    if not options.weighted:
        return accumulator.finish()
    queries = _required(target.queries, "queries")
    choice = accumulator.choose()
    weighted = WeightedAccumulator(source.model, target.model, options, choice, device)
    loop.run(
        weighted.moments,
        lambda index, s: weighted.add(index, source.capture(s.tokens), *queries(s.tokens)),
        **{"--layers": str(choice.layers)},
    )
    mapper, choice = weighted.finish()
    return accumulator.complete(mapper), choice


def _fit_low_rank(
    loop: _Loop, source: Side, target: Side, options: FitOptions, device: str
) -> tuple[Mapper, Choice]:
    accumulator = LowRankAccumulator(source.model, target.model, options, device)
    gradients = _required(target.sensitivity, "sensitivity")
    every = max(1, len(loop.sequences) // SENSITIVITY_SEQUENCES)

    def add(index: int, sequence: TokenSequence) -> None:
        tokens = sequence.tokens
        # The fit's own side of the split, and not its first tokens alone.
        wanted = index % every == 0 and len(tokens) > 1
        accumulator.add(
            index,
            source.capture(tokens),
            target.capture(tokens),
            gradients(tokens, index) if wanted else None,
        )

    loop.run(accumulator.moments, add, **{"--layers": str(options.layers)})
    return accumulator.finish()


def _fit_residual(
    loop: _Loop, source: Side, target: Side, options: FitOptions, device: str
) -> tuple[Mapper, Choice]:
    accumulator = ResidualAccumulator(source.model, target.model, options, device)
    loop.run(
        accumulator.moments,
        lambda index, s: accumulator.add(index, source.capture(s.tokens), target.capture(s.tokens)),
    )
    return accumulator.finish()


def _fit_mlp(
    loop: _Loop, source: Side, target: Side, options: FitOptions, device: str
) -> tuple[Mapper, Choice]:
    """Layers as for a head-local map; then rows on disk, which a resumed fit writes anew."""
    head_local = replace(options, method=Method.HEAD_LOCAL)
    accumulator = Accumulator(source.model, target.model, head_local, device)
    loop.plan(2)
    loop.run(
        accumulator.moments,
        lambda index, s: accumulator.add(index, source.capture(s.tokens), target.capture(s.tokens)),
    )
    choice = accumulator.choose()
    files = RowFiles(loop.folder, source.model, target.model)
    loop.run(
        {},
        lambda index, s: files.add(index, source.capture(s.tokens), target.capture(s.tokens)),
    )
    mapper, scores = train(files, source.model, target.model, choice, hidden=options.hidden)
    return accumulator.complete(mapper), replace(choice, scores=scores)


_Function = TypeVar("_Function")


def _required(function: _Function | None, name: str) -> _Function:
    if function is None:
        raise ValueError(f"the target's side of this fit gives no {name}")
    return function


def run_key(
    source: ModelDescription,
    target: ModelDescription,
    sequences: Sequence[TokenSequence],
    options: FitOptions,
) -> dict[str, str]:
    """What tells one fit from another, by the option that decides it."""
    return {
        "--source": source.fingerprint(),
        "--target": target.fingerprint(),
        "--text": sequences_digest(sequences),
        "--method": options.method.value,
        "--weights": options.weights,
    }


def run_key_of(artifact: Artifact) -> dict[str, str]:
    """`run_key` of the fit that came to its end with this mapper."""
    mapper, made = artifact.mapper, artifact.fit
    return {
        "--source": mapper.source.fingerprint(),
        "--target": mapper.target.fingerprint(),
        "--text": made["calibration"]["digest"],
        "--method": mapper.method.value,
        "--weights": made["weights"],
    }


def asked(options: FitOptions) -> dict[str, str]:
    """What was asked for beside the `run_key`, by the option: a checkpoint serves any of it."""
    given = (options.layers, options.ridge, options.rank)
    named = zip(("--layers", "--ridge", "--rank"), given, strict=True)
    hidden = {"--hidden": str(options.hidden)} if options.method is Method.MLP else {}
    return {name: "auto" if value is None else str(value) for name, value in named} | hidden


def _fit_record(
    sequences: Sequence[TokenSequence], options: FitOptions, choice: Choice
) -> dict[str, Any]:
    """What the manifest says about the fit; no times, so that equal fits give equal folders."""
    return {
        "calibration": {
            "digest": sequences_digest(sequences),
            "sequences": len(sequences),
            "tokens_per_sequence": len(sequences[0].tokens),
            "documents": sorted({sequence.document for sequence in sequences}),
            "ngrams": sketch([sequence.tokens for sequence in sequences]),
        },
        "held_out": f"every {HELD_OUT_EVERY}th sequence, for layers, k and ridge",
        "weights": options.weights,
        "asked": asked(options),
        "k": len(choice.layers[0]),
        "layers": "auto" if options.layers is None else options.layers,
        "ridge": {"keys": list(choice.ridges[0]), "values": list(choice.ridges[1])},
        "held_out_r2": {"keys": list(choice.scores[0]), "values": list(choice.scores[1])},
        "libraries": {
            "kvstore-xfer": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


class _DeferredInterrupt:
    """Turns the first Ctrl-C or SIGTERM into an event, so that no moments are half updated.

    A second one acts at once. Outside the main thread signals are left alone.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> threading.Event:
        self._event = threading.Event()
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._previous = {each: signal.signal(each, self._note) for each in self._SIGNALS}
        return self._event

    def _note(self, *_: object) -> None:
        self._event.set()
        self._restore()

    def __exit__(self, *exc: object) -> None:
        if self._main:
            self._restore()

    def _restore(self) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)
