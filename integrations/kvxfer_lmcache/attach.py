"""From the engines behind one LMCache server to tiers: one per model, rank, dtype and layout.

An engine whose chunks must not be converted still gets a tier, as a plain store of its own. It
gets none when the manifest or the store cannot be used.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore_xfer import metrics
from kvstore_xfer.errors import ConfigError, KvxferError, StoreError
from kvstore_xfer.family import Family, load_family
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.store.url import open_store
from kvstore_xfer.tier.open import Engine, announce, open_tier
from kvstore_xfer.tier.store_gauges import StoreGauges
from kvstore_xfer.tier.tier import Tier
from kvxfer_lmcache.block_sizes import BlockSizes
from kvxfer_lmcache.facts import identify, view_of
from kvxfer_lmcache.layouts import Layout, opaque_layout
from kvxfer_lmcache.objects import STRONG_HASH_BYTES, Origin
from kvxfer_lmcache.refusals import Refusal
from kvxfer_lmcache.start import say_what_is_there

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.store.base import BlockStore

_log = logging.getLogger(__name__)
UNLISTED = "unlisted"  # the metric label of a model that is not in the family
RETRY_SECONDS = 10.0  # after an engine could not be attached because of the store
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Attachment:
    """One engine rank behind its tier; `tier` is None when nothing is stored."""

    tier: Tier | None
    layout: Layout
    name: str = UNLISTED
    refusals: list[tuple[Refusal, str]] = field(default_factory=list)

    @property
    def placed(self) -> bool:
        """Whether blocks are stored with their position, as sources of conversions."""
        return self.layout.is_canonical

    @property
    def store_failed(self) -> bool:
        """Whether nothing is stored because the store cannot be used, which may pass."""
        return any(reason is Refusal.STORE for reason, _ in self.refusals)


class Attachments:
    """The tiers of all engines behind one LMCache process, opened on first use.

    Never raises for what an operator can get wrong: then nothing is stored, which the log, a metric
    and `report` say. Safe to use from several threads.
    """

    def __init__(
        self, manifest: Path, hash_scheme: str = "lmcache", wrong: ConfigError | None = None
    ) -> None:
        self._manifest, self._hash_scheme = manifest, hash_scheme
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._opened: dict[Origin, Future[Attachment]] = {}
        self._retry: dict[Origin, float] = {}
        self._tried: dict[Origin, Attachment] = {}  # those to be tried again
        self._refused: dict[Refusal, str] = {}
        self._family: Family | None = None
        self._store: BlockStore | None = None
        self._gauges: StoreGauges | None = None
        self._process = uuid.uuid4().hex
        self.block_sizes = BlockSizes()
        try:
            if wrong is not None:
                raise wrong
            self._family = load_family(manifest)
            self._open_store(self._family)
        except StoreError as error:  # tried again for every engine
            _announce(UNLISTED, [(Refusal.STORE, str(error))], stored=False)
        except ConfigError as error:
            _announce(UNLISTED, [(Refusal.CONFIG, str(error))], stored=False)
            self._refused[Refusal.CONFIG] = str(error)
        if self._family is not None:
            greet = (self._manifest, self._family)
            threading.Thread(target=say_what_is_there, args=greet, daemon=True).start()

    def get(self, origin: Origin, seconds: float) -> Attachment | None:
        """The attachment, None when it is not open within `seconds`: weights are being digested."""
        origin = replace(origin, block_sizes=self.block_sizes.of(origin))
        with self._lock:
            future = self._opened.get(origin)
            if future is None or self._retry.get(origin, math.inf) < time.monotonic():
                self._retry.pop(origin, None)
                future = self._opened[origin] = Future()
                threading.Thread(
                    target=self._open, args=(origin, future), name="kvxfer-attach", daemon=True
                ).start()
        try:
            return future.result(seconds)
        except FutureTimeoutError:
            return None

    def count_missed(self, origin: Origin, attachment: Attachment | None, blocks: int) -> None:
        """Count a lookup that no tier can answer: every one is in the denominators."""
        name, reason = self._name(origin), Reason.ATTACHING
        if attachment is not None:
            name = attachment.name
            reason = Reason.STORE_ERROR if attachment.store_failed else Reason.NOT_STORED
        labels = (name, "", "", Outcome.MISSED.value, reason.value)
        metrics.LOOKUPS.labels(name).inc()
        metrics.LOOKUP_BLOCKS.labels(*labels).inc(blocks)
        tokens = origin.shapes[0][-2] if len(origin.shapes[0]) > 1 else 1
        metrics.LOOKUP_TOKENS.labels(*labels).inc(blocks * tokens)

    def _name(self, origin: Origin) -> str:
        """The manifest's name, as far as the engine's own tells it."""
        models = {} if self._family is None else self._family.models
        return next((name for name, m in models.items() if m.path == origin.model), UNLISTED)

    def refuse(self, reason: Refusal, text: str) -> None:
        """Turn all conversion off from now on."""
        with self._lock:
            if reason in self._refused:
                return
            self._refused[reason] = text
            opened = [future.result() for future in self._opened.values() if future.done()]
        for attachment in opened:
            if attachment.tier is not None:
                attachment.tier.disable_conversion(Reason.UNSUPPORTED)
        for name in {attachment.name for attachment in opened} or {UNLISTED}:
            _announce(name, [(reason, text)], stored=True)

    def report(self) -> list[dict[str, object]]:
        """One row per engine rank, for a status page."""
        with self._lock:
            opened = [(o, f.result()) for o, f in self._opened.items() if f.done()]
            general = [reason.value for reason in self._refused]
        return [
            {
                "model": origin.model,
                "name": attachment.name,
                "rank": origin.rank,
                "ranks": origin.ranks,
                "group": origin.group,
                "dtype": str(origin.dtypes[0]).removeprefix("torch."),
                "block_sizes": list(origin.block_sizes),
                "layout": attachment.layout.kind.value,
                "stored": attachment.tier is not None,
                "refusals": [*general, *(reason.value for reason, _ in attachment.refusals)],
                "pairs": _pairs_of(attachment),
            }
            for origin, attachment in opened
        ]

    def attaching(self) -> list[str]:
        """Engines whose model is being read."""
        with self._lock:
            return [origin.model for origin, future in self._opened.items() if not future.done()]

    @property
    def configured(self) -> bool:
        """Whether the manifest could be read."""
        return self._family is not None

    @property
    def usable(self) -> bool:
        """Whether blocks can be stored now."""
        return self._store is not None

    def _open_store(self, family: Family) -> BlockStore:
        """The store, opened now unless it is. Raises StoreError and ConfigError."""
        with self._opening:
            if self._store is None:
                label = family.store.partition(":")[0]
                metrics.STORE_UP.labels(label).set(0)
                self._store = open_store(family.store, base=self._manifest.resolve().parent)
                self._gauges = StoreGauges(self._store, label)
                metrics.CONVERSION_REFUSED.labels(UNLISTED, Refusal.STORE.value).set(0)
            return self._store

    def flush(self) -> None:
        """Return when all derived blocks of earlier loads are in the store."""
        for tier in self.tiers():
            tier.flush()

    def close(self) -> None:
        """Close tiers and store; gives up on a store that does not answer."""
        closing = threading.Thread(target=self._close, name="kvxfer-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _close(self) -> None:
        if self._gauges is not None:
            self._gauges.close()
        for tier in self.tiers():
            tier.close()
        if self._store is not None:
            self._store.close()

    def tiers(self, model: str = "", rank: int = 0, group: int = 0) -> list[Tier]:
        """The open tiers, all of them or those of one rank and object group of a model."""
        with self._lock:
            opened = [(o, f.result().tier) for o, f in self._opened.items() if f.done()]
        wanted = (model, rank, group)
        return [
            tier
            for origin, tier in opened
            if tier is not None
            and (not model or (origin.model, origin.rank, origin.group) == wanted)
        ]

    def _open(self, origin: Origin, future: Future[Attachment]) -> None:
        nothing = opaque_layout(origin.shapes, origin.dtypes)
        try:
            attachment = self._attach(origin)
        except KvxferError as error:
            reason = Refusal.STORE if isinstance(error, StoreError) else Refusal.CONFIG
            attachment = Attachment(None, nothing, self._name(origin), [(reason, str(error))])
        except Exception as error:  # noqa: BLE001 - nothing may raise into the server
            _log.exception("kvxfer: attaching %s failed", origin.model)
            refusals = [(Refusal.STORE, repr(error))]
            attachment = Attachment(None, nothing, self._name(origin), refusals)
        self._announce_changed(origin, attachment)
        with self._lock:  # a refusal that came meanwhile counts for this one, too
            if attachment.store_failed:
                self._retry[origin] = time.monotonic() + RETRY_SECONDS
            future.set_result(attachment)
            late = bool(self._refused)
        if late and attachment.tier is not None:
            attachment.tier.disable_conversion(Reason.UNSUPPORTED)

    def _announce_changed(self, origin: Origin, attachment: Attachment) -> None:
        """What is new against the last try, which may have been ten seconds ago."""
        before = self._tried.pop(origin, None)
        if before is not None:
            for reason, _ in before.refusals:
                metrics.CONVERSION_REFUSED.labels(before.name, reason.value).set(0)
            if not attachment.store_failed:
                _log.warning(
                    "kvxfer: the store answers again; chunks of %s are stored", origin.model
                )
        told = [] if before is None else before.refusals
        new = [refusal for refusal in attachment.refusals if refusal not in told]
        _announce(attachment.name, new, stored=attachment.tier is not None)
        for reason, _ in attachment.refusals:
            metrics.CONVERSION_REFUSED.labels(attachment.name, reason.value).set(1)
        if attachment.store_failed:
            self._tried[origin] = attachment

    def _attach(self, origin: Origin) -> Attachment:
        family = self._family
        if family is None:
            return Attachment(None, opaque_layout(origin.shapes, origin.dtypes))
        store = self._open_store(family)
        folder = self._manifest.resolve().parent
        member, model, refusals = identify(family, folder, origin)
        view = view_of(origin, model)
        refusals = [*refusals, *view.refusals, *self._contradictions(family, member, view.layout)]
        if not view.known:
            return Attachment(None, view.layout, member or UNLISTED, refusals)
        engine = Engine(
            model,
            str(view.layout.shape.dtype).removeprefix("torch."),
            origin.shapes[0][-2] if len(origin.shapes[0]) > 1 else 1,
            f"{self._hash_scheme}-{8 * origin.hash_bytes}",
            shard=view.shard,
            layout=view.shards,
            shape=view.layout.shape,
            variant=",".join(view.variant + self._private(origin, model)),
        )
        if member is not None and view.layout.is_canonical:
            tier = open_tier(self._manifest, member, engine, store=store)
            if refusals:
                tier.disable_conversion(Reason.UNSUPPORTED)
        else:
            announce(store, engine)
            tier = Tier(
                store,
                member or UNLISTED,
                engine.identity,
                engine.own_shard,
                engine.block_shape,
                (),
                layout=engine.layout or (),
                read_seconds=family.read_seconds,
            )
        if self._gauges is not None:
            tier.store_is_down = self._gauges.is_down
        return Attachment(tier, view.layout, member or UNLISTED, refusals)

    def _contradictions(
        self, family: Family, member: str | None, layout: Layout
    ) -> list[tuple[Refusal, str]]:
        """Where the manifest says another block size than LMCache's server."""
        given = None if member is None else family.models[member].vllm_cpu_block_tokens
        if given is None or layout.block_tokens in (0, given):
            return []
        text = (
            f"{self._manifest}: models.{member}.vllm_cpu_block_tokens: {given}, but vLLM runs with "
            f"--block-size {layout.block_tokens}, as LMCache's server sees; correct or remove it"
        )
        return [(Refusal.PACKING, text)]

    def _private(self, origin: Origin, model: ModelDescription) -> list[str]:
        """A name alone does not say whose blocks these are, nor a weak hash which tokens'."""
        nameless, weak = not model.layers, origin.hash_bytes != STRONG_HASH_BYTES
        return [f"process={self._process}"] if nameless or weak else []


def _pairs_of(attachment: Attachment) -> list[dict[str, str]]:
    """Which siblings may serve, and why one may not."""
    pairs = () if attachment.tier is None else attachment.tier.pairs
    return [
        {
            "source": pair.name,
            "direction": pair.direction.value,
            "off": "" if pair.refusal is None else pair.refusal.value,
        }
        for pair in pairs
    ]


def _announce(name: str, refusals: Sequence[tuple[Refusal, str]], *, stored: bool) -> None:
    """Log each reason once per engine rank, and export it."""
    off = "conversion is off" if stored else "nothing is stored or converted"
    for reason, text in refusals:
        metrics.CONVERSION_REFUSED.labels(name, reason.value).set(1)
        _log.warning("kvxfer: %s for %s (%s): %s", off, name, reason.value, text)
