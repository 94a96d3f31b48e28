"""What several subcommands share: number options, progress."""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with count, rate and time left; a last line only where stderr is no tty."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(what, total=None, rate="")

        def update(done: int, total: int) -> None:
            speed = bar.tasks[task].speed
            rate = f"{speed:.1f}/s" if speed else ""
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def positive_int(text: str) -> int:
    """An argparse type: a whole number from 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return number


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
    return None if text == "auto" else positive_int(text)


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
