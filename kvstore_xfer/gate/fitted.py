"""What text a mapper was fitted on, so that nothing of it counts as held out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_xfer.fit.overlap import repeats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.mapper.artifact import Artifact


class FittedText:
    """By the artifact's record: digests of documents, and a sketch of what they say."""

    def __init__(self, artifact: Artifact) -> None:
        calibration = artifact.fit.get("calibration", {})
        self.documents = frozenset(calibration.get("documents", ()))
        self._sketch = calibration.get("ngrams", "")  # mappers of earlier fits have none

    def has(self, document: str, tokens: Sequence[int]) -> bool:
        """Whether the fit has seen this document, or most of this part of it in another one."""
        return document in self.documents or self.repeats(tokens)

    def repeats(self, tokens: Sequence[int]) -> bool:
        return bool(self._sketch) and repeats(tokens, self._sketch)
