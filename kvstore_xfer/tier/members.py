"""Which model of a family an engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_xfer.errors import ModelError
from kvstore_xfer.models.description import describe

if TYPE_CHECKING:
    from kvstore_xfer.family import Family, ModelEntry
    from kvstore_xfer.models.description import ModelDescription


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
