"""Blocks as objects in S3, Google Cloud Storage or Azure, through obstore.

One object a block, ``<prefix>/<block key>``: a put makes it visible as a whole. Without overwrite
the put is conditional (``If-None-Match: *``); objects above `part_size` are sent as multipart
uploads, which cannot be conditional, after a look whether the block is there. Every key is an
exchange of its own, so many are under way at once; the client lets other threads run meanwhile.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.store.base import BlockStat, WriteStatus
from kvstore_xfer.store.remote.driver import Capacity, Fetched, RemoteError

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import AzureStore, GCSStore, S3Store
except ImportError as error:
    raise ConfigError(f"store s3: {error}; pip install 'kvstore-xfer[s3]'") from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.store.remote.driver import Frame
    from kvstore_xfer.store.remote.objects_url import ObjectOptions

_MULTIPART_CHUNK = 8 << 20
_LISTED = 1000


class ObjectDriver:
    """See the module docstring. Raises RemoteError when the bucket cannot be listed."""

    parallel = 64

    def __init__(self, options: ObjectOptions) -> None:
        self._part_bytes = options.part_bytes
        with _translated():
            self._store = _connect(options)
            next(iter(obstore.list(self._store, chunk_size=1)), None)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [self._version(key) is not None for key in keys]

    def fetch(self, keys: Sequence[str]) -> list[Fetched | None]:
        return [self._fetch(key) for key in keys]

    def put(self, frames: Sequence[Frame], *, overwrite: bool) -> list[WriteStatus]:
        return [self._put(frame, overwrite=overwrite) for frame in frames]

    def remove(self, keys: Sequence[str]) -> list[bool]:
        there = self.exists(keys)
        gone = [key for key, known in zip(keys, there, strict=True) if known]
        if gone:
            with _translated():
                obstore.delete(self._store, gone)
        return there

    def remove_version(self, key: str, version: object) -> None:
        if self._version(key) == version:
            with _translated():
                obstore.delete(self._store, key)

    def scan(self, prefix: str) -> Iterator[BlockStat]:
        """Times are those of the put: a listing has no more."""
        folder = prefix.rpartition("/")[0]  # a store's own prefixes end at slashes
        with _translated():
            for chunk in obstore.list(self._store, folder or None, chunk_size=_LISTED):
                for row in chunk:
                    if row["path"].startswith(prefix):
                        stored = row["last_modified"].timestamp()
                        yield BlockStat(row["path"], row["size"], stored, stored)

    def capacity(self) -> Capacity:
        return Capacity()

    def close(self) -> None:
        """The client has nothing to close."""

    def _fetch(self, key: str) -> Fetched | None:
        with _translated(), suppress(FileNotFoundError):
            answer = obstore.get(self._store, key)
            return Fetched([memoryview(answer.bytes())], answer.meta["e_tag"])
        return None

    def _put(self, frame: Frame, *, overwrite: bool) -> WriteStatus:
        large = frame.size > self._part_bytes
        if large and not overwrite and self._version(frame.key) is not None:
            return WriteStatus.EXISTS
        with _translated():
            try:
                obstore.put(
                    self._store,
                    frame.key,
                    [frame.header, frame.payload] if large else frame.header + frame.payload,
                    mode="overwrite" if overwrite or large else "create",
                    use_multipart=large,
                    chunk_size=_MULTIPART_CHUNK,
                )
            except AlreadyExistsError:
                return WriteStatus.EXISTS
        return WriteStatus.STORED

    def _version(self, key: str) -> str | None:
        with _translated(), suppress(FileNotFoundError):
            return obstore.head(self._store, key)["e_tag"] or ""
        return None


def _connect(options: ObjectOptions) -> Any:
    """Credentials come from where each cloud's own tools take them: environment, files, machine."""
    # The store's own deadline ends a call; the client must not go on long after it.
    retry: Any = {
        "max_retries": 3,
        "retry_timeout": timedelta(seconds=options.timeout),
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }
    client: Any = {
        "timeout": timedelta(seconds=options.timeout),
        "connect_timeout": timedelta(seconds=min(2.0, options.timeout)),
        "allow_http": (options.endpoint or "").startswith("http://"),
    }
    shared: Any = {
        "prefix": options.prefix or None,
        "client_options": client,
        "retry_config": retry,
    }
    chosen: Any = {"endpoint": options.endpoint} if options.endpoint else {}
    if options.kind == "gs":
        return GCSStore(options.bucket, **shared)
    if options.kind == "az":
        if options.account:
            chosen["account_name"] = options.account
        return AzureStore(options.bucket, **shared, **chosen)
    if options.region:
        chosen["region"] = options.region
    return S3Store(options.bucket, **shared, **chosen)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise RemoteError("there is no such bucket") from error
    except (BaseError, ValueError, OSError) as error:
        raise RemoteError(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    """The client's messages go on with a dump of the request."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
