"""Blocks as bytes, the same for every store: what may be written, what may be believed.

A frame is the stored form of a block: header, padding, payload, as `blocks/header.py` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore_xfer.blocks.header import (
    ALIGNMENT,
    decode,
    header_bytes,
    payload_checksum,
    validate,
)
from kvstore_xfer.errors import BlockFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore_xfer.blocks.header import BlockHeader
    from kvstore_xfer.store.base import WriteRequest


class Plan(NamedTuple):
    """A write that passed validation. `size` counts the header, unless that is unusually long."""

    position: int
    key: bytes
    header: BlockHeader
    runs: list[memoryview]
    size: int


def plan_write(position: int, request: WriteRequest) -> Plan | None:
    """None when the request is not a writable block."""
    try:
        validate(request.header)
        runs = byte_runs(request.payload)
    except (BlockFormatError, BufferError, TypeError, ValueError):
        return None
    header = request.header
    if sum(map(len, runs)) != header.payload_bytes:
        return None
    size = ALIGNMENT + header.payload_bytes
    return Plan(position, header.key.encode(), header, runs, size)


def byte_runs(runs: Iterable[memoryview]) -> list[memoryview]:
    """The non-empty runs as flat bytes. Raises TypeError when one is not contiguous."""
    return [memoryview(run).cast("B") for run in runs if memoryview(run).nbytes]


def open_frame(key: str, parts: Sequence[memoryview]) -> tuple[BlockHeader, list[memoryview]]:
    """Header and payload runs of a frame, checksum verified; the header lies in the first part.

    Raises BlockFormatError when the bytes are not an intact block of this key.
    """
    first = parts[0] if parts else memoryview(b"")
    length = header_bytes(first)
    header = decode(first)
    runs = byte_runs([first[length:], *parts[1:]])
    if len(first) < length or sum(map(len, runs)) != header.payload_bytes:
        raise BlockFormatError("block: it does not have its length")
    if header.key != key:
        raise BlockFormatError("block: the header is that of another block")
    if payload_checksum(runs) != header.checksum:
        raise BlockFormatError("block: checksum does not match")
    return header, runs


def copy_runs(source: Iterable[memoryview], destination: Sequence[memoryview]) -> None:
    """Copy bytes between runs that are cut differently and together equally long."""
    targets = iter(destination)
    target = memoryview(b"")
    for run in source:
        start = 0
        while start < len(run):
            if not len(target):
                target = next(targets)
            part = run[start : start + len(target)]
            target[: len(part)] = part
            target = target[len(part) :]
            start += len(part)
