"""The argument parser of `kvxfer` and, because argparse hands the class on, of all subcommands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from kvstore_xfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Parser(argparse.ArgumentParser):
    """Tells a wrong argument in one line on stderr, without the usage, and exits with 2."""

    def error(self, message: str) -> NoReturn:
        line = ConfigError(f"{self.prog}: error: {message}; see '{self.prog} --help'")
        self.exit(2, f"{line}\n")

    # argparse types this with overloads for its namespace.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """None are left over: argparse would tell them as the whole command's, not as ours."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown
