"""Blocks from their files into the callers' memory, trusted only after their checksums.

A batch goes in steps: all files are opened, several threads read and hash, and the caller judges.
What the threads do hardly needs the interpreter: threads that wait for it are slower than one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.header import ALIGNMENT, MAX_HEADER_BYTES, decode
from kvstore_xfer.errors import BlockFormatError
from kvstore_xfer.store.base import ReadResult, ReadStatus
from kvstore_xfer.store.frame import byte_runs
from kvstore_xfer.store.local.folder import FAILURES
from kvstore_xfer.store.local.index import raw_key
from kvstore_xfer.store.local.layout import open_regular, payload_name
from kvstore_xfer.store.local.payload import read_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.store.base import ReadRequest
    from kvstore_xfer.store.local.folder import Folder
    from kvstore_xfer.store.local.index import Entry

_OPEN_AT_ONCE = 64
_DAMAGE = (BlockFormatError, EOFError)
_FAILURES = (*FAILURES, BufferError, TypeError, ValueError)


def read_blocks(
    folder: Folder, requests: Sequence[ReadRequest], entries: Sequence[Entry | None]
) -> list[ReadResult]:
    """Read the blocks that the index entries name; one that fails does not fail the batch."""
    results: list[ReadResult] = []
    for start in range(0, len(requests), _OPEN_AT_ONCE):
        part = slice(start, start + _OPEN_AT_ONCE)
        reads: list[_Read | None] = []
        try:
            for request, entry in zip(requests[part], entries[part], strict=True):
                reads.append(None if entry is None else _Read(folder, request, entry))
            intact = [read for read in reads if read is not None and read.failure is None]
            folder.map(_Read.fill, intact, [read.entry.payload_bytes for read in intact])
            results += [_guarded(folder, read) for read in reads]
        finally:
            for read in reads:
                if read is not None:
                    read.close()
    return results


class _Read:
    """One block on its way, its file open. What goes wrong is kept until `result` is asked for."""

    __slots__ = ("checksum", "copy", "descriptor", "entry", "failure", "head", "request", "runs")

    def __init__(self, folder: Folder, request: ReadRequest, entry: Entry) -> None:
        self.request = request
        self.entry = entry
        self.descriptor = -1
        self.failure: Exception | None = None
        try:
            self._open(folder)
        except (*_DAMAGE, *_FAILURES) as error:
            self.failure = error

    def fill(self) -> None:
        """Read header and payload, and hash the payload."""
        try:
            self.checksum = read_block(self.descriptor, self.head, self.runs)
        except (*_DAMAGE, *_FAILURES) as error:
            self.failure = error

    def result(self) -> ReadResult:
        """Raises what went wrong, BlockFormatError or EOFError for a damaged block."""
        if self.failure is not None:
            raise self.failure
        header = decode(self.head)
        if header.key != self.request.key or header.payload_bytes != self.entry.payload_bytes:
            raise BlockFormatError("block: the header is that of another block")
        if header.checksum != self.checksum:
            raise BlockFormatError("block: checksum does not match")
        if self.copy is None:
            return ReadResult(ReadStatus.OK, header)
        if self.request.destination is None:
            return ReadResult(ReadStatus.OK, header, bytes(self.copy))
        return ReadResult(ReadStatus.MISMATCH, header)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _open(self, folder: Folder) -> None:
        entry = self.entry
        name = payload_name(raw_key(self.request.key), entry.generation)
        self.descriptor, size = open_regular(folder.layout.payload(name))
        if size != entry.size or entry.header_bytes > MAX_HEADER_BYTES + ALIGNMENT:
            raise BlockFormatError("block: the file does not have its length")
        self.head = memoryview(bytearray(entry.header_bytes))
        self.runs = byte_runs(self.request.destination or ())
        self.copy: bytearray | None = None
        given = self.request.destination is not None
        if not given or sum(map(len, self.runs)) != entry.payload_bytes:
            self.copy = bytearray(entry.payload_bytes)
            self.runs = byte_runs([memoryview(self.copy)])


def _guarded(folder: Folder, read: _Read | None) -> ReadResult:
    if read is None:
        return ReadResult(ReadStatus.MISSING)
    try:
        return _settle(folder, read)
    except _FAILURES:
        return ReadResult(ReadStatus.ERROR)


def _settle(folder: Folder, read: _Read) -> ReadResult:
    try:
        return read.result()
    except _DAMAGE:
        return _condemn(folder, read)
    except FileNotFoundError:
        (now,) = folder.query(lambda index: index.entries([read.request.key]))
    if now is None:
        return ReadResult(ReadStatus.MISSING)
    if now.generation == read.entry.generation:
        return _condemn(folder, read)
    again = _Read(folder, read.request, now)  # evicted or overwritten since the lookup
    try:
        if again.failure is None:
            again.fill()
        return _settle(folder, again)
    finally:
        again.close()


def _condemn(folder: Folder, read: _Read) -> ReadResult:
    raw, generation = raw_key(read.request.key), read.entry.generation
    name = folder.update(lambda rows: rows.remove_corrupt(raw, generation))
    if name:
        folder.unlink([name])
    return ReadResult(ReadStatus.CORRUPT)
