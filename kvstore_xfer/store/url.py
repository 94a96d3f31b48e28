"""Opening a store by URL.

=========================================== ====================================================
URL                                         store
=========================================== ====================================================
``local:///folder?max_size=&min_free=``     a folder on a local disk; ``local:folder`` is relative;
                                            ``more=/b:/c`` adds folders on other disks
``mooncake://master``                       `remote/mooncake_url.py`
``memory:?max_size=&name=``                 shared memory of this machine, for all its processes
``URL|URL|URL``                             levels, from fast to far (`tiered/store.py`)
``valkey://host``, ``valkeys://host``       `remote/valkey_url.py`
``s3://bucket``, ``gs://``, ``az://``       `remote/objects_url.py`
=========================================== ====================================================

A bare path is refused: it would turn every misspelt scheme into a folder. Other schemes come from
packages that register a factory, called with the URL, in the entry-point group
``kvstore_xfer.stores``.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from kvstore_xfer.errors import ConfigError, StoreError
from kvstore_xfer.store.parameters import Parameters, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore_xfer.store.base import BlockStore

ENTRY_POINT_GROUP = "kvstore_xfer.stores"
_LOCAL = "local"
_MEMORY = "memory"
_LEVELS = "|"
_MEMORY_FREE_BYTES = 4 << 20  # of /dev/shm, which is small in containers


class _Engine(NamedTuple):
    """Modules in `store/remote` whose function `options_of` reads a URL, and whose class `driver`
    talks to the engine; that one imports the engine's client."""

    urls: str
    module: str
    driver: str


_VALKEY = _Engine("valkey_url", "valkey", "ValkeyDriver")
_OBJECTS = _Engine("objects_url", "objects", "ObjectDriver")
_MOONCAKE = _Engine("mooncake_url", "mooncake", "MooncakeDriver")
_REMOTE = dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), _VALKEY)
_REMOTE |= dict.fromkeys(("s3", "gs", "az"), _OBJECTS)
_REMOTE |= {"mooncake": _MOONCAKE}


def open_store(url: str, *, base: Path | None = None) -> BlockStore:
    """Open the store that `url` names; `base` (default: the working folder) anchors paths.

    Raises ConfigError for a wrong URL, StoreError when the store cannot be used.
    """
    return _opener(url, base)()


def check_url(url: str) -> None:
    """Raises ConfigError for a wrong URL, as `open_store` would, without opening anything."""
    _opener(url, None)


def local_folders(url: str, base: Path | None = None) -> list[Path]:
    """The folders of this machine that a URL names, of all its levels: opening it makes them.

    Raises ConfigError for a wrong URL.
    """
    _opener(url, base)
    folders: list[Path] = []
    for level in map(str.strip, url.split(_LEVELS)):
        if _scheme(level) == _LOCAL:
            folders += _local_options(level, base)["roots"]
        elif _scheme(level) == _MEMORY:
            folders.append(_memory_folder(_memory_options(level)["name"]))
    return folders


def _opener(url: str, base: Path | None) -> Callable[[], BlockStore]:
    if _LEVELS in url:
        return partial(_open_levels, [_opener(level.strip(), base) for level in url.split(_LEVELS)])
    scheme = _scheme(url)
    if scheme == _LOCAL:
        return partial(_open_local, **_local_options(url, base))
    if scheme == _MEMORY:
        return partial(_open_memory, **_memory_options(url))
    if scheme in _REMOTE:
        _remote_module(_REMOTE[scheme].urls).options_of(url, base, secrets=False)
        return partial(_open_remote, url, base, _REMOTE[scheme])
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if scheme not in plugins:
        known = ", ".join(sorted({_LOCAL, _MEMORY, *_REMOTE, *plugins}))
        raise ConfigError(f"store {shown(url)!r}: unknown scheme {scheme!r}; known: {known}")
    return lambda: plugins[scheme].load()(url)


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise ConfigError(f"store {shown(url)!r}: not a URL; write local:///absolute/folder")
    return scheme


def _open_levels(openers: list[Callable[[], BlockStore]]) -> BlockStore:
    from kvstore_xfer.store.tiered.store import TieredStore

    with ExitStack() as opened:
        levels = [opened.enter_context(opener()) for opener in openers]
        store = TieredStore(levels)
        opened.pop_all()
        return store


def _open_remote(url: str, base: Path | None, engine: _Engine) -> BlockStore:
    from kvstore_xfer.store.remote.store import RemoteStore

    options = _remote_module(engine.urls).options_of(url, base)
    driver = getattr(_remote_module(engine.module), engine.driver)
    return RemoteStore(partial(driver, options), shown(url), options.timeout)


def _remote_module(name: str) -> Any:
    return import_module(f"kvstore_xfer.store.remote.{name}")


def _open_local(roots: list[Path], max_bytes: int, min_free_bytes: int) -> BlockStore:
    from kvstore_xfer.store.local.store import LocalStore
    from kvstore_xfer.store.tiered.striped import StripedStore

    share = max(1, max_bytes // len(roots))
    with ExitStack() as opened:
        stores = [
            opened.enter_context(LocalStore(root, max_bytes=share, min_free_bytes=min_free_bytes))
            for root in roots
        ]
        store = stores[0] if len(stores) == 1 else StripedStore(stores)
        opened.pop_all()
        return store


def _local_options(url: str, base: Path | None) -> dict[str, Any]:
    """Arguments of `_open_local`."""
    from kvstore_xfer.store.local.store import DEFAULT_MAX_BYTES, DEFAULT_MIN_FREE_BYTES

    parameters = Parameters(url, ("max_size", "min_free", "more"))
    parts = parameters.parts
    path = unquote(parts.path)
    more = [folder for folder in parameters.text("more", "").split(":") if folder]
    if parts.netloc or parts.fragment or not path or "\0" in path + "".join(more):
        raise ConfigError(f"store {url!r}: expected local:///absolute/folder")
    roots = [(base or Path.cwd()) / folder for folder in (path, *more)]
    if len(set(roots)) < len(roots):
        raise parameters.wrong("more", "a folder is named twice")
    return {
        "roots": roots,
        "max_bytes": parameters.size("max_size", DEFAULT_MAX_BYTES, least=1),
        "min_free_bytes": parameters.size("min_free", DEFAULT_MIN_FREE_BYTES),
    }


def _open_memory(name: str, max_bytes: int) -> BlockStore:
    """A local store whose folder is shared memory: the same index, locks and checksums."""
    from kvstore_xfer.store.local.store import LocalStore

    root = _memory_folder(name)
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        owner = root.stat(follow_symlinks=False)
    except OSError as error:
        raise StoreError(f"store 'memory:': {root}: {error.strerror}; mount /dev/shm") from None
    if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode):
        raise StoreError(f"store 'memory:': {root} belongs to another user; choose another name")
    return LocalStore(root, max_bytes=max_bytes, min_free_bytes=_MEMORY_FREE_BYTES)


def _memory_folder(name: str) -> Path:
    return Path(f"/dev/shm/kvxfer-{os.getuid()}-{name}")


def _memory_options(url: str) -> dict[str, Any]:
    parameters = Parameters(url, ("max_size", "name"))
    parts = parameters.parts
    name = parameters.text("name", "blocks")
    if (
        parts.netloc
        or parts.path
        or parts.fragment
        or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
    ):
        raise ConfigError(f"store {url!r}: expected memory:?max_size=4GiB&name=letters-and-digits")
    return {"name": name, "max_bytes": parameters.size("max_size", 1 << 30, least=1)}
