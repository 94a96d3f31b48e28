"""One block from its file into the caller's memory, trusted only after its checksum."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.header import ALIGNMENT, MAX_HEADER_BYTES, decode, payload_checksum
from kvstore_xfer.errors import BlockFormatError
from kvstore_xfer.store.base import ReadResult, ReadStatus
from kvstore_xfer.store.frame import byte_runs
from kvstore_xfer.store.local.index import raw_key
from kvstore_xfer.store.local.layout import open_sized, payload_name
from kvstore_xfer.store.local.payload import fill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.blocks.header import BlockHeader
    from kvstore_xfer.store.base import ReadRequest
    from kvstore_xfer.store.local.folder import Folder
    from kvstore_xfer.store.local.index import Entry


def read_block(folder: Folder, request: ReadRequest, entry: Entry | None) -> ReadResult:
    """Read the block that the index entry names. Raises OSError and lmdb.Error."""
    while entry is not None:
        name = payload_name(raw_key(request.key), entry.generation)
        try:
            descriptor, size = open_sized(folder.layout.payload_path(name))
        except BlockFormatError:
            return _condemn(folder, request.key, entry)
        except FileNotFoundError:
            (now,) = folder.query(lambda index: index.entries([request.key]))
            if now is not None and now.generation == entry.generation:
                return _condemn(folder, request.key, entry)
            entry = now  # evicted or overwritten since the lookup
            continue
        try:
            return _read_file(descriptor, size, request, entry)
        except (BlockFormatError, EOFError):
            return _condemn(folder, request.key, entry)
        finally:
            os.close(descriptor)
    return ReadResult(ReadStatus.MISSING)


def _read_file(descriptor: int, size: int, request: ReadRequest, entry: Entry) -> ReadResult:
    if size != entry.size or entry.header_bytes > MAX_HEADER_BYTES + ALIGNMENT:
        raise BlockFormatError("block: the file does not have its length")
    if request.destination is not None:
        runs = byte_runs(request.destination)
        if sum(map(len, runs)) == entry.payload_bytes:
            return ReadResult(ReadStatus.OK, _verified(descriptor, request.key, entry, runs))
    copy = bytearray(entry.payload_bytes)
    header = _verified(descriptor, request.key, entry, byte_runs([memoryview(copy)]))
    if request.destination is None:
        return ReadResult(ReadStatus.OK, header, bytes(copy))
    return ReadResult(ReadStatus.MISMATCH, header)


def _verified(descriptor: int, key: str, entry: Entry, runs: Sequence[memoryview]) -> BlockHeader:
    raw = memoryview(bytearray(entry.header_bytes))
    parts = fill(descriptor, [raw, *runs])  # a small block comes with one system call
    header = decode(next(parts, raw))
    if header.key != key or header.payload_bytes != entry.payload_bytes:
        raise BlockFormatError("block: the header is that of another block")
    if payload_checksum(parts) != header.checksum:
        raise BlockFormatError("block: checksum does not match")
    return header


def _condemn(folder: Folder, key: str, entry: Entry) -> ReadResult:
    raw = raw_key(key)
    name = folder.update(lambda rows: rows.remove_corrupt(raw, entry.generation))
    if name:
        folder.unlink([name])
    return ReadResult(ReadStatus.CORRUPT)
