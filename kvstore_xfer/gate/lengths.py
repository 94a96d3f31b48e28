"""At which lengths a mapper is checked, and the passages for each.

A map that is right at the length it was fitted on can be wrong on very short prefixes (the first
token is special) and on longer ones (positions it has never seen), so each is measured by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore_xfer.errors import ConfigError, TextError
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.score import text_loss

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore_xfer.fit.text import Tokenize, TokenSequence
    from kvstore_xfer.gate.arms import Runner

CALIBRATION = "calibration"
SHORT = "short"
LENGTHS = (CALIBRATION, SHORT, "double", "fourfold")
SHORT_PREFIX = 48  # within the 32 to 64 tokens where published maps fall behind both models
_SHORTER = "smaller --prefix-tokens and --tail-tokens"
_PROBE_PASSAGES = 8
_MULTIPLES = {CALIBRATION: 1, "double": 2, "fourfold": 4}


@dataclass(frozen=True)
class Length:
    """Passages of one length: `prefix_tokens` from a cache, the rest read after them.

    `skipped` says why there are none.
    """

    name: str
    prefix_tokens: int
    passages: Sequence[TokenSequence] = field(default=())
    skipped: str = ""


def cut_lengths(
    path: Path,
    tokenize: Tokenize,
    *,
    prefix: int,
    tail: int,
    count: int,
    longest: int,
    wanted: Sequence[str] = LENGTHS,
    hold_back: int = 0,
) -> list[Length]:
    """Up to `count` passages for each wanted length; `prefix` + `tail` is the calibration length.

    `longest` is the context both models can use, 0 for no limit. Of a short prefix, too, there is
    something to convert before the `hold_back` newest tokens. Raises TextError when the file holds
    no document that is long enough for a length the models can do, and ConfigError when the
    calibration length itself is more than that.
    """
    if longest and prefix + tail > longest:
        raise ConfigError(
            f"--prefix-tokens {prefix} and --tail-tokens {tail} are more than the {longest} tokens "
            "that the models can use (--max-tokens, the manifest's gate section or their configs); "
            "give fewer"
        )
    prefixes = {name: times * (prefix + tail) - tail for name, times in _MULTIPLES.items()}
    prefixes[SHORT] = SHORT_PREFIX + hold_back
    return [
        _cut(path, tokenize, name, prefixes[name], tail, count, longest)
        if name != SHORT or prefixes[SHORT] < prefix
        else Length(name, prefix, skipped=f"the calibration length's {prefix} are short")
        for name in LENGTHS
        if name in wanted
    ]


def cannot_use(source: Runner, target: Runner, length: Length) -> str:
    """Why a length is beyond what the models can do: one reads better without the prefix.

    The context a config states is often longer than what the model has learnt to use.
    """
    few = length.passages[:: max(1, len(length.passages) // _PROBE_PASSAGES)][:_PROBE_PASSAGES]
    for runner in (target, source):
        own = without = 0.0
        for passage in few:
            head, tail = (
                passage.tokens[: length.prefix_tokens],
                passage.tokens[length.prefix_tokens :],
            )
            own += text_loss(runner.read_after(runner.capture(head), tail), tail) / len(few)
            without += text_loss(runner.read_after(None, tail), tail) / len(few)
        if own > without:
            return (
                f"{runner.description.name} reads better without these {length.prefix_tokens} "
                f"tokens than after them (loss {without:.3f} against {own:.3f})"
            )
    return ""


def _cut(
    path: Path, tokenize: Tokenize, name: str, prefix: int, tail: int, count: int, longest: int
) -> Length:
    total = prefix + tail
    if longest and total > longest:
        return Length(name, prefix, skipped=f"{total} tokens are more than the models' {longest}")
    try:
        passages = cut_sequences(path, tokenize, tokens=total, count=count, shorter=_SHORTER)
    except TextError as error:
        if name == CALIBRATION:
            raise
        raise TextError(
            f"{path}: no document of {total} tokens for the length {name!r}; give longer "
            f"documents, or leave it out with --lengths"
        ) from error
    return Length(name, prefix, passages)
