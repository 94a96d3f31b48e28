"""The parts of a store URL, validated; and how a URL is shown without its secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore_xfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{suffix}": int(base**power)
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SECRET = re.compile(r"([?&][^=&]*(?:pass|secret|token|key|credential|sas|sig)[^=&]*=)[^&|]*", re.I)
_LOGIN = re.compile(r"((?://|%2f%2f)[^/?&@:%]*)(?::|%3a)[^/?&@]*?(@|%40)", re.I)
_NOT_SECRET = re.compile(r"[?&](?:password_env|password_file|key)=", re.I)


def shown(url: str) -> str:
    """The URL as it may stand in a message or a log."""
    whole = _LOGIN.sub(r"\1:***\2", url)
    return _SECRET.sub(
        lambda found: found[0] if _NOT_SECRET.match(found[1]) else f"{found[1]}***", whole
    )


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``500MB`` or ``50GiB``. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,15}) ?([KMGT]?i?B?)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 4096, 500MB or 50GiB")
    return int(match[1]) * _UNITS[match[2]]


def parse_seconds(text: str) -> float:
    """Seconds of ``500ms``, ``2.5s``, ``10m``, ``24h`` or ``7d``. Raises ValueError otherwise."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s|m|h|d)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time such as 500ms, 2s or 24h")
    return float(match[1]) * _SECONDS[match[2]]


def query_parameters(url: str, allowed: Collection[str]) -> dict[str, str]:
    """The parameters behind the ``?``. Raises ConfigError for one that is unknown or repeated."""
    pairs = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    parameters: dict[str, str] = {}
    for name, value in pairs:
        if name not in allowed:
            names = ", ".join(sorted(allowed))
            raise ConfigError(f"store {shown(url)!r}: unknown parameter {name!r}; allowed: {names}")
        if name in parameters:
            raise ConfigError(
                f"store {shown(url)!r}: parameter {name!r} is given twice; give it once"
            )
        parameters[name] = value
    return parameters


class Parameters:
    """The parts of one URL. Every method raises ConfigError that names URL and parameter."""

    def __init__(self, url: str, allowed: Collection[str], base: Path | None = None) -> None:
        self._url = shown(url)
        self._base = base or Path.cwd()
        try:
            self.parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(f"store {self._url!r}: {error}; correct the URL") from None
        self.scheme = self.parts.scheme
        self._values = query_parameters(url, allowed)

    def text(self, name: str, default: str) -> str:
        return self._values.get(name, default)

    def http(self, name: str) -> str | None:
        """An ``http://`` or ``https://`` address; None when it is not given, or empty."""
        address = self._values.get(name, "")
        try:
            parts = urlsplit(address)
        except ValueError as error:
            raise self.wrong(name, str(error)) from None
        if address and (parts.scheme not in ("http", "https") or not parts.netloc):
            raise self.wrong(name, "expected http://host or https://host")
        return address or None

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._values.get(name, "yes" if default else "no")
        if value not in ("yes", "no"):
            raise self.wrong(name, f"{value!r} is neither yes nor no")
        return value == "yes"

    def size(self, name: str, default: int, *, least: int = 0) -> int:
        if name not in self._values:
            return default
        try:
            size = parse_size(self._values[name])
        except ValueError as error:
            raise self.wrong(name, str(error)) from None
        if size < least:
            raise self.wrong(name, "must be more than 0" if least == 1 else f"at least {least}")
        return size

    def seconds(self, name: str, default: float, *, least: float = 0.0) -> float:
        if name not in self._values:
            return default
        try:
            seconds = parse_seconds(self._values[name])
        except ValueError as error:
            raise self.wrong(name, str(error)) from None
        if seconds < least:
            raise self.wrong(name, f"at least {least} s")
        return seconds

    def file(self, name: str) -> str | None:
        """A path, relative to the base folder; the file need not be there yet."""
        if name not in self._values:
            return None
        path = unquote(self._values[name])
        if not path or "\0" in path:
            raise self.wrong(name, "name a file")
        return os.fspath(self._base / path)

    def secret(self, name: str, variable: str) -> str | None:
        """From the file ``<name>_file``, else the variable ``<name>_env``, else `variable`."""
        file = self.file(f"{name}_file")
        if file is not None:
            try:
                return Path(file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not text"
                raise self.wrong(f"{name}_file", f"{file}: {reason}") from None
        chosen = self._values.get(f"{name}_env")
        if chosen is not None and chosen not in os.environ:
            raise self.wrong(f"{name}_env", f"the environment has no variable {chosen!r}; set it")
        return os.environ.get(chosen or variable) or None

    def hosts(self, default_port: int) -> tuple[str | None, tuple[tuple[str, int], ...]]:
        """User and hosts of ``user@host:port,host:port``. A password there is refused."""
        login, at, listed = self.parts.netloc.rpartition("@")
        if ":" in login:
            raise ConfigError(
                f"store {self._url!r}: a URL is no place for a password; "
                "use password_file or password_env"
            )
        hosts = tuple(self._host(text, default_port) for text in listed.split(","))
        return (unquote(login) or None) if at else None, hosts

    def _host(self, text: str, default_port: int) -> tuple[str, int]:
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?", text)
        port = int(match[2] or default_port) if match else 0
        if match is None or not 0 < port < 65536:
            raise ConfigError(f"store {self._url!r}: {text!r} is not host:port")
        return match[1].strip("[]"), port

    def wrong(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"store {self._url!r}: parameter {name!r}: {problem}")
