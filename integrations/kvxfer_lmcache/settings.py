"""The operator's settings: LMCache's ``adapter_params``, or its extra config in-process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_VARIABLE = "KVXFER_CONFIG"
# Longer than any healthy store takes; then a task is answered without it.
DEFAULT_SECONDS = {"lookup": 5.0, "load": 30.0, "store": 60.0}


@dataclass(frozen=True)
class Settings:
    """`manifest`: the family manifest; `seconds`: the longest that a task of each kind may take."""

    manifest: Path
    seconds: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_SECONDS))


def read_settings(given: Mapping[str, Any] | None) -> Settings:
    """Settings from `given`, the manifest else from ``KVXFER_CONFIG``.

    Raises ConfigError when a key is unknown, a time is none, or no manifest is named.
    """
    known = {"family", *(f"{kind}_seconds" for kind in DEFAULT_SECONDS)}
    params = dict(given or {})
    if set(params) - known:
        unknown = sorted(set(params) - known)
        raise ConfigError(f"adapter_params: unknown {unknown}; known: {', '.join(sorted(known))}")
    manifest = params.get("family") or os.environ.get(CONFIG_VARIABLE)
    if not manifest:
        raise ConfigError(
            'adapter_params: no family; give "family": "/path/family.yaml" or set '
            f"{CONFIG_VARIABLE}"
        )
    seconds = {
        kind: params.get(f"{kind}_seconds", DEFAULT_SECONDS[kind]) for kind in DEFAULT_SECONDS
    }
    for kind, value in seconds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(
                f"adapter_params: {kind}_seconds: {value!r} is no time; give seconds above 0"
            )
    return Settings(Path(str(manifest)), seconds)
