"""What LMCache's log says of this package when the server starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore_xfer.errors import ArtifactError
from kvstore_xfer.mapper.artifact import checked_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore_xfer.family import Family

_log = logging.getLogger(__name__)
_PACKAGES = ("kvstore_xfer", "kvxfer_lmcache")


def log_as(init_logger: Callable[[str], logging.Logger]) -> None:
    """Give our loggers the form of the engine's lines, unless the operator configured them."""
    for name in _PACKAGES:
        if not logging.getLogger(name).hasHandlers():
            init_logger(name)


def say_what_is_there(manifest: Path, family: Family) -> None:
    """Log family, store and pairs. On a thread: the first import for reading models is slow."""
    scheme, models = family.store.partition(":")[0], ", ".join(family.models)
    about = (family.family, manifest, scheme, models)
    _log.info("kvxfer: family %s (%s), %s store, models: %s", *about)
    for pair in family.pairs:
        folder = manifest.resolve().parent / pair.mapper
        name = f"pair {pair.source} -> {pair.target}"
        try:
            dtypes = ", ".join(checked_dtypes(folder))
        except ArtifactError as error:
            _log.warning("kvxfer: %s is off (mapper): %s", name, error)
            continue
        if not pair.policy.enabled:
            _log.info("kvxfer: %s is off (disabled): the manifest's policy says so", name)
        elif dtypes:
            _log.info("kvxfer: %s: %s, checked in %s", name, folder, dtypes)
        else:
            text = "kvxfer: %s is off (gate_missing): %s: never checked: run 'kvxfer check'"
            _log.warning(text, name, folder)
    import transformers.models.auto  # noqa: F401  # read here, not while the first prompt waits
