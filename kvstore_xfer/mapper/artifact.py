"""The mapper folder: ``mapper.safetensors`` and ``manifest.json``.

Both are covered byte for byte. The manifest names the sha256 of the weights file and carries a
digest of itself; it is written in one canonical form, so that a file that parses to the right
values but differs in one byte is refused too. The gate's records are inside that digest.

Two digests, because checking a mapper again must not orphan the blocks it made: `mapper_digest`
names the maps (weights, method, layers, both models) and is what keys and gate records use;
``digest`` seals the whole artifact.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvstore_xfer.errors import ArtifactError
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method
from kvstore_xfer.models.description import ModelDescription

if TYPE_CHECKING:
    import os

    import torch

WEIGHTS_FILE = "mapper.safetensors"
MANIFEST_FILE = "manifest.json"
FORMAT = 1
_REMEDY = "fit the pair again with 'kvxfer fit'"


@dataclass(frozen=True)
class Artifact:
    """A mapper with everything that is known about it.

    `fit` says how it was made (ridge, calibration digest, library versions); `gate` maps a KV
    dtype to the record of its latest check.
    """

    mapper: Mapper
    fit: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, dict[str, Any]] = field(default_factory=dict)


def save(folder: str | os.PathLike[str], artifact: Artifact) -> Artifact:
    """Write the folder; a reader sees the old manifest or the new one, never half of it.

    Returns the artifact with the mapper's digest filled in.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    partial = path / f"{WEIGHTS_FILE}.partial"
    save_file(_tensors(artifact.mapper), partial)
    weights_digest = _file_digest(partial)
    partial.replace(path / WEIGHTS_FILE)
    description = _describe(artifact.mapper, weights_digest)
    mapper = replace(artifact.mapper, digest=_digest(description)[:32])
    _write_manifest(path, description, replace(artifact, mapper=mapper))
    return replace(artifact, mapper=mapper)


def record_gate(folder: str | os.PathLike[str], dtype: str, record: dict[str, Any]) -> None:
    """Put the record of a check into the manifest, in place of an earlier one for this dtype."""
    path = Path(folder)
    artifact = load(path)
    description = _describe(artifact.mapper, _file_digest(path / WEIGHTS_FILE))
    gate = {**artifact.gate, dtype: record}
    _write_manifest(path, description, replace(artifact, gate=gate))


def load(folder: str | os.PathLike[str]) -> Artifact:
    """Read and verify a mapper folder.

    Raises
    ------
    ArtifactError
        A file is missing, of another format, or differs in any byte from what was written.
    """
    path = Path(folder)
    manifest = _read_manifest(path)
    weights_path = path / WEIGHTS_FILE
    try:
        digest = _file_digest(weights_path)
    except OSError as error:
        raise ArtifactError(f"{weights_path}: {error.strerror}; {_REMEDY}") from None
    if digest != manifest["mapper"]["weights_sha256"]:
        raise ArtifactError(
            f"{weights_path}: does not match the digest in {MANIFEST_FILE} (damaged); {_REMEDY}"
        )
    try:
        tensors = load_file(weights_path)
        mapper = _assemble(manifest["mapper"], tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{weights_path}: {error}; {_REMEDY}") from None
    mapper = replace(mapper, digest=_digest(manifest["mapper"])[:32])
    mapper.validate()
    return Artifact(mapper, manifest["fit"], manifest["gate"])


def _tensors(mapper: Mapper) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, layers in (("keys", mapper.keys), ("values", mapper.values)):
        for index, layer in enumerate(layers):
            tensors[f"{name}.{index}.weight"] = layer.weight.contiguous()
            tensors[f"{name}.{index}.bias"] = layer.bias.contiguous()
    return tensors


def _describe(mapper: Mapper, weights_digest: str) -> dict[str, Any]:
    return {
        "method": mapper.method.value,
        "head_assignment": list(mapper.head_assignment),
        "key_layers": [list(layer.source_layers) for layer in mapper.keys],
        "value_layers": [list(layer.source_layers) for layer in mapper.values],
        "source": mapper.source.to_json(),
        "target": mapper.target.to_json(),
        "weights_sha256": weights_digest,
    }


def _assemble(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Mapper:
    def layers(name: str, chosen: list[list[int]]) -> tuple[LayerMap, ...]:
        return tuple(
            LayerMap(
                tuple(sources), tensors[f"{name}.{index}.weight"], tensors[f"{name}.{index}.bias"]
            )
            for index, sources in enumerate(chosen)
        )

    return Mapper(
        method=Method(description["method"]),
        source=ModelDescription.from_json(description["source"]),
        target=ModelDescription.from_json(description["target"]),
        head_assignment=tuple(description["head_assignment"]),
        keys=layers("keys", description["key_layers"]),
        values=layers("values", description["value_layers"]),
    )


def _write_manifest(path: Path, description: dict[str, Any], artifact: Artifact) -> None:
    body = {
        "format": FORMAT,
        "mapper": description,
        "mapper_digest": artifact.mapper.digest,
        "fit": artifact.fit,
        "gate": artifact.gate,
    }
    text = _canonical({**body, "digest": _digest(body)})
    partial = path / f"{MANIFEST_FILE}.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(path / MANIFEST_FILE)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    try:
        text = file.read_bytes().decode("utf-8")
        manifest: dict[str, Any] = json.loads(text)
        body = {name: value for name, value in manifest.items() if name != "digest"}
        intact = manifest["digest"] == _digest(body) and text == _canonical(manifest)
    except OSError as error:
        raise ArtifactError(f"{file}: {error.strerror}; {_REMEDY}") from None
    except (ValueError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise ArtifactError(f"{file}: does not match its own digest (damaged); {_REMEDY}")
    if manifest["format"] != FORMAT:
        raise ArtifactError(f"{file}: format {manifest['format']}, known: {FORMAT}; {_REMEDY}")
    return manifest


def _canonical(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
