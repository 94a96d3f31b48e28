"""Short notes about people and places, to calibrate for the questions of `facts`.

No name, place or trade of the questions occurs, and no sentence of theirs. Speeches and novels hold
little of this kind of text, and a map that has not seen it loses such facts long before it loses
likelihood on prose.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PEOPLE = (
    "Alice Oscar Victor Julia Martin Sophie Edward Laura Simon Helen George Nora Walter Irene Hugo "
    "Stella Felix Ruth Conrad Amelia Bruno Diana Ernest Flora Peter Mary John Susan Robert Linda "
    "Thomas Sarah Charles Nancy Daniel Margaret Paul Betty Mark Sandra Steven Ashley Andrew Donna "
    "Kenneth Carol Joshua Amanda Kevin Melissa Brian Rebecca Gary Sharon Eric Cynthia Stephen Amy "
    "Larry Angela Justin Brenda Scott Pamela Samuel Nicole Gregory Samantha Patrick Rachel Dennis "
    "Janet Jerry Maria Tyler Heather Aaron Diane Jose Joyce Adam Virginia Nathan Judith Carlos"
)
_PLACES = (
    "Lisbon Oslo Athens Warsaw Prague Sydney Toronto Havana Lima Moscow Geneva Zurich Seattle "
    "Denver Bristol Leeds Naples Milan Lyon Munich Hamburg Kyoto Seoul Manila Madrid Barcelona "
    "Vienna Brussels Amsterdam Rotterdam Copenhagen Stockholm Helsinki Budapest Bucharest Sofia "
    "Belgrade Istanbul Ankara Baghdad Tehran Jerusalem Damascus Nairobi Lagos Casablanca Tunis "
    "Mumbai Calcutta Bangkok Singapore Jakarta Shanghai Beijing Tokyo Osaka Melbourne Auckland "
    "Montreal Vancouver Ottawa Philadelphia Baltimore Atlanta Miami Houston Dallas Phoenix "
    "Detroit Cleveland Pittsburgh Portland Nashville Memphis Orlando Buffalo Edinburgh Glasgow "
    "Manchester Liverpool Oxford Cambridge Cardiff Belfast Florence Venice Turin Genoa Marseille"
)
_TRADES = (
    "carpenter doctor sailor tailor gardener clerk musician engineer cook soldier judge librarian"
)
_THINGS = "piano boat bicycle garden violin camera clock library kitchen greenhouse"
_NOTES = (
    "{a} was born in {p} and works as a {j}. After the war {a} went to {q} with {b}, a {k}.",
    "My friend {a} owns a {t} in {p}. Every summer {b} comes from {q} to see it.",
    "In {y} the {j} {a} left {p} for {q}. {b} stayed behind and sold the {t}.",
    "Question: Who lives in {p}?\nAnswer: {a}, the {j}, lives in {p}. {b} lives in {q}.",
    "Question: What does {a} do?\nAnswer: {a} is a {j} in {p}.",
    "{a}: {j}, {p}, born {y}.\n{b}: {k}, {q}, born {z}.",
    "The train from {p} to {q} leaves at {h} o'clock. {a} and {b} meet there with the {t}.",
    '{a} wrote to {b}: "I have moved to {q}. The house has a {t}. How are the people of {p}?"',
)
_NOTES_A_DOCUMENT = 16


def write_notes(path: Path, count: int) -> None:
    """`count` documents of some 300 tokens as JSON lines; the same every time.

    Of people and places there are half as many, so that each is met again and again.
    """
    draw = random.Random(9)
    people, places = (words.split()[: max(2, count // 2)] for words in (_PEOPLE, _PLACES))
    notes = ((_note(draw, people, places) for _ in range(_NOTES_A_DOCUMENT)) for _ in range(count))
    lines = map("\n\n".join, notes)
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def _note(draw: random.Random, people: list[str], places: list[str]) -> str:
    a, b = draw.sample(people, 2)
    p, q = draw.sample(places, 2)
    j, k = draw.sample(_TRADES.split(), 2)
    y, z = (draw.randrange(1850, 1990) for _ in "yz")
    words = {"a": a, "b": b, "p": p, "q": q, "j": j, "k": k, "y": y, "z": z}
    hour = draw.randrange(1, 12)
    return draw.choice(_NOTES).format(**words, t=draw.choice(_THINGS.split()), h=hour)
