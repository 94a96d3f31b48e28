"""Why the chunks of an engine behind LMCache are not converted, or not even stored."""

from __future__ import annotations

from enum import Enum
from importlib.metadata import PackageNotFoundError, version

LMCACHE_TESTED_VERSIONS = {"0.5.6"}
PLAIN_DTYPES = {"bfloat16", "float16", "float32"}


class Refusal(str, Enum):
    """Bounded: the values are also metric labels."""

    LMCACHE_VERSION = "lmcache_version"
    NOT_IN_FAMILY = "not_in_family"
    OBJECT_GROUPS = "object_groups"
    MLA = "mla"
    KV_DTYPE = "kv_dtype"
    PACKING = "packing"
    GEOMETRY = "geometry"
    HASHES = "hashes"
    CACHE_BLEND = "cache_blend"
    POSITIONS = "positions"
    SYNCHRONOUS_LOADING = "synchronous_loading"
    MODEL = "model"
    CONFIG = "config"
    STORE = "store"


def lmcache_version() -> str | None:
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return None
