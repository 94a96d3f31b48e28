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
from contextlib import contextmanager, suppress
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
    from collections.abc import Iterator

    import torch

WEIGHTS_FILE = "mapper.safetensors"
MANIFEST_FILE = "manifest.json"
PARTIAL = ".partial"
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

    Returns the artifact with the mapper's digest filled in. Raises ArtifactError when the folder
    cannot be written; what it held is then as it was.
    """
    path = Path(folder)
    with _written(path / WEIGHTS_FILE) as weights:
        save_tensors(_tensors(artifact.mapper), weights)
        description = _describe(artifact.mapper, _file_digest(weights))
        mapper = replace(artifact.mapper, digest=_digest(description)[:32])
        with _written(path / MANIFEST_FILE) as manifest:
            text = _manifest_text(description, replace(artifact, mapper=mapper))
            manifest.write_text(text, encoding="utf-8")
            weights.replace(path / WEIGHTS_FILE)
    return replace(artifact, mapper=mapper)


def save_tensors(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """For engines, which run as other users: safetensors alone writes for its own user only."""
    save_file(tensors, path, metadata=metadata)
    path.chmod(0o644)


def record_gate(folder: str | os.PathLike[str], dtype: str, record: dict[str, Any]) -> None:
    """Put the record of a check into the manifest, in place of an earlier one for this dtype.

    Raises ArtifactError when the folder cannot be read or written.
    """
    path = Path(folder)
    artifact = load(path)
    description = _describe(artifact.mapper, _file_digest(path / WEIGHTS_FILE))
    gate = {**artifact.gate, dtype: record}
    with _written(path / MANIFEST_FILE) as manifest:
        text = _manifest_text(description, replace(artifact, gate=gate))
        manifest.write_text(text, encoding="utf-8")


def load(folder: str | os.PathLike[str]) -> Artifact:
    """Read and verify a mapper folder.

    Raises
    ------
    ArtifactError
        A file is missing, of another format, or differs in any byte from what was written.
    """
    path = Path(folder)
    manifest = _read_manifest(path)
    description = manifest["mapper"]
    weights_path = path / WEIGHTS_FILE
    try:
        digest = _file_digest(weights_path)
    except OSError as error:
        raise ArtifactError(f"{weights_path}: {error.strerror}; {_REMEDY}") from None
    if digest != description["weights_sha256"]:
        raise ArtifactError(
            f"{weights_path}: does not match the digest in {MANIFEST_FILE} (damaged); {_REMEDY}"
        )
    try:
        tensors = load_file(weights_path)
        mapper = _assemble(description, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{weights_path}: {error}; {_REMEDY}") from None
    mapper = replace(mapper, digest=manifest["mapper_digest"])
    mapper.validate()
    return Artifact(mapper, manifest["fit"], manifest["gate"])


def checked_dtypes(folder: str | os.PathLike[str]) -> list[str]:
    """The KV dtypes that a mapper has records of checks for, from the manifest alone.

    Raises ArtifactError as `load` does, but does not look at the weights.
    """
    return sorted(_read_manifest(Path(folder))["gate"])


def _tensors(mapper: Mapper) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    if mapper.encoder is not None:
        tensors["encoder"] = mapper.encoder.contiguous()
    for name, layers in (("keys", mapper.keys), ("values", mapper.values)):
        for index, layer in enumerate(layers):
            tensors[f"{name}.{index}.weight"] = layer.weight.contiguous()
            tensors[f"{name}.{index}.bias"] = layer.bias.contiguous()
            for step, tensor in enumerate(layer.before):
                tensors[f"{name}.{index}.before.{step}"] = tensor.contiguous()
            if layer.first is not None:
                tensors[f"{name}.{index}.first"] = layer.first.contiguous()
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
                tuple(sources),
                tensors[f"{name}.{index}.weight"],
                tensors[f"{name}.{index}.bias"],
                _before(f"{name}.{index}.before.", tensors),
                tensors.get(f"{name}.{index}.first"),
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
        encoder=tensors.get("encoder"),
    )


def _before(prefix: str, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    count = sum(name.startswith(prefix) for name in tensors)
    return tuple(tensors[f"{prefix}{step}"] for step in range(count))


@contextmanager
def _written(file: Path) -> Iterator[Path]:
    """A path beside `file` to write to; it takes its place at the end, unless it did before.

    On an error nothing is left of it. Raises ArtifactError for what the file system refuses.
    """
    partial = file.with_name(file.name + PARTIAL)
    new = not file.parent.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.exists():
            partial.replace(file)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(
            f"{file}: cannot be written ({reason}); give a folder that can be written and has room"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
            if new:
                file.parent.rmdir()  # only if nothing was written


def _manifest_text(description: dict[str, Any], artifact: Artifact) -> str:
    body = {
        "format": FORMAT,
        "mapper": description,
        "mapper_digest": artifact.mapper.digest,
        "fit": artifact.fit,
        "gate": artifact.gate,
    }
    return _canonical({**body, "digest": _digest(body)})


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    try:
        text = file.read_bytes().decode("utf-8")
        manifest: dict[str, Any] = json.loads(text)
        body = {name: value for name, value in manifest.items() if name != "digest"}
        intact = (
            manifest["digest"] == _digest(body)
            and manifest["mapper_digest"] == _digest(manifest["mapper"])[:32]
            and text == _canonical(manifest)
            and {"weights_sha256"} <= manifest["mapper"].keys()
            and {"fit", "gate", "format"} <= manifest.keys()
        )
    except OSError as error:
        raise ArtifactError(f"{file}: {error.strerror}; {_REMEDY}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
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
