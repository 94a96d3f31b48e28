"""The fitting loop: captures of both models, one sequence at a time, into a saved artifact."""

from __future__ import annotations

import platform
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers

from kvstore_xfer import __version__
from kvstore_xfer.fit.accumulate import HELD_OUT_EVERY, Accumulator, FitOptions
from kvstore_xfer.fit.checkpoint import drop_checkpoint, load_checkpoint, save_checkpoint
from kvstore_xfer.fit.text import TokenSequence, sequences_digest
from kvstore_xfer.mapper.artifact import Artifact, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.fit.select import Choice
    from kvstore_xfer.models.description import ModelDescription

CHECKPOINT_SECONDS = 60.0


class Capture(Protocol):
    """Runs one model over a sequence and returns its whole cache as one page."""

    def __call__(self, tokens: Sequence[int]) -> KvPage: ...


@dataclass(frozen=True)
class Side:
    """One model of the pair: what it is, and how to get its cache."""

    model: ModelDescription
    capture: Capture


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
    loop goes on after the last checkpoint. `dtype` is the one the captures run in, `progress` is
    told sequences done and in all.
    Raises ModelError and ConfigError as `Accumulator` does.
    """
    accumulator = Accumulator(source.model, target.model, options, device)
    run = {**_run_key(source.model, target.model, sequences, options), "--dtype": dtype}
    start = load_checkpoint(out, run, accumulator.moments) if resume else 0
    saved = time.monotonic()
    with _DeferredInterrupt() as interrupted:
        for index in range(start, len(sequences)):
            tokens = sequences[index].tokens
            accumulator.add(index, source.capture(tokens), target.capture(tokens))
            progress(index + 1, len(sequences))
            due = time.monotonic() - saved > CHECKPOINT_SECONDS
            if due or interrupted.is_set():
                save_checkpoint(out, run, accumulator.moments, index + 1)
                saved = time.monotonic()
            if interrupted.is_set():
                raise InterruptedFitError(f"{index + 1} of {len(sequences)} sequences are kept")
    mapper, choice = accumulator.finish()
    artifact = save(out, Artifact(mapper, _fit_record(sequences, options, choice)))
    drop_checkpoint(out)
    return artifact


def _run_key(
    source: ModelDescription,
    target: ModelDescription,
    sequences: Sequence[TokenSequence],
    options: FitOptions,
) -> dict[str, str]:
    return {
        "--source": source.fingerprint(),
        "--target": target.fingerprint(),
        "--text": sequences_digest(sequences),
        "--method": options.method.value,
    }


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
        },
        "held_out": f"every {HELD_OUT_EVERY}th sequence, for layers, k and ridge",
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
    """Turns the first Ctrl-C into an event, so that no moments are half updated.

    A second Ctrl-C acts at once. Outside the main thread signals are left alone.
    """

    def __enter__(self) -> threading.Event:
        self._event = threading.Event()
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self._event

    def _note(self, *_: object) -> None:
        self._event.set()
        signal.signal(signal.SIGINT, self._previous)

    def __exit__(self, *exc: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._previous)
