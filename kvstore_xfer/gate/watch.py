"""What a check leaves for production: probe queries and the relation, in the mapper's folder.

One file per KV dtype, ``watch-<dtype>.safetensors``. Checking a mapper again replaces it, and with
it `check_id`: a pair that was switched off under an earlier check is then on again.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from kvstore_xfer.errors import ArtifactError
from kvstore_xfer.gate.relation import Relation, fit_relation, make_probes
from kvstore_xfer.mapper.artifact import save_tensors

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.gate.arms import Runner
    from kvstore_xfer.gate.relation import Queries
    from kvstore_xfer.mapper.convert import Converter

_REMEDY = "run 'kvxfer check' again"
_PROBES = "probes"
# Another name whenever a relation is from something else: older files are refused.
_ABOUT = "watch-2"


@dataclass(frozen=True)
class WatchRecord:
    """What is known of the mapper `mapper_digest`; `probes` ``[L, kv_heads, P, D]``, fp16."""

    mapper_digest: str
    relation: Relation
    probes: torch.Tensor
    check_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])


def make_watch(
    mapper_digest: str,
    source: Runner,
    target: Runner,
    converter: Converter,
    queries: Queries,
    passages: Sequence[TokenSequence],
    prefix: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    hold_back: int = 0,
) -> WatchRecord:
    """Measure the relation on held-out passages of which `prefix` tokens come from a cache.

    `hold_back` as in `gate.arms`.
    """
    probes = make_probes(target, queries, passages, prefix)
    relation = fit_relation(
        source, target, converter, passages, prefix, probes, progress, hold_back
    )
    return WatchRecord(mapper_digest, relation, probes)


def watch_file(folder: str | os.PathLike[str], dtype: str) -> Path:
    return Path(folder) / f"watch-{dtype}.safetensors"


def save_watch(folder: str | os.PathLike[str], dtype: str, record: WatchRecord) -> None:
    """Raises ArtifactError when the folder cannot be written."""
    path = watch_file(folder, dtype)
    about = json.dumps(
        {
            "mapper_digest": record.mapper_digest,
            "check_id": record.check_id,
            "relation": asdict(record.relation),
        }
    )
    metadata = {_ABOUT: about, "checksum": _checksum(about, record.probes)}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        save_tensors({_PROBES: record.probes}, temporary, metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ArtifactError(f"{path}: cannot be written ({error}); make room or rights") from None


def load_watch(folder: str | os.PathLike[str], dtype: str) -> WatchRecord | None:
    """None when the mapper was checked without one. Raises ArtifactError when it is damaged."""
    path = watch_file(folder, dtype)
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata, probes = file.metadata() or {}, file.get_tensor(_PROBES)
        if metadata["checksum"] != _checksum(metadata[_ABOUT], probes):
            raise ArtifactError(f"{path}: damaged; {_REMEDY}")
        about = json.loads(metadata[_ABOUT])
        fields = about["relation"]
        relation = Relation(
            tuple((float(b1), float(b2)) for b1, b2 in fields["draws"]),
            tuple(fields["at_gate"]),
            fields["threshold"],
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); {_REMEDY}") from None
    return WatchRecord(about["mapper_digest"], relation, probes, about["check_id"])


def _checksum(about: str, probes: torch.Tensor) -> str:
    digest = xxhash.xxh3_128(about.encode())
    digest.update(probes.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
