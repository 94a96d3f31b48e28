"""Bytes between memory runs and files, without an intermediate copy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.header import (
    decode,
    encode,
    header_bytes,
    payload_checksum,
    seal,
)
from kvstore_xfer.errors import BlockFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_xfer.blocks.header import BlockHeader

# Blocks up to this size are read in one system call, larger ones in steps: bytes are hashed while
# they are still in the cache. Writing goes in one call: the page cache then takes larger pages,
# and gives the block back faster.
ONE_CALL_BYTES = 1 << 20
_READ_STEP = 384 << 10
_WRITE_STEP = 1 << 30
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_PROBE_BYTES = 4096


def read_block(descriptor: int, head: memoryview, runs: Sequence[memoryview]) -> str:
    """Read a whole block into header and payload; the payload's checksum.

    Raises EOFError when the file ends early.
    """
    parts = [head, *runs]
    size = sum(map(len, parts))
    if (
        size <= ONE_CALL_BYTES
        and len(parts) <= _IOV_MAX
        and os.preadv(descriptor, parts, 0) == size
    ):
        return payload_checksum(runs)
    rest = fill(descriptor, parts)
    next(rest)
    return payload_checksum(rest)


def fill(descriptor: int, runs: Sequence[memoryview], offset: int = 0) -> Iterator[memoryview]:
    """Read a file into `runs`, yielding each part once it is there.

    Raises EOFError when the file ends early.
    """
    for batch in _batches(runs, _READ_STEP):
        offset = _transfer(os.preadv, descriptor, batch, offset)
        yield from batch


def write_block(descriptor: int, header: BlockHeader, runs: Sequence[memoryview]) -> int:
    """Write a whole block with its checksum; the length of its padded header."""
    raw = encode(seal(header, runs))
    offset = 0
    for batch in _batches([memoryview(raw), *runs], _WRITE_STEP):
        offset = _transfer(os.pwritev, descriptor, batch, offset)
    return len(raw)


def read_header(descriptor: int) -> tuple[BlockHeader, int]:
    """Header and its padded length, without touching the payload.

    Raises BlockFormatError when the file does not start with an intact header.
    """
    first = os.pread(descriptor, _PROBE_BYTES, 0)
    length = header_bytes(first)
    header = decode(first if length <= len(first) else os.pread(descriptor, length, 0))
    if os.fstat(descriptor).st_size != length + header.payload_bytes:
        raise BlockFormatError("block: the file does not have the length its header states")
    return header, length


def _batches(runs: Sequence[memoryview], step: int) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    room = step
    for run in runs:
        start = 0
        while start < len(run):
            part = run[start : start + room]
            batch.append(part)
            start += len(part)
            room -= len(part)
            if not room or len(batch) == _IOV_MAX:
                yield batch
                batch, room = [], step
    if batch:
        yield batch


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    batch: list[memoryview],
    offset: int,
) -> int:
    pending = list(batch)
    while pending:
        moved = call(descriptor, pending, offset)
        if not moved:
            raise EOFError
        offset += moved
        while pending and moved >= len(pending[0]):
            moved -= len(pending.pop(0))
        if moved:
            pending[0] = pending[0][moved:]
    return offset
