"""From what a person calls a model to a folder on this machine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_xfer.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt"]
_UNWANTED = ["original/*", "consolidated*"]  # second copies of the weights


@dataclass(frozen=True)
class ModelFolder:
    """A local model folder; `revision` is the hub commit when the hub vouches for its files."""

    path: Path
    revision: str | None


def locate(model: str | Path, revision: str | None = None) -> ModelFolder:
    """A local folder as it is; a hub id from the local Hugging Face cache, else from the hub.

    Raises ModelError when there is no such folder or hub model.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        if revision is not None:
            raise ModelError(f"{model}: --revision is for hub ids; a local folder has only one")
        return ModelFolder(local, _commit(local))
    if local.exists() or not _HUB_ID.fullmatch(str(model)):
        raise ModelError(f"{model}: no such model folder; give a folder or a hub id (owner/name)")
    folder = _hub_snapshot(str(model), revision)
    return ModelFolder(folder, _commit(folder))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, in name order.

    Raises ModelError when there are none or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        shards = read_json(index).get("weight_map", {}).values()
        files = [folder / name for name in sorted(set(shards))]
    elif single.is_file():
        files = [single]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no *.safetensors file; save or download the model as such")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: missing, though {index.name} names it; download it again")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file. Raises ModelError when it is missing or not one."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; is {path.parent} a model folder?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); download it again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object; download it again")
    return data


def _commit(folder: Path) -> str | None:
    """The commit, for a folder of the Hugging Face cache (``.../snapshots/<commit>``).

    So an engine that resolved the hub id itself, and passes the folder, means the same model.
    """
    path = folder.absolute()
    is_snapshot = path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name)
    return path.name if is_snapshot else None


def _hub_snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        cached = Path(snapshot_download(model, revision=revision, local_files_only=True))
        if _is_complete(cached):
            return cached
    except (OSError, ValueError):
        pass  # not in the cache: ask the hub
    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model}: neither a folder, nor in the local Hugging Face cache, nor to be had from "
            f"the hub ({cause}); check the name and revision, or download it first"
        ) from None


def _is_complete(folder: Path) -> bool:
    try:
        return bool(weight_files(folder)) and (folder / "config.json").is_file()
    except ModelError:
        return False
