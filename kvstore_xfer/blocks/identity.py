"""Whose block it is: everything that must be equal for two blocks' bytes to be interchangeable.

Never a served name: two deployments may share one. A page hash covers token ids only, so the
identity is what keeps models, dtypes, block lengths and hash schemes apart.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.blocks.key import RECORD, BlockKey, Shard
from kvstore_xfer.blocks.page import KvShape
from kvstore_xfer.models.description import ModelDescription

if TYPE_CHECKING:
    import torch

LAYOUT_VERSION = 1


@dataclass(frozen=True)
class Identity:
    """Digest input. `weights` and `tokenizer` are the digests of a `ModelDescription`.

    `model` is its fingerprint, so that a model that is run with another RoPE or attention than its
    files say is somebody else although its weights are the same. `adapter` and `kv_scales` are
    digests too, empty when there are none; `hash_scheme` names how the engine hashes tokens into
    page hashes; `block_tokens` is its page or chunk size. `variant` names whatever else changes the
    cache (weights updated in place).
    """

    weights: str
    tokenizer: str
    kv_dtype: str
    block_tokens: int
    hash_scheme: str
    adapter: str = ""
    kv_scales: str = ""
    variant: str = ""
    model: str = ""
    layout_version: int = LAYOUT_VERSION

    @cached_property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def identity_of(
    model: ModelDescription,
    kv_dtype: str,
    block_tokens: int,
    hash_scheme: str,
    variant: str = "",
) -> Identity:
    """The identity of a model without adapters or KV scales, in one engine configuration."""
    return Identity(
        weights=model.weights_digest,
        tokenizer=model.tokenizer_digest,
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        hash_scheme=hash_scheme,
        variant=variant,
        model=model.fingerprint(),
    )


def whole_shard(model: ModelDescription) -> Shard:
    """The shard of an engine without tensor or pipeline parallelism."""
    return Shard(0, model.kv_heads, 0, model.layers)


def block_shape(
    model: ModelDescription, shard: Shard, block_tokens: int, dtype: torch.dtype
) -> KvShape:
    """Geometry of one block of a shard."""
    return KvShape(
        layers=shard.last_layer - shard.first_layer,
        tokens=block_tokens,
        heads=shard.last_head - shard.first_head,
        key_dim=model.key_dim,
        value_dim=model.value_dim,
        dtype=dtype,
    )


@dataclass(frozen=True)
class IdentityRecord:
    """What an engine writes into the store when it starts: who it is and how it is sharded.

    A sibling finds the shards of the blocks it wants to convert here. One identity may be served
    with several tensor-parallel sizes: each adds its layout, the shards of all its ranks.
    """

    identity: Identity
    model: ModelDescription
    layouts: tuple[tuple[Shard, ...], ...]

    @staticmethod
    def key(identity_digest: str) -> str:
        return str(BlockKey(identity_digest, "whole", RECORD, "identity"))

    def encode(self) -> tuple[BlockHeader, bytes]:
        """Header and payload, ready to be written to a store."""
        fields: dict[str, Any] = {
            "identity": asdict(self.identity),
            "model": self.model.to_json(),
            "layouts": [[str(shard) for shard in layout] for layout in self.layouts],
        }
        payload = json.dumps(fields, sort_keys=True).encode()
        header = BlockHeader(key=self.key(self.identity.digest), payload_bytes=len(payload))
        return header, payload

    @classmethod
    def decode(cls, payload: bytes) -> IdentityRecord:
        """Raises ValueError, KeyError or TypeError on anything but an encoded record."""
        fields = json.loads(payload)
        return cls(
            Identity(**fields["identity"]),
            ModelDescription.from_json(fields["model"]),
            tuple(tuple(Shard.parse(shard) for shard in layout) for layout in fields["layouts"]),
        )
