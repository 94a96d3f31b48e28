"""Opening a store by URL.

=========================================== ====================================================
URL                                         store
=========================================== ====================================================
``local:///folder?max_size=&min_free=``     a folder on a local disk; ``local:folder`` is relative
``valkey://host``, ``valkeys://host``       `remote/valkey_url.py`
``s3://bucket``, ``gs://``, ``az://``       `remote/objects_url.py`
=========================================== ====================================================

A bare path is refused: it would turn every misspelt scheme into a folder. Other schemes come from
packages that register a factory, called with the URL, in the entry-point group
``kvstore_xfer.stores``.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.store.parameters import Parameters, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore_xfer.store.base import BlockStore

ENTRY_POINT_GROUP = "kvstore_xfer.stores"
_LOCAL = "local"
# Modules with a function `opener(url, base)`; they import the engine's client only when opening.
_VALKEY = "kvstore_xfer.store.remote.valkey_url"
_OBJECTS = "kvstore_xfer.store.remote.objects_url"
_REMOTE = dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), _VALKEY)
_REMOTE |= dict.fromkeys(("s3", "gs", "az"), _OBJECTS)


def open_store(url: str, *, base: Path | None = None) -> BlockStore:
    """Open the store that `url` names; `base` (default: the working folder) anchors paths.

    Raises ConfigError for a wrong URL, StoreError when the store cannot be used.
    """
    return _opener(url, base)()


def check_url(url: str) -> None:
    """Raises ConfigError for a wrong URL, as `open_store` would, without opening anything."""
    _opener(url, None)


def local_folder(url: str) -> Path | None:
    """The folder of a `local` URL, None for other schemes. Raises ConfigError for a wrong URL."""
    if _scheme(url) != _LOCAL:
        _opener(url, None)
        return None
    folder: Path = _local_options(url, None)["root"]
    return folder


def _opener(url: str, base: Path | None) -> Callable[[], BlockStore]:
    scheme = _scheme(url)
    if scheme == _LOCAL:
        return partial(_open_local, _local_options(url, base))
    if scheme in _REMOTE:
        opener: Callable[[], BlockStore] = import_module(_REMOTE[scheme]).opener(url, base)
        return opener
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if scheme not in plugins:
        known = ", ".join(sorted({_LOCAL, *_REMOTE, *plugins}))
        raise ConfigError(f"store {shown(url)!r}: unknown scheme {scheme!r}; known: {known}")
    return lambda: plugins[scheme].load()(url)


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise ConfigError(f"store {shown(url)!r}: not a URL; write local:///absolute/folder")
    return scheme


def _open_local(options: dict[str, Any]) -> BlockStore:
    from kvstore_xfer.store.local.store import LocalStore

    return LocalStore(**options)


def _local_options(url: str, base: Path | None) -> dict[str, Any]:
    """Arguments of `LocalStore`."""
    from kvstore_xfer.store.local.store import DEFAULT_MAX_BYTES, DEFAULT_MIN_FREE_BYTES

    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or parts.fragment or not path or "\0" in path:
        raise ConfigError(f"store {url!r}: expected local:///absolute/folder")
    parameters = Parameters(url, ("max_size", "min_free"))
    return {
        "root": (base or Path.cwd()) / path,
        "max_bytes": parameters.size("max_size", DEFAULT_MAX_BYTES, least=1),
        "min_free_bytes": parameters.size("min_free", DEFAULT_MIN_FREE_BYTES),
    }
