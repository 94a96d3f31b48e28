"""The operator's settings, and which model of the family the running engine is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ConfigError
from kvxfer_sglang.plugin import CONFIG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping


# Keys that SGLang itself reads and leaves in the extra config.
_SGLANG_KEYS = {"backend_name", "module_path", "class_name", "interface_v1"}


@dataclass(frozen=True)
class Settings:
    """`manifest` is the family manifest, `member` the name of this model in it, when given."""

    manifest: Path
    member: str | None = None


def read_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """Settings from SGLang's extra config, the manifest else from ``KVXFER_CONFIG``.

    Raises ConfigError when a key is unknown or no manifest is named.
    """
    given = {k: v for k, v in (extra_config or {}).items() if k not in _SGLANG_KEYS}
    manifest = given.pop("family", None) or os.environ.get(CONFIG_VARIABLE)
    member = given.pop("model", None)
    if given:
        raise ConfigError(f"extra config: unknown {sorted(given)}; known: family, model")
    if not manifest:
        raise ConfigError(
            f"extra config: no family; give 'family': '/path/family.yaml' or set {CONFIG_VARIABLE}"
        )
    return Settings(Path(manifest), member)
