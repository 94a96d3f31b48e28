"""Cosine of the target's attention output on the mapped cache with that on its own, by layer.

Across pairs it goes with what is kept of a model's answers, which R^2 does not (arXiv 2608.03893).
The later a layer, the more of the error of the layers before it is in its queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore_xfer.gate.arms import converted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.fit.text import TokenSequence
    from kvstore_xfer.gate.arms import Runner
    from kvstore_xfer.mapper.convert import Converter


def attention_cosines(
    source: Runner,
    target: Runner,
    converter: Converter,
    passages: Sequence[TokenSequence],
    prefix: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    hold_back: int = 0,
) -> list[list[float]]:
    """Per passage and layer, mean over the tokens after the prefix; 0 where it is not a number.

    `hold_back` as in `gate.arms`.
    """
    rows, cut = [], prefix - hold_back
    for number, passage in enumerate(passages):
        head, tail = passage.tokens[:prefix], passage.tokens[prefix:]
        own = target.capture(head)
        mapped = converted(converter, source.capture(head).cut(0, cut), target.description)
        native = target.attention_after(own, tail).double()
        other = target.attention_after(mapped, passage.tokens[cut:])[:, hold_back:].double()
        cosines = torch.nn.functional.cosine_similarity(native, other, dim=-1)
        rows.append(cosines.mean(1).nan_to_num(0.0).tolist())
        progress(number + 1, len(passages))
    return rows
