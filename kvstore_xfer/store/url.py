"""Opening a store by URL.

``local:///absolute/folder?max_size=50GiB&min_free=1GiB``; ``local:folder`` is relative to `base`.
A bare path is refused: it would turn every misspelt scheme into a folder. Other schemes come from
packages that register a factory, called with the URL, in the entry-point group
``kvstore_xfer.stores``.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore_xfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from importlib.metadata import EntryPoint

    from kvstore_xfer.store.base import BlockStore

ENTRY_POINT_GROUP = "kvstore_xfer.stores"
_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{suffix}": int(base**power)
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def open_store(url: str, *, base: Path | None = None) -> BlockStore:
    """Open the store that `url` names; `base` (default: the working folder) anchors paths.

    Raises ConfigError for a wrong URL, StoreError when the store cannot be used.
    """
    plugin = _plugin(url)
    if plugin is None:
        from kvstore_xfer.store.local.store import LocalStore

        return LocalStore(**_local_options(url, base))
    factory: Callable[[str], BlockStore] = plugin.load()
    return factory(url)


def check_url(url: str) -> None:
    """Raises ConfigError for a wrong URL, as `open_store` would, without opening anything."""
    if _plugin(url) is None:
        _local_options(url, None)


def local_folder(url: str) -> Path | None:
    """The folder of a `local` URL, None for other schemes. Raises ConfigError for a wrong URL."""
    if _plugin(url) is not None:
        return None
    folder: Path = _local_options(url, None)["root"]
    return folder


def _plugin(url: str) -> EntryPoint | None:
    """The entry point of the URL's scheme, None for the built-in `local`."""
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise ConfigError(f"store {url!r}: not a URL; write local:///absolute/folder")
    if scheme == "local":
        return None
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if scheme not in plugins:
        known = ", ".join(sorted({"local", *plugins}))
        raise ConfigError(f"store {url!r}: unknown scheme {scheme!r}; known: {known}")
    return plugins[scheme]


def query_parameters(url: str, allowed: Collection[str]) -> dict[str, str]:
    """The parameters behind the ``?``. Raises ConfigError for one that is unknown or repeated."""
    pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    parameters: dict[str, str] = {}
    for name, value in pairs:
        if name not in allowed:
            names = ", ".join(sorted(allowed))
            raise ConfigError(f"store {url!r}: unknown parameter {name!r}; allowed: {names}")
        if name in parameters:
            raise ConfigError(f"store {url!r}: parameter {name!r} is given twice; give it once")
        parameters[name] = value
    return parameters


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``500MB`` or ``50GiB``. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]?i?B?)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 4096, 500MB or 50GiB")
    return int(match[1]) * _UNITS[match[2]]


def _local_options(url: str, base: Path | None) -> dict[str, Any]:
    """Arguments of `LocalStore`."""
    from kvstore_xfer.store.local.store import DEFAULT_MAX_BYTES, DEFAULT_MIN_FREE_BYTES

    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or parts.fragment or not path or "\0" in path:
        raise ConfigError(f"store {url!r}: expected local:///absolute/folder")
    parameters = query_parameters(url, ("max_size", "min_free"))
    return {
        "root": (base or Path.cwd()) / path,
        "max_bytes": _size(url, parameters, "max_size", DEFAULT_MAX_BYTES),
        "min_free_bytes": _size(url, parameters, "min_free", DEFAULT_MIN_FREE_BYTES),
    }


def _size(url: str, parameters: dict[str, str], name: str, default: int) -> int:
    if name not in parameters:
        return default
    try:
        size = parse_size(parameters[name])
    except ValueError as error:
        raise ConfigError(f"store {url!r}: parameter {name!r}: {error}") from None
    if name == "max_size" and not size:
        raise ConfigError(f"store {url!r}: parameter 'max_size': must be more than 0")
    return size
