"""Calibration and held-out text: documents from a file, token sequences of one length from them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvstore_xfer.errors import TextError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeGuard

_SUFFIXES = ".txt, .jsonl, .parquet"


class Tokenize(Protocol):
    def __call__(self, text: str) -> Sequence[int]: ...


@dataclass(frozen=True)
class TokenSequence:
    """`tokens` token ids of one document; `document` is the digest of the document's text."""

    document: str
    tokens: tuple[int, ...]


def document_digest(text: str) -> str:
    """Names a document, so that a check can exclude what the fit has seen."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_documents(path: str | Path) -> Iterator[str]:
    """The documents of a `.txt` (one), `.jsonl` or `.parquet` file (column ``text``).

    Raises TextError naming the file, the line or column, and the remedy.
    """
    file = Path(path)
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(file.suffix)
    if reader is None:
        raise TextError(f"{file}: unknown kind of text file; give one of {_SUFFIXES}")
    try:
        yield from reader(file)
    except OSError as error:
        raise TextError(f"{file}: {error.strerror or error}; give a readable file") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{file}: not UTF-8 ({error.reason}); convert the file") from None


def cut_sequences(
    path: str | Path,
    tokenize: Tokenize,
    *,
    tokens: int,
    count: int,
    shorter: str = "a smaller --sequence-tokens",
) -> list[TokenSequence]:
    """Up to `count` sequences of exactly `tokens` tokens from the documents of a file.

    Reading stops after `count` documents of sufficient length; the sequences are spread evenly over
    what was read. A document that the file repeats counts once: a copy on the held-out side would
    be no held-out text. No token is used twice and none is padded. Raises TextError when the file
    does not hold a single sequence; `shorter` is what to give then for shorter ones.
    """
    pieces: list[TokenSequence] = []
    longest = used = 0
    seen: set[str] = set()
    for text in read_documents(path):
        document = document_digest(text)
        if document in seen:
            continue
        seen.add(document)
        ids = tokenize(text)
        longest = max(longest, len(ids))
        cut = _cut(document, ids, tokens)
        pieces += cut
        used += bool(cut)
        if used == count:
            break
    if pieces:
        chosen = min(count, len(pieces))
        return [pieces[index * len(pieces) // chosen] for index in range(chosen)]
    if not longest:
        raise TextError(f"{path}: holds no text; give a file with at least one document")
    raise TextError(
        f"{path}: the longest document has {longest} tokens, one sequence takes {tokens}; "
        f"give longer documents or {shorter}"
    )


def sequences_digest(sequences: Iterable[TokenSequence]) -> str:
    """Digest of all token ids in order."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(json.dumps([sequence.document, sequence.tokens]).encode())
    return digest.hexdigest()


def _cut(document: str, ids: Sequence[int], tokens: int) -> list[TokenSequence]:
    starts = range(0, len(ids) - tokens + 1, tokens)
    return [TokenSequence(document, tuple(ids[start : start + tokens])) for start in starts]


def _is_text(value: object) -> TypeGuard[str]:
    """A string that can be written as UTF-8: JSON may hold halves of surrogate pairs."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_txt(file: Path) -> Iterator[str]:
    yield file.read_text(encoding="utf-8")


def _read_jsonl(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError):
                text = None
            if not _is_text(text):
                raise TextError(
                    f'{file}:{number}: field "text": expected a JSON object with a text field; '
                    "correct the line"
                )
            yield text


def _read_parquet(file: Path) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise TextError(
            f"{file}: reading Parquet needs pyarrow; pip install 'kvstore-xfer[parquet]'"
        ) from None
    try:
        with file.open("rb") as opened:
            table = parquet.ParquetFile(opened)
            if "text" not in table.schema_arrow.names:
                raise TextError(f'{file}: no column "text"; rename the column that holds the text')
            for batch in table.iter_batches(columns=["text"], batch_size=64):
                yield from (_text_of_row(file, row) for row in batch.column(0).to_pylist())
    except ArrowException as error:
        message = (str(error).splitlines() or ["damaged"])[0]
        raise TextError(f"{file}: not a readable Parquet file ({message}); write it anew") from None


def _text_of_row(file: Path, row: object) -> str:
    if row is None:
        return ""
    if not _is_text(row):
        raise TextError(f'{file}: column "text": holds no text; convert the column')
    return row
