"""Digest of what token ids mean: vocabulary, merges, added tokens.

Two models may share blocks only if every id stands for the same text. Normaliser, pre-tokenizer,
chat template and the flags of added tokens decide which ids a text is split into, not what an id
means; each engine does that for itself before any lookup, and files differ in them harmlessly
between versions. So they stay out. Merges stay in: they are cheap evidence that two vocabularies
of equal entries were trained as one.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ModelError
from kvstore_xfer.models.location import read_json

if TYPE_CHECKING:
    from pathlib import Path


# What other kinds of tokenizers keep their vocabulary in.
_VOCABULARY_FILES = ("vocab*", "*.model", "*.tiktoken", "*.spm", "tekken.json")


def tokenizer_digest(folder: Path) -> str:
    """Hex digest of the tokenizer in a model folder.

    Reads ``tokenizer.json``; for other kinds asks transformers, which converts them. Raises
    ModelError when there is no tokenizer.
    """
    file = folder / "tokenizer.json"
    content = _from_file(read_json(file), file) if file.is_file() else _from_transformers(folder)
    config = folder / "tokenizer_config.json"
    if config.is_file():  # transformers adds these to the tokenizer when it loads it
        decoder = read_json(config).get("added_tokens_decoder") or {}
        content["added"] |= {(int(i), token["content"]) for i, token in decoder.items()}
    canonical = {**content, "added": sorted(content["added"])}
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _from_file(data: dict[str, Any], file: Path) -> dict[str, Any]:
    try:
        model = data["model"]
        vocabulary = model["vocab"]
        added = {(token["id"], token["content"]) for token in data.get("added_tokens") or ()}
        if isinstance(vocabulary, dict):
            merges = [_merge(pair) for pair in model.get("merges") or ()]
            return {"vocabulary": vocabulary, "merges": merges, "added": added}
        # Unigram: the place is the id, and the scores do what merges do.
        pieces = {piece: place for place, (piece, _) in enumerate(vocabulary)}
        scores = [score for _, score in vocabulary]
        return {"vocabulary": pieces, "merges": scores, "added": added}
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{file}: not a tokenizer file; download it again") from None


def _merge(pair: Any) -> list[str]:
    """Older files write ``"a b"``, newer ones ``["a", "b"]``."""
    return pair.split(" ", 1) if isinstance(pair, str) else list(pair)


def _from_transformers(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    # Some versions of transformers make an empty tokenizer of an empty folder, and two models
    # without a tokenizer would look like siblings.
    if not any(file for pattern in _VOCABULARY_FILES for file in folder.glob(pattern)):
        raise ModelError(f"{folder}: no tokenizer; add the model's tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - whatever a tokenizer library raises
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{folder}: the tokenizer cannot be read ({cause}); add the model's tokenizer.json"
        ) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _from_file(json.loads(backend.to_str()), folder)
    added = {(i, token.content) for i, token in tokenizer.added_tokens_decoder.items()}
    return {"vocabulary": tokenizer.get_vocab(), "merges": [], "added": added}
