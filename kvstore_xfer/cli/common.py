"""What several subcommands share: number options, what is asked of a text, progress."""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvstore_xfer.cli.output import open_console, warn
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit.variety import monotony

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.models.description import ModelDescription


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with count, rate and time left.

    Where stderr is no terminal only its last line, and none of what failed before a first step: the
    error is the one line then.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = open_console(stderr=True)
    bar = Progress(*columns, console=console)
    if console.is_terminal:
        bar.start()
    try:
        task = bar.add_task(what, total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = bar.tasks[task].speed
            rate = f"{speed:.1f}/s" if speed else ""
            bar.update(task, completed=done, total=total, rate=rate)
            bar.start()

        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


def judge_text(file: Path, sequences: Sequence[TokenSequence], vocabulary: int) -> None:
    """Warns of a text that a fit would learn little from, whatever its held-out figures say."""
    poor = monotony(sequences, vocabulary)
    if poor:
        warn(f"--text {file}: {poor}, so there is little to learn; give text like your traffic")


def require_positions(tokens: int, *models: ModelDescription) -> None:
    """Raises ConfigError for --sequence-tokens that a model was not made for."""
    for model in models:
        if model.max_positions and tokens > model.max_positions:
            raise ConfigError(
                f"--sequence-tokens {tokens}: {model.name} can use {model.max_positions}, as its "
                f"config says; give {model.max_positions} at most"
            )


def positive_int(text: str) -> int:
    """An argparse type: a whole number from 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number


def natural_int(text: str) -> int:
    """An argparse type: a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def positive_float(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def auto_or_int(text: str) -> int | None:
    """An argparse type: None for 'auto', else a whole number from 1."""
    if text == "auto":
        return None
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither 'auto' nor a whole number from 1"
        ) from None


def auto_or_ridge(text: str) -> float | None:
    """An argparse type: None for 'auto', else a relative ridge above 0."""
    if text == "auto":
        return None
    try:
        ridge = float(text)
    except ValueError:
        ridge = 0.0
    if not 0 < ridge < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a number above 0")
    return ridge
