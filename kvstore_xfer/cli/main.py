"""Entry point of `kvxfer`: parse, run one subcommand, turn errors into one line.

Exit codes: 0 done, 1 a damaged store (`store verify`) or a problem (`doctor`), 2 bad input,
3 mapper rejected (`check`), 70 a fault of ours, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

from kvstore_xfer import __version__
from kvstore_xfer.cli.parser import Parser
from kvstore_xfer.errors import KvxferError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

# A subcommand's module is imported only when it is asked for: `kvxfer store` needs no models.
_COMMANDS = {
    "describe": "what a model is, and whether its cache can be converted",
    "predict": "before a fit: is a pair likely to pass the check, and with which method",
    "fit": "fit the mapper of one ordered pair from two models and a text",
    "check": "measure a mapper on held-out text and decide whether it may serve",
    "eval": "benchmarks from mapped caches, and hand-offs back and forth",
    "family": "validate a family manifest",
    "store": "look into a block store",
    "doctor": "what works here and what does not, with the remedy",
    "top": "live view of running engines, from their metrics",
    "plan": "what conversion would save for an expected traffic",
    "bench": "measure speed on this machine",
    "demo": "the whole way on two small models: fit, check, store, convert, decode",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvxfer` with `argv` (default: the process's); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser(arguments).parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except KvxferError as error:
        sys.stderr.write(f"kvxfer: error: {error}\n")
        return 2
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; nothing more to say, and no traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        sys.stderr.write(f"kvxfer: error: {error.filename or 'output'}: {error.strerror}\n")
        return 2
    except Exception as error:
        if "KVXFER_TRACEBACK" in os.environ:
            raise
        cause = (str(error).splitlines() or [""])[0][:300]
        sys.stderr.write(
            f"kvxfer: error: {type(error).__name__}: {cause}; not foreseen, please report it with "
            "the traceback that KVXFER_TRACEBACK=1 shows\n"
        )
        return 70
    except KeyboardInterrupt as interrupt:
        kept = f": {interrupt}" if str(interrupt) else ""
        sys.stderr.write(f"kvxfer: interrupted{kept}\n")
        return 130


def _parser(arguments: Sequence[str]) -> Parser:
    parser = Parser(
        prog="kvxfer",
        description="A KV-cache tier that serves a model from a sibling's blocks, measured first.",
    )
    parser.add_argument("--version", action="version", version=f"kvxfer {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    wanted = next((word for word in arguments if word in _COMMANDS), None)
    for name, summary in _COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"kvstore_xfer.cli.{name}").register(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
