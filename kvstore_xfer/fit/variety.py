"""Whether a calibration text says enough different things for maps to learn from it.

A map fitted on one sentence over and over knows that sentence's few directions; the fit goes well,
held-out sequences included, for these are the same sentence. Two shares tell such a text: that of
passages that stand in it more than once, and that of different tokens.
"""

from __future__ import annotations

from itertools import chain
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from kvstore_xfer.fit.overlap import NGRAM, ngram_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.fit.text import TokenSequence

# Prose repeats under 1 % of its passages, source code and manifests about half.
_MOST_REPEATED = 0.75
# Prose of N tokens has far more than the root of N different ones (Heaps' law), unless its
# vocabulary is small: of single bytes it uses a third.
_SHARE_OF_VOCABULARY = 8


def monotony(sequences: Sequence[TokenSequence], vocabulary: int) -> str:
    """What makes a text too poor to learn from, with the figure; empty when nothing does.

    `vocabulary` is the number of the tokenizer's tokens.
    """
    hashes = np.concatenate([ngram_hashes(sequence.tokens) for sequence in sequences])
    repeated = 1 - len(np.unique(hashes)) / len(hashes) if len(hashes) else 0.0
    if repeated > _MOST_REPEATED:
        return f"{repeated:.1%} of its passages of {NGRAM} tokens repeat earlier ones"
    tokens = sum(len(sequence.tokens) for sequence in sequences)
    different = len(set(chain.from_iterable(sequence.tokens for sequence in sequences)))
    if different < min(isqrt(tokens), vocabulary // _SHARE_OF_VOCABULARY):
        return f"only {different} different tokens among its {tokens:,}"
    return ""
