"""The arms of a check: what the target says after a prefix, by where its cache came from.

======== ==============================================================
arm      cache of the prefix
======== ==============================================================
native   the target's own
identity the target's own, written to a store and read back
mapped   converted from the source's cache of the same prefix
wrong    converted from the source's cache of another document's prefix
none     no prefix at all
source   the source model answers by itself, from its own cache
======== ==============================================================

A tier may hold the newest tokens of a prompt back, for the target to compute itself
(`tier.policy`). With `hold_back` of them the arms mapped and wrong are converted up to there, and
mapped, wrong and none read the rest of the prefix before what is scored.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.blocks.key import NATIVE, BlockKey
from kvstore_xfer.blocks.page import KvPage, KvShape
from kvstore_xfer.errors import StoreError
from kvstore_xfer.gate.score import PassageScore, score_passage
from kvstore_xfer.store.base import ReadRequest, ReadStatus, WriteRequest, WriteStatus
from kvstore_xfer.store.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.mapper.convert import Converter
    from kvstore_xfer.models.description import ModelDescription
    from kvstore_xfer.store.base import BlockStore

ARM_NAMES = {
    "native": "target, own cache",
    "identity": "target, own cache through a store",
    "mapped": "mapped from the source",
    "wrong": "mapped from a wrong document",
    "none": "target, no context",
    "source": "source alone",
}
ARMS = tuple(ARM_NAMES)


class Runner(Protocol):
    """A model that can be asked for its cache, and for its logits after a given cache."""

    @property
    def description(self) -> ModelDescription: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def capture(self, tokens: Sequence[int]) -> KvPage: ...

    def read_after(self, page: KvPage | None, tokens: Sequence[int]) -> torch.Tensor:
        """Logits ``[T, vocab]`` of `tokens` read after the tokens whose cache `page` holds."""
        ...

    def attention_after(self, page: KvPage | None, tokens: Sequence[int]) -> torch.Tensor:
        """What every layer's attention adds for `tokens` after `page`, ``[L, T, hidden]``."""
        ...


@dataclass
class ArmScores:
    """Scores per arm, one per passage, in the order of `documents`; times in seconds in all."""

    scores: dict[str, list[PassageScore]]
    documents: list[str] = field(default_factory=list)
    identity_max_abs_diff: float = 0.0
    prefix_tokens: int = 0
    converted_tokens: int = 0
    prefill_seconds: float = 0.0
    conversion_seconds: float = 0.0


def run_arms(
    source: Runner,
    target: Runner,
    converter: Converter,
    passages: Sequence[TokenSequence],
    prefix: int,
    arms: Sequence[str] = ARMS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    hold_back: int = 0,
) -> ArmScores:
    """Score `arms` on passages: `prefix` tokens from a cache, the rest read by the target.

    The wrong document of a passage is the nearest later passage of another document. `hold_back` is
    less than `prefix`.
    """
    count, cut = len(passages), prefix - hold_back
    result = ArmScores({arm: [] for arm in arms}, [], 0.0, prefix * count, cut * count)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(f"local://{folder}?min_free=0") as store,  # for one block at a time
    ):
        for number, passage in enumerate(passages):
            other = other_document(passages, number)
            pair = (passage, other)
            _run_passage(source, target, converter, pair, (prefix, cut), store, result)
            progress(number + 1, len(passages))
    return result


def _run_passage(
    source: Runner,
    target: Runner,
    converter: Converter,
    pair: tuple[TokenSequence, TokenSequence],
    ends: tuple[int, int],
    store: BlockStore,
    result: ArmScores,
) -> None:
    """`ends` of the prefix, and of what is converted of it."""
    (passage, other), (prefix, cut) = pair, ends
    head, tail = passage.tokens[:prefix], passage.tokens[prefix:]
    started = time.perf_counter()
    own = target.capture(head)
    result.prefill_seconds += time.perf_counter() - started
    source_cache = source.capture(head)
    started = time.perf_counter()
    mapped = converted(converter, source_cache.cut(0, cut), target.description)
    result.conversion_seconds += time.perf_counter() - started
    native = target.read_after(own, tail)

    def after(page: KvPage | None) -> torch.Tensor:
        return target.read_after(page, passage.tokens[cut:])[prefix - cut :]

    read: dict[str, Callable[[], torch.Tensor]] = {
        "native": lambda: native,
        "identity": lambda: target.read_after(_through_store(own, store), tail),
        "mapped": lambda: after(mapped),
        "wrong": lambda: after(
            converted(
                converter, source.capture(other.tokens[:prefix]).cut(0, cut), target.description
            )
        ),
        "none": lambda: after(None),
        "source": lambda: source.read_after(source_cache, tail),
    }
    following = torch.tensor(tail[1:], device=native.device)
    for arm in result.scores:
        logits = read[arm]()
        result.scores[arm].append(score_passage(logits, native, following))
        if arm == "identity":
            _note_difference(result, logits, native)
    result.documents.append(passage.document)


def _note_difference(result: ArmScores, identity: torch.Tensor, native: torch.Tensor) -> None:
    difference = float((identity.float() - native.float()).abs().max())
    if not difference <= result.identity_max_abs_diff:  # so that nan is kept
        result.identity_max_abs_diff = difference if difference >= 0 else math.inf


def converted(
    converter: Converter, source: KvPage, target: ModelDescription, first_token: int = 0
) -> KvPage:
    """Tokens from `first_token` on, converted for `target` on the CPU, wherever the models run."""
    tokens, device = source.keys.shape[1], source.keys.device
    widths = (target.kv_heads, target.key_dim, target.value_dim)
    page = KvPage.empty(KvShape(target.layers, tokens, *widths, source.keys.dtype))
    converter.convert([KvPage(source.keys.cpu(), source.values.cpu())], [first_token], [page])
    return KvPage(page.keys.to(device), page.values.to(device))


def _through_store(page: KvPage, store: BlockStore) -> KvPage:
    """The page written to a store as one block, and read back into other memory."""
    host = KvPage(page.keys.cpu().contiguous(), page.values.cpu().contiguous())
    shape = host.shape
    key = str(BlockKey("gate", "whole", NATIVE, "identity"))
    header = BlockHeader(key=key, payload_bytes=shape.payload_bytes)
    copy = KvPage.empty(shape)
    written = store.write([WriteRequest(header, host.segments() or [])], overwrite=True)
    read = store.read([ReadRequest(key, copy.segments())])
    if written != [WriteStatus.STORED] or read[0].status is not ReadStatus.OK:
        raise StoreError(
            f"temporary store: write gave {written[0].value}, read {read[0].status.value}; "
            "free some space where temporary files go"
        )
    return KvPage(copy.keys.to(page.keys.device), copy.values.to(page.values.device))


def other_document(passages: Sequence[TokenSequence], number: int) -> TokenSequence:
    """The nearest later passage of another document."""
    later = [*passages[number + 1 :], *passages[:number]]
    return next(p for p in later if p.document != passages[number].document)
