"""Blocks in Mooncake Store, SGLang's own distributed tier, through its Python package.

One value a block, under its key. The client lives in this process and may lend memory to the pool
(`segment`). A listing needs the master's admin port; it tells no times, so that a scan gives its
own.
"""

from __future__ import annotations

import ctypes
import socket
import time
import urllib.request
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.store.base import BlockStat, WriteStatus
from kvstore_xfer.store.remote.driver import Capacity, Fetched, RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.store.remote.driver import Frame
    from kvstore_xfer.store.remote.mooncake_url import MooncakeOptions

_OK, _NO_SPACE, _NOT_FOUND = 0, -200, -704
_CONNECT_SECONDS = 2.0
_ATTEMPTS = 6
_PAUSE_SECONDS = 0.02


class MooncakeDriver:
    """See the module docstring. Raises RemoteError when the master cannot be reached."""

    parallel = 8

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        host, port = options.master
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            raise RemoteError(f"no master at {host}:{port}: {error.strerror or error}") from error
        self._store = _load()()
        code = self._store.setup(
            options.host,
            options.metadata,
            options.segment_bytes,
            options.buffer_bytes,
            options.protocol,
            options.devices,
            f"{host}:{port}",
        )
        if code:
            raise RemoteError(f"the client could not be set up (code {code})")

    def exists(self, keys: Sequence[str]) -> list[bool]:
        answers = self._store.batch_is_exist([self._name(key) for key in keys])
        if any(answer < 0 for answer in answers):
            raise RemoteError("the master does not answer")
        return [answer == 1 for answer in answers]

    def fetch(self, keys: Sequence[str]) -> list[Fetched | None]:
        return [self._fetch(key) for key in keys]

    def put(self, frames: Sequence[Frame], *, overwrite: bool) -> list[WriteStatus]:
        return [self._put(frame, overwrite=overwrite) for frame in frames]

    def remove(self, keys: Sequence[str]) -> list[bool]:
        return [self._remove(key) for key in keys]

    def remove_version(self, key: str, version: object) -> None:
        found = self._fetch(key)
        if found is not None and found.version == version:
            self._remove(key)

    def scan(self, prefix: str) -> Iterator[BlockStat]:
        start = self._name(prefix)
        now = time.time()
        for name in self._names():
            size = self._store.get_size(name) if name.startswith(start) else -1
            if size >= 0:
                yield BlockStat(name[len(self._options.prefix) :], size, now, now)

    def capacity(self) -> Capacity:
        return Capacity()

    def close(self) -> None:
        self._store.close()

    def _fetch(self, key: str) -> Fetched | None:
        """An empty answer is an absence, or a value that is being replaced: the master says."""
        for attempt in range(_ATTEMPTS):
            raw = self._store.get(self._name(key))
            if raw:
                return Fetched([memoryview(raw)], xxhash.xxh3_64_intdigest(raw))
            if not self.exists([key])[0]:
                return None
            time.sleep(_PAUSE_SECONDS * attempt)
        raise RemoteError("a value could not be read")

    def _put(self, frame: Frame, *, overwrite: bool) -> WriteStatus:
        if not overwrite and self.exists([frame.key])[0]:  # a second put would be silent
            return WriteStatus.EXISTS
        call = self._store.upsert_parts if overwrite else self._store.put_parts
        parts = [part for part in (frame.header, frame.payload) if part]
        code = call(self._name(frame.key), *parts)
        if code == _NO_SPACE:
            return WriteStatus.FULL
        if code != _OK:
            raise RemoteError(f"a value could not be stored (code {code})")
        return WriteStatus.STORED

    def _remove(self, key: str) -> bool:
        code = self._store.remove(self._name(key), True)
        if code not in (_OK, _NOT_FOUND):
            raise RemoteError(f"a value could not be removed (code {code})")
        return bool(code == _OK)

    def _names(self) -> list[str]:
        address = f"{self._options.admin}/get_all_keys"
        try:
            with urllib.request.urlopen(address, timeout=self._options.timeout) as answer:
                text: str = answer.read().decode()
        except (OSError, ValueError) as error:
            raise RemoteError(f"no listing from {address}: {error}") from error
        return text.split()

    def _name(self, key: str) -> str:
        return self._options.prefix + key


def _load() -> Any:
    # The wheel's library wants CUDA's runtime even for TCP; torch's packages bring it along.
    spec = find_spec("nvidia.cuda_runtime") if find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or () if spec else ():
        with suppress(OSError):
            ctypes.CDLL(str(Path(folder, "lib", "libcudart.so.12")), ctypes.RTLD_GLOBAL)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"store mooncake: {error}; pip install 'kvstore-xfer[mooncake]', and on Debian "
            "apt-get install libibverbs1 libnuma1"
        ) from error
    return MooncakeDistributedStore
