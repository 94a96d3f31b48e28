"""The family manifest: which models share a store, which may serve which, and how.

A YAML file, strictly validated. Relative paths are relative to the manifest's folder. The JSON
Schema for editors is `docs/family.schema.json`; `kvxfer family validate` reports the first error
with its line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.tier.policy import Direction, Policy


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelEntry(_Strict):
    """One model of the family."""

    path: str = Field(description="Model folder (relative to the manifest) or hub id.")
    revision: str | None = Field(default=None, description="Hub revision.")


class PolicyEntry(_Strict):
    """Limits of conversion for one ordered pair; see `kvstore_xfer.tier.policy.Policy`."""

    enabled: bool = True
    min_tokens: int = Field(default=0, ge=0)
    hold_back_tokens: int = Field(default=0, ge=0)
    max_prefix_tokens: int | None = Field(default=None, ge=1)
    budget_seconds: float = Field(default=2.0, gt=0)
    conversion_overhead_seconds: float = Field(default=0.0, ge=0)
    prefill_tokens_per_second: float | None = Field(default=None, gt=0)
    conversion_tokens_per_second: float | None = Field(default=None, gt=0)


class PairEntry(_Strict):
    """One ordered pair: blocks of `source` may be converted for `target`."""

    source: str
    target: str
    mapper: str = Field(description="Mapper folder (relative to the manifest).")
    direction: Direction | None = Field(
        default=None,
        strict=False,
        description="Stated direction; refused when the models' sizes say otherwise.",
    )
    policy: PolicyEntry = PolicyEntry()


class MetricsEntry(_Strict):
    """Prometheus metrics on a port of our own, for engines that do not expose them."""

    port: int = Field(ge=1, le=65535)
    address: str = "127.0.0.1"


class Family(_Strict):
    """A family manifest."""

    family: str = Field(min_length=1)
    store: str = Field(description="Store URL, such as local:///var/lib/kvxfer?max_size=50GiB.")
    models: dict[str, ModelEntry] = Field(min_length=1)
    pairs: list[PairEntry] = []
    metrics: MetricsEntry | None = None

    @model_validator(mode="after")
    def _names_exist_once(self) -> Family:
        seen: set[tuple[str, str]] = set()
        for number, pair in enumerate(self.pairs):
            for role in ("source", "target"):
                name = getattr(pair, role)
                if name not in self.models:
                    raise ValueError(f"pairs.{number}.{role}: no model {name!r} under models")
            if pair.source == pair.target:
                raise ValueError(f"pairs.{number}.target: is the source itself")
            if (pair.source, pair.target) in seen:
                raise ValueError(f"pairs.{number}.target: this pair is given twice")
            seen.add((pair.source, pair.target))
        return self


def policy_of(entry: PolicyEntry) -> Policy:
    """The tier's policy from its manifest entry."""
    return Policy(**entry.model_dump())


def load_family(path: str | Path) -> Family:
    """Read and validate a manifest.

    Raises ConfigError in one line: file, line, field, and what is expected there.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{file}: {reason}; give a readable family manifest") from None
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
        return Family.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_first_error(file, tree, error)) from None


def json_schema() -> dict[str, Any]:
    """JSON Schema of the manifest."""
    return Family.model_json_schema()


def _first_error(file: Path, tree: yaml.Node | None, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = tuple(first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown field; remove it or correct its name"
    if not where and ":" in message:  # our own checks name the field in their text
        field, _, message = message.partition(": ")
        where = tuple(int(part) if part.isdecimal() else part for part in field.split("."))
    name = ".".join(str(part) for part in where) or "manifest"
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
