"""Chain hashes for engines that have none of their own (transformers).

Each hash covers its block's tokens and all before them: sha256(previous digest || token ids as
little-endian u32), hex. Engines with their own page hashes (SGLang, LMCache) keep theirs.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

HASH_SCHEME = "kvxfer-sha256"


def chain_hashes(tokens: Sequence[int], block_tokens: int, salt: str = "") -> list[str]:
    """One hash per whole block; a shorter rest has none. `salt` keeps tenants apart."""
    raw = np.asarray(tokens, dtype="<u4").tobytes()
    size = 4 * block_tokens
    digest = hashlib.sha256(salt.encode()).digest() if salt else b""
    hashes = []
    for start in range(0, len(raw) - size + 1, size):
        digest = hashlib.sha256(digest + raw[start : start + size]).digest()
        hashes.append(digest.hex())
    return hashes
