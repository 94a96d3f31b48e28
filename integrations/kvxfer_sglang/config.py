"""The operator's settings, and which model of the family the running engine is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ConfigError, ModelError
from kvstore_xfer.models.description import describe
from kvxfer_sglang.plugin import CONFIG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore_xfer.family import Family, ModelEntry
    from kvstore_xfer.models.description import ModelDescription

# Keys that SGLang itself reads and leaves in the extra config.
_SGLANG_KEYS = {"backend_name", "module_path", "class_name", "interface_v1"}


@dataclass(frozen=True)
class Settings:
    """`manifest` is the family manifest, `member` the name of this model in it, when given."""

    manifest: Path
    member: str | None = None


def read_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Settings from SGLang's extra config, the manifest else from ``KVXFER_CONFIG``.

    Raises ConfigError when a key is unknown or no manifest is named.
    """
    given = {k: v for k, v in (extra_config or {}).items() if k not in _SGLANG_KEYS}
    manifest = given.pop("family", None) or os.environ.get(CONFIG_VARIABLE)
    member = given.pop("model", None)
    if given:
        raise ConfigError(f"extra config: unknown {sorted(given)}; known: family, model")
    if not manifest:
        raise ConfigError(
            f"extra config: no family; give 'family': '/path/family.yaml' or set {CONFIG_VARIABLE}"
        )
    return Settings(Path(manifest), member)


def recognise(
    family: Family, folder: Path, model: ModelDescription, path: str, revision: str | None
) -> str | None:
    """The family's name for an engine's model, by its path, else by its fingerprint; or None.

    `folder` is the manifest's. Only local folders are compared by fingerprint: asking a hub for
    a sibling would delay the engine's start.
    """
    for name, entry in family.models.items():
        if _same_place(entry, folder, path, revision):
            return name
    for name, entry in family.models.items():
        if _fingerprint(folder / entry.path) == model.fingerprint():
            return name
    return None


def _same_place(entry: ModelEntry, folder: Path, path: str, revision: str | None) -> bool:
    local = folder / entry.path
    if local.is_dir():
        return Path(path).is_dir() and local.resolve() == Path(path).resolve()
    return (entry.path, entry.revision) == (path, revision)


def _fingerprint(path: Path) -> str | None:
    if not path.is_dir():
        return None
    try:
        return describe(path).fingerprint()
    except ModelError:
        return None
