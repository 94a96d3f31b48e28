"""``kvxfer bench``: measurements, one subcommand each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_xfer.cli import bench_map, bench_store

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench`` command."""
    parser = subparsers.add_parser("bench", help="measure, on this machine")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench_map.register(commands)
    bench_store.register(commands)
