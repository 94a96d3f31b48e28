"""Errors raised while a person configures, fits, checks or attaches; the data path returns reasons.

Every message is one line that names the file or value, the field, and the remedy.
"""

from __future__ import annotations


class KvxferError(Exception):
    """Base of every error this package raises on purpose; the CLI prints it as one line, exit 2."""

    def __str__(self) -> str:
        # Messages quote files and other libraries: neither may break the line or the terminal.
        text = super().__str__()
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class ConfigError(KvxferError, ValueError):
    """A manifest, URL or option is wrong."""


class ModelError(KvxferError, ValueError):
    """A model folder cannot be read, or two models do not fit together."""


class UnsupportedModelError(ModelError):
    """The model is readable but its cache must not be converted; the message says why."""


class ArtifactError(KvxferError, ValueError):
    """A mapper folder is missing, damaged or of another format."""


class TextError(KvxferError, ValueError):
    """Calibration or held-out text is missing, empty or too short."""


class StoreError(KvxferError, OSError):
    """A store cannot be opened or used at all (not: one block is missing or damaged)."""


class BlockFormatError(KvxferError, ValueError):
    """Bytes are not a block of a known format."""
