"""``kvxfer store ls|stat|verify|compact|pin|clear URL``: look into a store, keep it, empty it."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.prompt import Confirm
from rich.table import Table

from kvstore_xfer.blocks.key import BlockKey
from kvstore_xfer.cli.output import open_console
from kvstore_xfer.errors import BlockFormatError, ConfigError, StoreError
from kvstore_xfer.store.base import ReadRequest, ReadStatus
from kvstore_xfer.store.parameters import shown
from kvstore_xfer.store.url import local_folders, open_store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator
    from typing import Any

    from kvstore_xfer.store.base import BlockStat, BlockStore

_URL_HELP = "for example local:///var/cache/kvxfer?max_size=50GiB"
_BATCH = 8  # blocks read or deleted at once
_LONGEST_PIN_HOURS = 720
_DAMAGED = (ReadStatus.CORRUPT, ReadStatus.ERROR)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``store`` command."""
    parser = subparsers.add_parser("store", help="list, check and empty a block store")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("ls", help="list blocks")
    listing.add_argument("url", metavar="URL", help=_URL_HELP)
    listing.add_argument("--prefix", default="", help="only keys that start with this")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    listing.set_defaults(run=_ls)

    stat = commands.add_parser("stat", help="totals, and a table per identity and kind")
    stat.add_argument("url", metavar="URL", help=_URL_HELP)
    stat.add_argument("--json", action="store_true", help="one JSON object")
    stat.set_defaults(run=_stat)

    verify = commands.add_parser(
        "verify", help="read and check every block, remove damaged ones; exit 1 on damage"
    )
    verify.add_argument("url", metavar="URL", help=_URL_HELP)
    verify.add_argument(
        "--repair",
        action="store_true",
        help="first bring index and files together: a file nobody knows is taken in, a row "
        "without a file is dropped",
    )
    verify.set_defaults(run=_verify)

    compact = commands.add_parser("compact", help="shrink the index; the store may be in use")
    compact.add_argument("url", metavar="URL", help=_URL_HELP)
    compact.set_defaults(run=_compact)

    pin = commands.add_parser("pin", help="keep blocks from eviction for some hours")
    pin.add_argument("url", metavar="URL", help=_URL_HELP)
    pin.add_argument("--prefix", required=True, help="only keys that start with this")
    pin.add_argument("--hours", required=True, type=float, help="until so long from now")
    pin.set_defaults(run=_pin)

    clear = commands.add_parser("clear", help="delete blocks")
    clear.add_argument("url", metavar="URL", help=_URL_HELP)
    clear.add_argument("--prefix", default="", help="only keys that start with this")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(run=_clear)


def _existing(url: str) -> BlockStore:
    """Open a store that is there: looking at one must not create it."""
    for folder in local_folders(url):
        if not folder.is_dir():
            raise ConfigError(f"store {shown(url)!r}: no folder {folder}; correct the URL")
    return open_store(url)


def _ls(args: argparse.Namespace) -> int:
    with closing(_existing(args.url)) as store:
        rows = store.scan(args.prefix)
        if args.json:
            for row in rows:
                sys.stdout.write(json.dumps(_describe(row)) + "\n")
        else:
            for row in rows:
                age = _age(time.time() - row.created)
                sys.stdout.write(f"{_size(row.size):>10} {age:>6} {_kind(row.key):<10} {row.key}\n")
    return 0


def _stat(args: argparse.Namespace) -> int:
    with closing(_existing(args.url)) as store:
        stats = store.stats()
        groups = _groups(store.scan())
    if args.json:
        rows = [
            {"identity": identity, "kind": kind, "blocks": blocks, "bytes": size}
            for (identity, kind), (blocks, size) in groups.items()
        ]
        sys.stdout.write(json.dumps(vars(stats) | {"groups": rows}) + "\n")
        return 0
    console = open_console()
    capacity = "" if stats.capacity_bytes is None else f" of {_size(stats.capacity_bytes)}"
    console.print(
        f"{stats.blocks} blocks, {_size(stats.bytes)}{capacity}; "
        f"{stats.evicted_blocks} evicted, {stats.corrupt_blocks} found damaged so far",
        highlight=False,
    )
    console.print(_group_table(groups))
    return 0


def _verify(args: argparse.Namespace) -> int:
    damaged: list[str] = []
    counts: Counter[ReadStatus] = Counter()
    with closing(_existing(args.url)) as store, _progress() as progress:
        if args.repair:
            before = store.stats().blocks
            store.repair()
            sys.stdout.write(f"{before} blocks in the index before, {store.stats().blocks} after\n")
        task = progress.add_task("verify", total=store.stats().blocks)
        for keys in _batches(row.key for row in store.scan()):
            results = store.read([ReadRequest(key, touch=False) for key in keys])
            for key, result in zip(keys, results, strict=True):
                counts[result.status] += 1
                if result.status in _DAMAGED:
                    damaged.append(f"{result.status.value} {key}")
            progress.advance(task, len(keys))
    for line in damaged:
        sys.stdout.write(line + "\n")
    summary = f"{counts[ReadStatus.OK]} blocks intact, {len(damaged)} damaged"
    if counts[ReadStatus.MISSING]:
        summary += f", {counts[ReadStatus.MISSING]} evicted meanwhile"
    sys.stdout.write(summary + "\n")
    return 1 if damaged else 0


def _compact(args: argparse.Namespace) -> int:
    with closing(_existing(args.url)) as store:
        before, after = store.compact()
    sys.stdout.write(f"index: {_size(before)} before, {_size(after)} after\n")
    return 0


def _pin(args: argparse.Namespace) -> int:
    if not 0 < args.hours <= _LONGEST_PIN_HOURS:
        raise ConfigError(
            f"store pin: --hours {args.hours:g}: give more than 0, {_LONGEST_PIN_HOURS} at most"
        )
    pinned = 0
    with closing(_existing(args.url)) as store:
        for keys in _batches((row.key for row in store.scan(args.prefix)), 1024):
            if not store.pin(keys, 3600 * args.hours):
                raise StoreError(
                    f"store {shown(args.url)!r}: blocks cannot be pinned there; only local: and "
                    "memory: can"
                )
            pinned += len(keys)
    sys.stdout.write(f"{pinned} blocks pinned\n")
    return 0


def _clear(args: argparse.Namespace) -> int:
    with closing(_existing(args.url)) as store:
        if not args.yes and not _confirmed(args):
            return 1
        deleted = _delete_all(store, args.prefix)
    sys.stdout.write(f"{deleted} blocks deleted\n")
    return 0


def _confirmed(args: argparse.Namespace) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("store clear: not a terminal, nobody to ask; add --yes")
    what = f"all blocks under {args.prefix!r}" if args.prefix else "all blocks"
    return Confirm.ask(f"Delete {what} in {shown(args.url)}?", default=False)


def _delete_all(store: BlockStore, prefix: str) -> int:
    with _progress() as progress:
        task = progress.add_task("clear", total=None)
        deleted = 0
        for keys in _batches((row.key for row in store.scan(prefix)), 256):
            deleted += sum(store.delete(keys))
            progress.update(task, completed=deleted)
    return deleted


def _progress() -> Progress:
    """A bar on the error stream, so that output stays clean."""
    return Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=open_console(stderr=True),
        transient=True,
    )


def _batches(keys: Iterable[str], size: int = _BATCH) -> Iterator[list[str]]:
    iterator = iter(keys)
    while batch := list(islice(iterator, size)):
        yield batch


def _groups(rows: Iterable[BlockStat]) -> dict[tuple[str, str], tuple[int, int]]:
    """Blocks and bytes per identity and kind."""
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        group = (_parsed(row.key).identity, _kind(row.key))
        blocks, size = groups.get(group, (0, 0))
        groups[group] = (blocks + 1, size + row.size)
    return groups


def _group_table(groups: dict[tuple[str, str], tuple[int, int]]) -> Table:
    table = Table("identity", "kind", box=None)
    table.add_column("blocks", justify="right")
    table.add_column("size", justify="right")
    for (identity, kind), (blocks, size) in sorted(groups.items()):
        table.add_row(identity, kind, str(blocks), _size(size))
    return table


def _describe(row: BlockStat) -> dict[str, Any]:
    return vars(row) | {"kind": _kind(row.key)}


def _parsed(key: str) -> BlockKey:
    """A damaged index may hold a key that is none; it is shown, not hidden."""
    try:
        return BlockKey.parse(key)
    except BlockFormatError:
        return BlockKey("?", "?", "?", key)


def _kind(key: str) -> str:
    return _parsed(key).kind.partition("-")[0]


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"
