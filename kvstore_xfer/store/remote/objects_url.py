"""``s3://bucket[/prefix]``, ``gs://bucket[/prefix]``, ``az://container[/prefix]``.

Credentials are never part of the URL. They come from where each cloud's tools take them: for S3
``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY`` or the machine's role, for Google Cloud
``GOOGLE_APPLICATION_CREDENTIALS``, for Azure ``AZURE_STORAGE_ACCOUNT_KEY`` and its relatives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.store.parameters import Parameters, shown

if TYPE_CHECKING:
    from pathlib import Path

_ALLOWED = {
    "s3": ("endpoint", "region", "timeout", "part_size"),
    "gs": ("timeout", "part_size"),
    "az": ("endpoint", "account", "timeout", "part_size"),
}


@dataclass(frozen=True)
class ObjectOptions:
    """`kind` is the URL's scheme; objects above `part_bytes` are sent in parts."""

    kind: str
    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    account: str | None = None
    timeout: float = 10.0
    part_bytes: int = 64 << 20


def options_of(url: str, base: Path | None = None, *, secrets: bool = True) -> ObjectOptions:
    """Raises ConfigError for a wrong URL; it names no files and no secrets."""
    del base, secrets
    parameters = Parameters(url, _ALLOWED[url.partition(":")[0]])
    bucket = parameters.parts.netloc
    prefix = unquote(parameters.parts.path).strip("/")
    kind = parameters.scheme
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", bucket) or parameters.parts.fragment:
        raise ConfigError(f"store {shown(url)!r}: expected {kind}://bucket/prefix")
    if not re.fullmatch(r"[\w./=+@:-]*", prefix) or ".." in prefix or "//" in prefix:
        raise ConfigError(f"store {shown(url)!r}: {prefix!r} is not a prefix of object names")
    endpoint = parameters.http("endpoint")
    if endpoint is not None and "@" in endpoint:
        raise parameters.wrong("endpoint", "credentials belong in the environment")
    return ObjectOptions(
        kind=kind,
        bucket=bucket,
        prefix=prefix,
        endpoint=endpoint,
        region=parameters.text("region", "") or None,
        account=parameters.text("account", "") or None,
        timeout=parameters.seconds("timeout", 10.0, least=0.01),
        part_bytes=parameters.size("part_size", 64 << 20, least=5 << 20),
    )
