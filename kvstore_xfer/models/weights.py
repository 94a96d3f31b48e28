"""Size, dtype and digest of a model's weights, without loading them."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import struct
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore_xfer.errors import ModelError

logger = logging.getLogger(__name__)

# The dtypes that a model computes in; quantised weights are stored in others.
_COMPUTE_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_SEGMENT = 64 << 20  # hashed independently, so that one large file keeps every thread busy
_READ = 1 << 20


@dataclass(frozen=True)
class WeightsSummary:
    """Number of parameters, and the compute dtype (torch name) that most of them have."""

    parameters: int
    dtype: str


def summarise(files: list[Path]) -> WeightsSummary:
    """Count parameters from the headers of safetensors files.

    Raises ModelError for a truncated or damaged file, so a copy cut short is noticed at once.
    """
    counts: Counter[str] = Counter()
    for file in files:
        for dtype, shape, _ in _tensors(file):
            counts[dtype] += math.prod(shape)
    if not counts:
        raise ModelError(f"{files[0]}: holds no tensors; download it again")
    stored = [dtype for dtype, _ in counts.most_common() if dtype in _COMPUTE_DTYPES]
    return WeightsSummary(sum(counts.values()), _COMPUTE_DTYPES[stored[0]] if stored else "float32")


def content_digest(files: list[Path]) -> str:
    """Hex digest over the names and bytes of the files.

    Each file's digest is kept in the user's cache folder (``KVXFER_CACHE_DIR``, else
    ``$XDG_CACHE_HOME/kvxfer``, else ``~/.cache/kvxfer``), so that only changed files are read.
    """
    whole = hashlib.blake2b(digest_size=32)
    for file in files:
        whole.update(f"{file.name}\0{_file_digest(file)}\n".encode())
    return whole.hexdigest()


def _tensors(file: Path) -> list[tuple[str, list[int], int]]:
    """(dtype, shape, end in the payload) of every tensor in one safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ModelError(f"{file}: truncated within its header; download it again")
        text = stream.read(length)
    try:
        tensors = _parse_header(text)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ModelError(f"{file}: not a safetensors file; download it again") from None
    expected = 8 + length + max((end for _, _, end in tensors), default=0)
    if size != expected:
        what = "truncated" if size < expected else "damaged"
        raise ModelError(f"{file}: {what}, {size} bytes of {expected}; download it again")
    return tensors


def _parse_header(text: bytes) -> list[tuple[str, list[int], int]]:
    fields = json.loads(text)
    fields.pop("__metadata__", None)
    tensors = []
    for tensor in fields.values():
        _, end = tensor["data_offsets"]
        tensors.append((str(tensor["dtype"]), [int(n) for n in tensor["shape"]], int(end)))
    return tensors


def _file_digest(file: Path) -> str:
    stamp = _stamp(file)
    entry = _cache_folder() / "digests" / hashlib.blake2b(stamp, digest_size=20).hexdigest()
    try:
        known = entry.read_text(encoding="ascii")
    except (OSError, ValueError):
        known = ""
    if re.fullmatch("[0-9a-f]{64}", known):
        return known
    digest = _hash_file(file)
    if _stamp(file) == stamp:  # else it was written to while being read
        _remember(entry, digest)
    return digest


def _stamp(file: Path) -> bytes:
    """Changes when the file is replaced or written to.

    The change time is part of it because copying tools set the modification time back.
    """
    path = file.resolve()
    state = path.stat()
    fields = (str(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
    return json.dumps(fields).encode()


def _cache_folder() -> Path:
    chosen = os.environ.get("KVXFER_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvxfer"


def _remember(entry: Path, digest: str) -> None:
    """Publish by rename: another process may be starting at the same moment."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent)
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(digest)
        Path(name).replace(entry)
    except OSError as error:
        logger.warning("weights digest not cached, the next start reads them again: %s", error)


def _hash_file(file: Path) -> str:
    segments = range(0, file.stat().st_size, _SEGMENT)
    whole = hashlib.blake2b(digest_size=32)
    with file.open("rb") as stream, ThreadPoolExecutor(os.cpu_count()) as pool:
        descriptor = stream.fileno()
        for digest in pool.map(lambda start: _hash_segment(descriptor, start), segments):
            whole.update(digest)
    return whole.hexdigest()


def _hash_segment(descriptor: int, start: int) -> bytes:
    part = hashlib.blake2b(digest_size=32)
    for offset in range(start, start + _SEGMENT, _READ):
        part.update(os.pread(descriptor, _READ, offset))
    return part.digest()
