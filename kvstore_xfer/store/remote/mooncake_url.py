"""``mooncake://master[:port]?metadata=http://host:8080/metadata&segment=4GiB&...``.

`host` is the address under which other clients reach this process. It differs between machines that
share a manifest, so it may come from the environment instead (`HOST_VARIABLE`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.store.parameters import Parameters, shown

if TYPE_CHECKING:
    from pathlib import Path

_PARAMETERS = (
    "metadata", "admin", "segment", "buffer", "host", "protocol", "devices", "prefix", "timeout",
)  # fmt: skip
HOST_VARIABLE = "KVXFER_MOONCAKE_HOST"
_PORT, _METADATA_PORT, _ADMIN_PORT = 50051, 8080, 9003


@dataclass(frozen=True)
class MooncakeOptions:
    """`segment_bytes` are lent to the pool, `buffer_bytes` are this client's own."""

    master: tuple[str, int]
    metadata: str
    admin: str
    host: str
    segment_bytes: int = 0
    buffer_bytes: int = 256 << 20
    protocol: str = "tcp"
    devices: str = ""
    prefix: str = ""
    timeout: float = 5.0


def options_of(url: str, base: Path | None = None, *, secrets: bool = True) -> MooncakeOptions:
    """Raises ConfigError for a wrong URL; it names no files and no secrets."""
    del base, secrets
    parameters = Parameters(url, _PARAMETERS)
    user, hosts = parameters.hosts(_PORT)
    if user is not None or len(hosts) != 1 or parameters.parts.path.strip("/"):
        raise ConfigError(f"store {shown(url)!r}: expected mooncake://master:{_PORT}")
    master = hosts[0][0]
    protocol = parameters.text("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise parameters.wrong("protocol", f"{protocol!r} is neither tcp nor rdma")
    return MooncakeOptions(
        master=hosts[0],
        metadata=parameters.text("metadata", f"http://{master}:{_METADATA_PORT}/metadata"),
        admin=parameters.text("admin", f"http://{master}:{_ADMIN_PORT}").rstrip("/"),
        host=parameters.text("host", os.environ.get(HOST_VARIABLE) or "127.0.0.1"),
        segment_bytes=parameters.size("segment", 0),
        buffer_bytes=parameters.size("buffer", 256 << 20, least=16 << 20),
        protocol=protocol,
        devices=parameters.text("devices", ""),
        prefix=parameters.text("prefix", ""),
        timeout=parameters.seconds("timeout", 5.0, least=0.01),
    )
