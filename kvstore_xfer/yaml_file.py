"""YAML files that people write: strictly validated, errors in one line with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from kvstore_xfer.errors import ConfigError


class Strict(BaseModel):
    """A part of such a file: unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


File = TypeVar("File", bound=Strict)


def load_yaml(path: str | Path, model: type[File], what: str) -> File:
    """Read and validate a file; `what` names its kind in errors, such as "manifest".

    Raises ConfigError in one line: file, line, field, and what is expected there.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{file}: {reason}; give a readable {what}") from None
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicates(file, tree, set())
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{file}:{line}: {problem}; correct the YAML") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        # Dates and numbers that YAML recognises by their form but that do not exist.
        raise ConfigError(f"{file}: a value cannot be read ({error}); put it in quotes") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_first_error(file, tree, error, what)) from None


def _first_error(file: Path, tree: yaml.Node | None, error: ValidationError, what: str) -> str:
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "missing":  # an unknown field is often what it was meant to be
        first = next((each for each in errors if each["type"] == "extra_forbidden"), first)
    where = tuple(first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field; remove it or correct its name"
        lacking = [str(e["loc"][-1]) for e in errors if e["type"] == "missing"]
        if lacking:
            message += f" (missing: {', '.join(lacking)})"
    if not where and ":" in message:  # our own checks name the field in their text
        field, _, message = message.partition(": ")
        where = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
    name = ".".join(str(part) for part in where) or what
    name = name.encode("unicode_escape").decode()  # one line, whatever the name is
    return f"{file}:{_line(tree, where)}: {name}: {message}"


def _line(node: yaml.Node | None, where: tuple[int | str, ...]) -> int:
    """Line of the deepest part of `where` that exists in the file, from 1."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in where:
        if isinstance(node, yaml.MappingNode):
            entry = next(((k, v) for k, v in node.value if k.value == part), None)
            if entry is None:
                break
            line, node = entry[0].start_mark.line + 1, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _refuse_duplicates(file: Path, node: yaml.Node | None, visited: set[int]) -> None:
    """YAML readers keep the last of two equal keys; here that would hide a pair or a limit.

    A node that aliases share, or that contains itself, is looked at once.
    """
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{file}:{line}: a name must be plain text; correct the YAML")
            if key.value in seen:
                raise ConfigError(f"{file}:{line}: {key.value}: given twice; remove one")
            seen.add(key.value)
            _refuse_duplicates(file, value, visited)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(file, item, visited)
