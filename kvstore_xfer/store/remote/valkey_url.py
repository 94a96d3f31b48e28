"""``valkey://[user@]host[:port][,host...][/database]?parameter=...``, and ``valkeys`` over TLS.

``redis`` and ``rediss`` mean the same. A password is never part of the URL: it is read from the
environment variable that ``password_env`` names (``KVXFER_VALKEY_PASSWORD`` when it is set), or
from the file ``password_file``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.store.parameters import Parameters, shown

if TYPE_CHECKING:
    from pathlib import Path

PASSWORD_VARIABLE = "KVXFER_VALKEY_PASSWORD"
_PARAMETERS = (
    "prefix", "ttl", "timeout", "part_size", "cluster",
    "password_env", "password_file", "ca", "certificate", "key",
)  # fmt: skip
_PORT = 6379


@dataclass(frozen=True)
class ValkeyOptions:
    """Where the server is and how blocks are kept there; `timeout` in seconds."""

    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    cluster: bool = False
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    prefix: str = "kvxfer:"
    ttl_ms: int = 0
    timeout: float = 5.0
    part_bytes: int = 4 << 20
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


def options_of(url: str, base: Path | None = None, *, secrets: bool = True) -> ValkeyOptions:
    """Raises ConfigError for a wrong URL or a secret that cannot be read."""
    parameters = Parameters(url, _PARAMETERS, base)
    database = parameters.parts.path.strip("/") or "0"
    if not database.isdecimal() or parameters.parts.fragment:
        raise ConfigError(f"store {shown(url)!r}: expected {parameters.scheme}://host:port/number")
    user, hosts = parameters.hosts(_PORT)
    cluster = parameters.flag("cluster", default=len(hosts) > 1)
    if len(hosts) > 1 and not cluster:
        raise ConfigError(f"store {shown(url)!r}: several hosts are a cluster; remove cluster=no")
    if cluster and database != "0":
        raise ConfigError(f"store {shown(url)!r}: a cluster has only database 0; remove it")
    prefix = parameters.text("prefix", "kvxfer:")
    if "{" in prefix or "}" in prefix:
        raise ConfigError(f"store {shown(url)!r}: parameter 'prefix': must not contain braces")
    tls = parameters.scheme in ("valkeys", "rediss")
    files = {name: parameters.file(name) for name in ("ca", "certificate", "key")}
    if any(files.values()) and not tls:
        raise ConfigError(f"store {shown(url)!r}: certificates need valkeys:// (TLS)")
    return ValkeyOptions(
        hosts=hosts,
        tls=tls,
        cluster=cluster,
        database=int(database),
        user=user,
        password=parameters.secret("password", PASSWORD_VARIABLE) if secrets else None,
        prefix=prefix,
        ttl_ms=int(1000 * parameters.seconds("ttl", 0.0)),
        timeout=parameters.seconds("timeout", 5.0, least=0.01),
        part_bytes=parameters.size("part_size", 4 << 20, least=1024),
        **files,
    )
