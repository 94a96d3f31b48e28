"""Whether a passage repeats text that a fit has seen, though its document is another one.

A document's digest finds an exact copy only. Of the fit's n-grams of tokens the smallest hashes are
kept (a bottom-k sketch, Broder 1997), and a passage is compared by those of its own n-grams that
would have been kept, too: their share in the sketch estimates the share of its n-grams in the fit.
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

NGRAM = 13  # long enough that common phrases do not count
_KEPT = 8192
_REPEATED = 0.5  # share of n-grams from which a passage counts as seen
_FEWEST = 2  # n-grams that must be found: one may be a phrase, or chance
_BITS = 32


def sketch(sequences: Iterable[Sequence[int]]) -> str:
    """The smallest hashes of all n-grams, as text for a manifest."""
    hashes = [ngram_hashes(tokens) for tokens in sequences]
    kept = np.unique(np.concatenate(hashes))[:_KEPT] if hashes else np.empty(0, np.uint32)
    return base64.b64encode(zlib.compress(kept.astype("<u4").tobytes(), 9)).decode()


def repeats(tokens: Sequence[int], text: str) -> bool:
    """Whether at least half of the n-grams of `tokens` are in the fit with this sketch."""
    kept = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u4")
    own = np.unique(ngram_hashes(tokens))
    if len(kept) == _KEPT:  # else the sketch holds everything
        own = own[own <= kept[-1]]
    found = int(np.isin(own, kept).sum())
    return found >= _FEWEST and found >= _REPEATED * len(own)


def ngram_hashes(tokens: Sequence[int]) -> NDArray[np.uint32]:
    """One hash per n-gram: a polynomial of the tokens modulo 2^64, its bits mixed."""
    ids = np.asarray(tokens, np.uint64)
    if len(ids) < NGRAM:
        return np.empty(0, np.uint32)
    grams = np.lib.stride_tricks.sliding_window_view(ids + np.uint64(1), NGRAM)
    state = np.zeros(len(grams), np.uint64)
    for column in grams.T:
        state = _mixed(state ^ column)
    hashes: NDArray[np.uint32] = (state >> np.uint64(_BITS)).astype(np.uint32)
    return hashes


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the input moves every bit of the output."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
