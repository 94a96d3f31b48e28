"""Where commands print: as wide as the terminal, and without a limit into a pipe or file."""

from __future__ import annotations

import sys

from rich.console import Console

from kvstore_xfer.errors import KvxferError

_UNLIMITED = 100_000  # columns; tables are no wider than what is in them


def open_console(*, stderr: bool = False) -> Console:
    """Rich takes a pipe for a terminal of 80 columns, and would cut tables to that.

    And it takes brackets in names and texts for styles, and does not print them.
    """
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if terminal else _UNLIMITED
    return Console(stderr=stderr, width=width, markup=False, emoji=False)


def warn(message: str) -> None:
    """One line on stderr; the command goes on."""
    sys.stderr.write(f"kvxfer: warning: {KvxferError(message)}\n")
