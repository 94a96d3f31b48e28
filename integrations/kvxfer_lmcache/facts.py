"""What is known of an engine behind LMCache: its model, its shard, what its objects hold."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_xfer.blocks.identity import block_shape
from kvstore_xfer.blocks.key import Shard, heads_of_rank
from kvstore_xfer.errors import ModelError
from kvstore_xfer.models.attention import AttentionKind
from kvstore_xfer.models.description import ModelDescription, describe
from kvstore_xfer.tier.members import recognise
from kvxfer_lmcache.block_sizes import may_be_packed
from kvxfer_lmcache.layouts import Kind, Layout, opaque_layout, recognise_layout
from kvxfer_lmcache.objects import STRONG_HASH_BYTES, Origin
from kvxfer_lmcache.refusals import (
    LMCACHE_TESTED_VERSIONS,
    PLAIN_DTYPES,
    Refusal,
    lmcache_version,
)

if TYPE_CHECKING:
    import torch

    from kvstore_xfer.family import Family


@dataclass(frozen=True)
class View:
    """How the objects of one engine rank are looked at.

    Nothing may be stored of objects that are not `known`: equal keys may mean other bytes.
    """

    layout: Layout
    shard: Shard
    shards: tuple[Shard, ...] | None
    variant: list[str]
    refusals: list[tuple[Refusal, str]]
    known: bool = True


def identify(
    family: Family, folder: Path, origin: Origin
) -> tuple[str | None, ModelDescription, list[tuple[Refusal, str]]]:
    """The member of the family, its description, and what speaks against converting for it."""
    model: ModelDescription | None = None
    by_name = next(
        (name for name, entry in family.models.items() if entry.path == origin.model), None
    )
    try:
        if by_name is not None:
            entry = family.models[by_name]
            local = folder / entry.path
            model = describe(local if local.is_dir() else entry.path, revision=entry.revision)
            return by_name, model, []
        if Path(origin.model).is_dir():
            model = describe(origin.model)
            member = recognise(family, folder, model, origin.model, None)
            if member is not None:
                return member, model, []
    except ModelError as error:
        return None, _unknown_model(origin.model), [(Refusal.MODEL, str(error))]
    if model is None:
        model = _unknown_model(origin.model)
    known = ", ".join(sorted(family.models))
    text = f"{origin.model} is none of the manifest's models ({known})"
    return None, model, [(Refusal.NOT_IN_FAMILY, text)]


def _unknown_model(name: str) -> ModelDescription:
    """A model of which only LMCache's name is known: its blocks are bytes, for this process."""
    return ModelDescription(
        name=name,
        model_type="",
        layers=0,
        query_heads=0,
        kv_heads=0,
        key_dim=0,
        value_dim=0,
        hidden_size=0,
        vocab_size=0,
        max_positions=0,
        parameters=0,
        dtype="",
        rope=None,
        tokenizer_digest="",
        weights_digest=f"named-{name}",
        attention=AttentionKind.OTHER,
        refusal="the model's files are not known",
    )


def view_of(origin: Origin, model: ModelDescription) -> View:
    packed = origin.block_sizes[0] if len(origin.block_sizes) == 1 else 0
    refusals = _refusals_of_key(origin)
    if model.refusal is not None and model.layers:
        mla = model.attention is AttentionKind.MLA
        refusals.append((Refusal.MLA if mla else Refusal.MODEL, model.refusal))
    shards = _shards(origin, model)
    layout = opaque_layout(origin.shapes, origin.dtypes)
    if shards and origin.group == 0 and model.attention is AttentionKind.FULL:
        one = block_shape(model, shards[origin.rank], 1, origin.dtypes[0])
        layout = recognise_layout(origin.shapes, origin.dtypes, one, packed)
        refusals += _refusals_of_layout(origin, layout)
        if layout.kind is Kind.PACKED and not _packs_plainly(origin.dtypes[0]):
            layout = opaque_layout(origin.shapes, origin.dtypes, Kind.FUSED)
    if layout.is_canonical and shards:
        layout_shards = tuple(dict.fromkeys(shards))
        return View(layout, shards[origin.rank], layout_shards, [], refusals)
    # Bytes match only what has the same form and comes from the same place.
    variant = [
        f"form={list(zip(origin.shapes, map(str, origin.dtypes), strict=True))}",
        f"group={origin.group}",
        f"rank={origin.rank}of{origin.ranks}",
    ]
    known = True
    if may_be_packed(origin.shapes) and model.attention is not AttentionKind.MLA:
        variant += [f"blocks={packed}", f"cpu={platform.machine()}", f"amx={_has_amx()}"]
        known = packed > 0
        if not known:
            refusals.append((Refusal.PACKING, _unknown_block_size(origin)))
    return View(layout, Shard(0, 1, 0, 1), None, variant, refusals, known)


def _unknown_block_size(origin: Origin) -> str:
    if origin.block_sizes:
        sizes = ", ".join(map(str, origin.block_sizes))
        return f"engines with --block-size {sizes} were behind this server; restart it"
    return (
        f"objects {origin.shapes[0]} depend on vLLM's --block-size, which is not known; start "
        'LMCache\'s server with --server-module \'{"module_path": "kvxfer_lmcache.server_module"}\''
    )


def _shards(origin: Origin, model: ModelDescription) -> list[Shard]:
    """The shards of all tensor-parallel ranks; none for a model without heads or an odd rank."""
    heads, ranks = model.kv_heads, origin.ranks
    uneven = heads % ranks and ranks % heads if heads and ranks else True
    if uneven or not origin.rank < ranks:
        return []
    return [Shard(*heads_of_rank(heads, rank, ranks), 0, model.layers) for rank in range(ranks)]


def _refusals_of_key(origin: Origin) -> list[tuple[Refusal, str]]:
    refusals = []
    version, tested = lmcache_version(), ", ".join(sorted(LMCACHE_TESTED_VERSIONS))
    if version not in LMCACHE_TESTED_VERSIONS:
        text = f"LMCache {version} is not one of the tested versions ({tested})"
        refusals.append((Refusal.LMCACHE_VERSION, text))
    if origin.group:
        text = f"object group {origin.group}: a chunk of this model has several parts"
        refusals.append((Refusal.OBJECT_GROUPS, text))
    if origin.hash_bytes != STRONG_HASH_BYTES:
        text = (
            f"chunk hashes of {origin.hash_bytes} bytes; start LMCache with --hash-algorithm blake3"
        )
        refusals.append((Refusal.HASHES, text))
    return refusals


def _refusals_of_layout(origin: Origin, layout: Layout) -> list[tuple[Refusal, str]]:
    dtype = str(origin.dtypes[0]).removeprefix("torch.")
    if layout.kind is Kind.FUSED and len(origin.block_sizes) != 1:
        return []  # said where it is decided that nothing is stored
    if layout.kind is Kind.FUSED:
        text = (
            f"vLLM packs blocks of {origin.block_sizes[0]} tokens and chunks of "
            f"{origin.shapes[0][-2]} in a way that is not known; start it with --block-size 32 and "
            "LMCache with a --chunk-size that is a multiple of it"
        )
        return [(Refusal.PACKING, text)]
    if layout.kind is Kind.OPAQUE:
        text = f"objects {origin.shapes[0]} {dtype} are not those that the model's files describe"
        return [(Refusal.GEOMETRY, text)]
    if dtype not in PLAIN_DTYPES:
        return [(Refusal.KV_DTYPE, f"KV dtype {dtype}: its scales are not in the objects")]
    if layout.kind is Kind.PACKED and not _packs_plainly(origin.dtypes[0]):
        text = "this machine's vLLM packs blocks for AMX or not for x86; use --dtype float32 on x86"
        return [(Refusal.PACKING, text)]
    return []


def _packs_plainly(dtype: torch.dtype) -> bool:
    """Whether vLLM on this machine's CPU packs blocks the one way that is known."""
    if platform.machine() != "x86_64":
        return False
    return str(dtype) != "torch.bfloat16" or not _has_amx()


def _has_amx() -> bool:
    return "amx_tile" in _cpu_flags()


def _cpu_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())
    except OSError:
        return {"amx_tile"}  # not known: no
