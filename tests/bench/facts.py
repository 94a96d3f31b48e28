"""Questions that only the prefix answers: where does who live?

A context says of one person where they live; the other three answers are not in it. (Of two people
in one context, models of 135M parameters do not know better than chance who lives where.) The file
is what `kvxfer check --tasks` takes.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Jack", "Karen", "Leo")
CITIES = ("Paris", "London", "Rome", "Berlin", "Boston", "Chicago", "Dublin", "Cairo", "Delhi")
ANIMALS = ("dog", "cat", "horse", "bird", "fish", "cow", "sheep", "goat", "rabbit")
WORK = ("teacher", "baker", "lawyer", "nurse", "farmer", "painter", "driver", "writer")
_CHOICES = 4


def write_facts(path: Path, count: int) -> None:
    """`count` questions, each about a context of its own; the same every time."""
    draw = random.Random(5)
    path.write_text("".join(json.dumps(_item(draw)) + "\n" for _ in range(count)))


def _item(draw: random.Random) -> dict[str, object]:
    name, animal, work = (draw.choice(words) for words in (NAMES, ANIMALS, WORK))
    cities, right = draw.sample(CITIES, _CHOICES), draw.randrange(_CHOICES)
    return {
        "context": f"{name} is a {work}. {name} moved to {cities[right]} ten years ago and lives "
        f"there with a {animal}.",
        "question": f"\n\nQuestion: In which city does {name} live?\nAnswer: {name} lives in",
        "choices": [f" {city}" for city in cities],
        "answer": right,
    }
