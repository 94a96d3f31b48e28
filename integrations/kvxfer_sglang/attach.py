"""From a host pool and SGLang's facts to a tier: what is stored, and what may be converted.

An engine whose blocks must not be converted still gets a tier, as a plain store of its own. It
gets none when it cannot be said whose its pages are, or when a page is not all there is.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvstore_xfer.blocks.identity import block_shape
from kvstore_xfer.blocks.key import Shard, heads_of_rank
from kvstore_xfer.errors import ConfigError, ModelError, StoreError
from kvstore_xfer.family import Family, load_family
from kvstore_xfer.models.description import ModelDescription, describe
from kvstore_xfer.outcome import Reason
from kvstore_xfer.store.url import open_store
from kvstore_xfer.tier.members import recognise
from kvstore_xfer.tier.open import Engine, announce, export, open_tier
from kvstore_xfer.tier.tier import Tier
from kvxfer_sglang.pool_view import PoolView, UnsupportedPoolError
from kvxfer_sglang.refusals import Refusal, conversion_refusals, storage_refusals

if TYPE_CHECKING:
    from kvxfer_sglang.config import Settings
    from kvxfer_sglang.facts import EngineFacts

UNLISTED = "unlisted"  # the metric label of a model that is not in the family


@dataclass(frozen=True)
class Attachment:
    """One rank of one engine behind its tier; `tier` is None when nothing is stored."""

    tier: Tier | None
    view: PoolView | None
    facts: EngineFacts
    refusals: list[tuple[Refusal, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return UNLISTED if self.tier is None else self.tier.name


@dataclass(frozen=True)
class _Plan:
    """Everything about the engine that does not need the store."""

    view: PoolView
    model: ModelDescription
    engine: Engine
    refusals: list[tuple[Refusal, str]]


def attach(settings: Settings, facts: EngineFacts, pool: Any, *, private: bool) -> Attachment:
    """Open the tier of a running engine. Never raises for what an operator can get wrong.

    `private` keeps the blocks from every other engine: its weights are in no file.
    """
    refusals = storage_refusals(facts)
    if refusals:
        return Attachment(None, None, facts, refusals)
    try:
        plan = _plan(facts, pool, private=private)
        tier, further = _open(settings, facts, plan)
    except UnsupportedPoolError as error:
        refusal = (Refusal.POOL, str(error))
    except ModelError as error:
        refusal = (Refusal.MODEL, str(error))
    except ConfigError as error:
        refusal = (Refusal.CONFIG, str(error))
    except StoreError as error:
        refusal = (Refusal.STORE, str(error))
    else:
        return Attachment(tier, plan.view, facts, plan.refusals + further)
    return Attachment(None, None, facts, [refusal])


def _plan(facts: EngineFacts, pool: Any, *, private: bool) -> _Plan:
    path, revision = str(facts.model_path), facts.revision
    dtype: torch.dtype = getattr(torch, str(facts.kv_dtype))
    view = PoolView(pool, dtype)
    model = describe(path, revision=None if Path(path).is_dir() else revision)
    shard = _shard(facts, facts.tp_rank, model.kv_heads)
    variant = _variant(facts, private=private)
    engine = Engine(
        model,
        str(facts.kv_dtype),
        facts.page_size,
        str(facts.hash_scheme),
        shard=shard,
        # Ranks of a private variant do not know one another's identities.
        layout=None if _is_private(facts, private=private) else _layout(facts, model.kv_heads),
        shape=view.shape,
        variant=variant,
    )
    refusals = conversion_refusals(facts)
    if model.refusal is not None:
        refusals.append((Refusal.MODEL, model.refusal))
    if view.shape != block_shape(model, shard, facts.page_size, dtype):
        text = f"the pool's pages ({view.shape}) are not those that the model's files describe"
        refusals.append((Refusal.GEOMETRY, text))
    if private:
        refusals.append((Refusal.WEIGHTS_CHANGED, "the weights were updated from no model folder"))
    return _Plan(view, model, engine, refusals)


def _open(
    settings: Settings, facts: EngineFacts, plan: _Plan
) -> tuple[Tier, list[tuple[Refusal, str]]]:
    family = load_family(settings.manifest)
    folder = settings.manifest.resolve().parent
    found = recognise(family, folder, plan.model, str(facts.model_path), facts.revision)
    member = settings.member or found
    if found is not None and member in family.models:
        _require_same(family, member, found, facts)
    if member is not None:
        tier = open_tier(settings.manifest, member, plan.engine)
        if plan.refusals:
            tier.disable_conversion(Reason.UNSUPPORTED)
        return tier, []
    known = ", ".join(sorted(family.models))
    text = f"{facts.model_path} is none of the models of {settings.manifest} ({known})"
    return _plain_tier(family, folder, plan.engine), [(Refusal.NOT_IN_FAMILY, text)]


def _require_same(family: Family, member: str, found: str, facts: EngineFacts) -> None:
    """Raises ConfigError when the extra config gives the engine another model's name."""
    if family.models[member].path != family.models[found].path:
        raise ConfigError(
            f"extra config: model: {member} is {family.models[member].path} in the manifest, but "
            f"this server runs {facts.model_path}, which is {found} there; correct or remove it"
        )


def _plain_tier(family: Family, folder: Path, engine: Engine) -> Tier:
    store = open_store(family.store, base=folder)
    try:
        announce(store, engine)
    except StoreError:
        store.close()
        raise
    tier = Tier(
        store,
        UNLISTED,
        engine.identity,
        engine.own_shard,
        engine.block_shape,
        (),
        layout=engine.layout or (),
        owns_store=True,
        read_seconds=family.read_seconds,
    )
    export(tier, store, family, family.store.partition(":")[0])
    return tier


def _shard(facts: EngineFacts, rank: int, kv_heads: int) -> Shard:
    return Shard(*heads_of_rank(kv_heads, rank, facts.tp_size), *facts.layer_range)


def _layout(facts: EngineFacts, kv_heads: int) -> tuple[Shard, ...]:
    ranks = (_shard(facts, rank, kv_heads) for rank in range(facts.tp_size))
    return tuple(dict.fromkeys(ranks))


def _is_private(facts: EngineFacts, *, private: bool) -> bool:
    """Whether something in the cache is in no file, or differs between ranks of one shard."""
    dummy = ("load_format", "dummy") in (facts.alterations or ())
    return private or dummy or facts.lora is not False or facts.context_parallel_size > 1


def _variant(facts: EngineFacts, *, private: bool) -> str:
    """What sets this engine's cache apart from that of its model's files; empty for nothing."""
    parts = [f"{name}={value}" for name, value in facts.alterations or ()]
    if facts.draft_layers:
        parts.append(f"draft-layers={facts.draft_layers}")
    if _is_private(facts, private=private):
        parts.append(f"private={uuid.uuid4().hex}")
    return ",".join(parts)
