"""Blocks in Valkey or Redis, a single server or a cluster.

A block is one hash, so that it appears, expires and is evicted as a whole::

    <prefix>{<block key>}    h  header, padded
                             m  size, created, stored (`_META`), read by scans
                             v  random, changes with every write
                             0, 1, ...  the payload in parts of at most `part_size` bytes

It is written under a temporary name that expires by itself, then renamed. The braces keep both
names in one slot of a cluster. Commands needed (ACL): ``exists hset hget hgetall rename renamenx
pexpire persist unlink scan object info ping`` and, for a cluster, ``cluster``.
"""

from __future__ import annotations

import struct
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.store.base import BlockStat, WriteStatus
from kvstore_xfer.store.remote.driver import Capacity, Fetched, RemoteError

try:
    from valkey import ConnectionPool, SSLConnection, Valkey
    from valkey.backoff import NoBackoff
    from valkey.cluster import ClusterNode, ValkeyCluster
    from valkey.exceptions import ResponseError, ValkeyError
    from valkey.retry import Retry
except ImportError as error:
    raise ConfigError(f"store valkey: {error}; pip install 'kvstore-xfer[valkey]'") from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.store.remote.driver import Frame
    from kvstore_xfer.store.remote.valkey_url import ValkeyOptions

_META = struct.Struct("<Qdd")
_TEMPORARY_MS = 60_000
_FULL_SECONDS = 1.0
_SCAN_COUNT = 1000
_TOGETHER_BYTES = 16 << 20
_SOCKET_READ_BYTES = 1 << 20
_FIXED_FIELDS = (b"h", b"m", b"v")


class ValkeyDriver:
    """See the module docstring. Raises RemoteError when the server cannot be reached."""

    parallel = 8

    def __init__(self, options: ValkeyOptions) -> None:
        self._prefix = options.prefix
        self._part_bytes = options.part_bytes
        self._ttl_ms = options.ttl_ms
        self._cluster = options.cluster
        self._full_until = 0.0
        with _translated():
            self._client: Any = _connect(options)
            self._client.ping()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [answer == 1 for answer in self._pipeline(("EXISTS", self._name(k)) for k in keys)]

    def fetch(self, keys: Sequence[str]) -> list[Fetched | None]:
        answers = self._pipeline(("HGETALL", self._name(key)) for key in keys)
        return [_fetched(answer) for answer in answers]

    def put(self, frames: Sequence[Frame], *, overwrite: bool) -> list[WriteStatus]:
        return [
            status
            for group in _groups(frames)
            for status in self._put_together(group, overwrite=overwrite)
        ]

    def remove(self, keys: Sequence[str]) -> list[bool]:
        return [answer == 1 for answer in self._pipeline(("UNLINK", self._name(k)) for k in keys)]

    def remove_version(self, key: str, version: object) -> None:
        """By a rename first: whoever replaced the block meanwhile gets it back."""
        name, aside = self._name(key), self._temporary(key)
        moved, found = self._pipeline([("RENAME", name, aside), ("HGET", aside, "v")], errors=True)
        if isinstance(moved, Exception):
            return  # gone already
        if found != version:
            self._pipeline([("RENAMENX", aside, name)])
        self._pipeline([("UNLINK", aside)])

    def scan(self, prefix: str) -> Iterator[BlockStat]:
        pattern = _escaped(f"{self._prefix}{{{prefix}") + "*}"
        names: list[bytes] = []
        seen: set[bytes] = set()
        with _translated():
            for name in self._client.scan_iter(match=pattern, count=_SCAN_COUNT):
                if name in seen:
                    continue
                seen.add(name)
                names.append(name)
                if len(names) == _SCAN_COUNT:
                    yield from self._rows(names)
                    names = []
            yield from self._rows(names)

    def capacity(self) -> Capacity:
        """Of all servers of a cluster together."""
        with _translated():
            infos = self._infos("memory", "maxmemory"), self._infos("stats", "evicted_keys")
        limit, evicted = sum(infos[0]), sum(infos[1])
        return Capacity(limit or None, evicted)

    def close(self) -> None:
        self._client.close()

    def _put_together(self, frames: list[Frame], *, overwrite: bool) -> list[WriteStatus]:
        """Two exchanges: the content under temporary names, then the renames of what arrived."""
        if time.monotonic() < self._full_until:  # the server said so a moment ago: send nothing
            return [WriteStatus.FULL] * len(frames)
        temporary = [self._temporary(frame.key) for frame in frames]
        commands = [
            self._content(frame, name) for frame, name in zip(frames, temporary, strict=True)
        ]
        answers = iter(self._pipeline([c for part in commands for c in part], errors=True))
        refusals = [_first_refusal([next(answers) for _ in part]) for part in commands]
        renames: list[tuple[Any, ...]] = []
        for frame, name, refusal in zip(frames, temporary, refusals, strict=True):
            if refusal is None:
                renames += self._publication(frame, name, overwrite=overwrite)
        answers = iter(self._pipeline(renames, errors=True))
        statuses = []
        for refusal in refusals:
            moved = refusal or [next(answers), next(answers)][0]
            statuses.append(self._status(moved))
        rest = zip(temporary, statuses, strict=True)
        self._pipeline([("UNLINK", name) for name, s in rest if s is not WriteStatus.STORED])
        return statuses

    def _content(self, frame: Frame, name: bytes) -> list[tuple[Any, ...]]:
        meta = _META.pack(frame.size, frame.created, time.time())
        commands: list[tuple[Any, ...]] = [
            ("HSET", name, "h", frame.header, "m", meta, "v", uuid.uuid4().bytes),
            ("PEXPIRE", name, _TEMPORARY_MS),
        ]
        payload = memoryview(frame.payload)
        for number, start in enumerate(range(0, len(payload), self._part_bytes)):
            part = payload[start : start + self._part_bytes]
            commands.append(("HSET", name, str(number), part))
        return commands

    def _publication(
        self, frame: Frame, temporary: bytes, *, overwrite: bool
    ) -> list[tuple[Any, ...]]:
        """Until its expiry is set right the block lives a minute: a dead writer leaves nothing."""
        name = self._name(frame.key)
        lasting = ("PEXPIRE", name, self._ttl_ms) if self._ttl_ms else ("PERSIST", name)
        return [("RENAME" if overwrite else "RENAMENX", temporary, name), lasting]

    def _status(self, moved: Any) -> WriteStatus:
        """What the answer to a rename, or the refusal that came before it, means."""
        if isinstance(moved, ResponseError):
            return self._refusal(moved)
        if isinstance(moved, Exception):
            raise RemoteError(str(moved)) from moved
        return WriteStatus.EXISTS if moved == 0 else WriteStatus.STORED

    def _refusal(self, refusal: Exception) -> WriteStatus:
        if "maxmemory" not in str(refusal):
            raise RemoteError(f"refused: {refusal}")
        self._full_until = time.monotonic() + _FULL_SECONDS
        return WriteStatus.FULL

    def _rows(self, names: Sequence[bytes]) -> Iterator[BlockStat]:
        metas = self._pipeline(("HGET", name, "m") for name in names)
        idle = self._pipeline((("OBJECT", "IDLETIME", name) for name in names), errors=True)
        now = time.time()
        for name, meta, seconds in zip(names, metas, idle, strict=True):
            if meta is None or len(meta) != _META.size:
                continue  # expired meanwhile, or not ours
            size, created, stored = _META.unpack(meta)
            # No idle time under an LFU policy; a scan itself does not count as a use.
            used = now - seconds if isinstance(seconds, int) else stored
            key = name[len(self._prefix) + 1 : -1].decode(errors="replace")
            yield BlockStat(key, size, created, max(stored, used))

    def _pipeline(self, commands: Any, *, errors: bool = False) -> list[Any]:
        """The answers of commands sent together; refusals among them only with `errors`."""
        commands = list(commands)
        if not commands:
            return []
        with _translated():
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = pipeline.execute(raise_on_error=not errors)
        return answers

    def _infos(self, section: str, field: str) -> list[int]:
        client: Any = self._client
        if not self._cluster:
            return [int(client.info(section)[field])]
        nodes = client.get_primaries()
        return [int(client.info(section, target_nodes=node)[field]) for node in nodes]

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}{{{key}}}".encode()

    def _temporary(self, key: str) -> bytes:
        return f"{self._prefix}{{{key}}}:{uuid.uuid4().hex}".encode()


def _connect(options: ValkeyOptions) -> Any:
    shared: dict[str, Any] = {
        "username": options.user,
        "password": options.password,
        "socket_timeout": options.timeout,
        "socket_connect_timeout": min(1.0, options.timeout),
        "socket_keepalive": True,
    }
    tls = {
        "ssl_ca_certs": options.ca,
        "ssl_certfile": options.certificate,
        "ssl_keyfile": options.key,
    }
    if options.cluster:
        node: Any = ClusterNode  # untyped
        extra: dict[str, Any] = {"ssl": True, **tls} if options.tls else {}
        return ValkeyCluster(
            startup_nodes=[node(host, port) for host, port in options.hosts],
            require_full_coverage=False,
            cluster_error_retry_attempts=1,
            **shared,
            **extra,
        )
    host, port = options.hosts[0]
    kind: dict[str, Any] = {"connection_class": SSLConnection, **tls} if options.tls else {}
    pool = ConnectionPool(
        host=host,
        port=port,
        db=options.database,
        socket_read_size=_SOCKET_READ_BYTES,
        # A connection that the server closed while it was idle is not a failure.
        retry=Retry(NoBackoff(), 1),
        **shared,
        **kind,
    )
    return Valkey(connection_pool=pool)


@contextmanager
def _translated() -> Iterator[None]:
    """Messages of the client name hosts and commands, never the password."""
    try:
        yield
    except (ValkeyError, OSError) as error:
        raise RemoteError(f"{type(error).__name__}: {error}") from error


def _first_refusal(answers: Sequence[Any]) -> Exception | None:
    return next((answer for answer in answers if isinstance(answer, Exception)), None)


def _groups(frames: Sequence[Frame]) -> Iterator[list[Frame]]:
    """Runs of frames that are sent together."""
    group: list[Frame] = []
    size = 0
    for frame in frames:
        if group and size + frame.size > _TOGETHER_BYTES:
            yield group
            group, size = [], 0
        group.append(frame)
        size += frame.size
    if group:
        yield group


def _fetched(fields: Any) -> Fetched | None:
    if not isinstance(fields, dict):  # a raw reply: field, value, field, value, ...
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    if not fields:
        return None
    numbers = sorted(int(name) for name in fields if name not in _FIXED_FIELDS and name.isdigit())
    parts = [fields.get(b"h", b""), *(fields[str(number).encode()] for number in numbers)]
    return Fetched([memoryview(part) for part in parts], fields.get(b"v"))


def _escaped(text: str) -> str:
    """A glob pattern that matches this text only."""
    return "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in text)
