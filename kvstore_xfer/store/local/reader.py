"""Blocks from their files into the callers' memory, trusted only after their checksums.

A batch goes in steps: everything is prepared, then read and hashed, then judged. Moving a block
drives the interpreter out of the processor's cache: what is done between two blocks takes twice as
long as in a loop of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.header import ALIGNMENT, MAX_HEADER_BYTES, decode, without_padding
from kvstore_xfer.errors import BlockFormatError
from kvstore_xfer.store.base import ReadResult, ReadStatus
from kvstore_xfer.store.frame import byte_runs
from kvstore_xfer.store.local.folder import FAILURES
from kvstore_xfer.store.local.index import raw_key
from kvstore_xfer.store.local.layout import open_safely, payload_name, refuse_irregular
from kvstore_xfer.store.local.payload import read_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.store.base import ReadRequest
    from kvstore_xfer.store.local.folder import Folder
    from kvstore_xfer.store.local.index import Entry

_GROUP = 128
_DAMAGE = (BlockFormatError, EOFError)
_FAILURES = (*FAILURES, BufferError, TypeError, ValueError)
_MISSING = ReadResult(ReadStatus.MISSING)
_ERROR = ReadResult(ReadStatus.ERROR)


def read_blocks(
    folder: Folder, requests: Sequence[ReadRequest], entries: Sequence[Entry | None]
) -> list[ReadResult]:
    """Read the blocks that the index entries name; one that fails does not fail the batch."""
    results: list[ReadResult] = []
    for start in range(0, len(requests), _GROUP):
        part = slice(start, start + _GROUP)
        reads = [
            None if entry is None else _Read(folder, request, entry)
            for request, entry in zip(requests[part], entries[part], strict=True)
        ]
        found = [read for read in reads if read is not None]
        folder.workers.map(_Read.fill, found, [read.entry.payload_bytes for read in found])
        results += [_MISSING if read is None else _settle(folder, read) for read in reads]
    return results


class _Read:
    """One block on its way. What goes wrong is kept until `result` is asked for."""

    __slots__ = ("checksum", "copy", "entry", "failure", "head", "path", "request", "runs")

    def __init__(self, folder: Folder, request: ReadRequest, entry: Entry) -> None:
        self.request = request
        self.entry = entry
        self.failure: Exception | None = None
        self.path = folder.layout.payload(payload_name(raw_key(request.key), entry.generation))
        try:
            self._prepare()
        except (*_DAMAGE, *_FAILURES) as error:
            self.failure = error

    def fill(self) -> None:
        """Read header and payload, and hash the payload."""
        if self.failure is not None:
            return
        try:
            descriptor = open_safely(self.path)
            try:
                head = bytearray(self.entry.header_bytes)  # the same memory for one after the other
                self.checksum = read_block(descriptor, memoryview(head), self.runs)
                self.head = without_padding(head)
            except OSError:
                refuse_irregular(descriptor, self.path)
                raise
            finally:
                os.close(descriptor)
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

    def _prepare(self) -> None:
        entry, given = self.entry, self.request.destination
        if entry.header_bytes > MAX_HEADER_BYTES + ALIGNMENT:
            raise BlockFormatError("block: the index gives it an impossible header")
        self.runs = byte_runs(given or ())
        self.copy: bytearray | None = None
        if given is None or sum(map(len, self.runs)) != entry.payload_bytes:
            self.copy = bytearray(entry.payload_bytes)
            self.runs = byte_runs([memoryview(self.copy)])


def _settle(folder: Folder, read: _Read) -> ReadResult:
    try:
        return _result(folder, read)
    except _FAILURES:
        return _ERROR


def _result(folder: Folder, read: _Read) -> ReadResult:
    try:
        return read.result()
    except _DAMAGE:
        return _condemn(folder, read)
    except FileNotFoundError:
        (now,) = folder.query(lambda index: index.entries([read.request.key]))
    if now is None:
        return _MISSING
    if now.generation == read.entry.generation:
        return _condemn(folder, read)
    again = _Read(folder, read.request, now)  # evicted or overwritten since the lookup
    again.fill()
    return _result(folder, again)


def _condemn(folder: Folder, read: _Read) -> ReadResult:
    raw, generation = raw_key(read.request.key), read.entry.generation
    name = folder.update(lambda rows: rows.remove_corrupt(raw, generation))
    if name:
        folder.unlink([name])
    return ReadResult(ReadStatus.CORRUPT)
