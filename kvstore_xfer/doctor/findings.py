"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """OK works; a NOTE is worth knowing; a PROBLEM keeps something from working."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `about` is a short name of what was checked, `cause` of the fault."""

    level: Level
    about: str
    text: str
    cause: str = ""
    remedy: str = ""


def ok(about: str, text: str) -> Finding:
    return Finding(Level.OK, about, text)


def note(about: str, text: str, remedy: str = "") -> Finding:
    return Finding(Level.NOTE, about, text, remedy=remedy)


def problem(about: str, cause: str, text: str, remedy: str) -> Finding:
    return Finding(Level.PROBLEM, about, text, cause, remedy)
