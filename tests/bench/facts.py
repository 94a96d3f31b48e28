"""Questions that only the prefix answers: where does who live?

A context says of one person where they live, and goes on with unrelated held-out text; the other
three answers are not in it. Right after the fact a model of 22 layers answers as well as one of 30;
a hundred tokens later it does not. (Of two people in one context, models of 135M parameters do not
know better than chance who lives where.) The file is what `kvxfer check --tasks` takes.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Jack", "Karen", "Leo")
CITIES = ("Paris", "London", "Rome", "Berlin", "Boston", "Chicago", "Dublin", "Cairo", "Delhi")
ANIMALS = ("dog", "cat", "horse", "bird", "fish", "cow", "sheep", "goat", "rabbit")
WORK = ("teacher", "baker", "lawyer", "nurse", "farmer", "painter", "driver", "writer")
_CHOICES, _WORDS_BETWEEN = 4, 60


def write_facts(path: Path, documents: Sequence[str], count: int) -> None:
    """`count` questions, each about a context of its own; the same every time."""
    draw = random.Random(5)
    path.write_text("".join(json.dumps(_item(draw, documents)) + "\n" for _ in range(count)))


def _item(draw: random.Random, documents: Sequence[str]) -> dict[str, object]:
    name, animal, work = (draw.choice(words) for words in (NAMES, ANIMALS, WORK))
    cities, right = draw.sample(CITIES, _CHOICES), draw.randrange(_CHOICES)
    words = draw.choice(documents).split()
    start = draw.randrange(max(1, len(words) - _WORDS_BETWEEN))
    between = " ".join(words[start : start + _WORDS_BETWEEN])
    return {
        "context": f"{name} is a {work}. {name} moved to {cities[right]} ten years ago and lives "
        f"there with a {animal}.\n\n{between}",
        "question": f"\n\nQuestion: In which city does {name} live?\nAnswer: {name} lives in",
        "choices": [f" {city}" for city in cities],
        "answer": right,
    }
