"""Hub ids are found in the local Hugging Face cache first."""

from __future__ import annotations

import huggingface_hub.constants
import pytest

from kvstore_xfer.errors import ModelError
from kvstore_xfer.models.description import describe
from kvstore_xfer.models.location import locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch, make_model):
    """A Hugging Face cache that holds two commits of one model, and no network."""
    cache = tmp_path / "hub"
    repository = cache / "models--acme--tiny"
    (repository / "snapshots").mkdir(parents=True)
    for commit, seed in ((COMMIT, 0), (OLDER, 1)):
        make_model(commit, seed).rename(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repository


def test_a_hub_id_is_resolved_to_its_commit_which_is_the_weights_digest(hub_cache):
    found = describe("acme/tiny")
    assert found.name == "acme/tiny"
    assert found.weights_digest == f"hub-{COMMIT}"


def test_another_revision_is_another_model(hub_cache):
    assert describe("acme/tiny", revision=OLDER).weights_digest == f"hub-{OLDER}"


def test_the_folder_an_engine_resolved_is_the_same_model_as_the_hub_id(hub_cache):
    by_folder = describe(hub_cache / "snapshots" / COMMIT)
    assert by_folder.fingerprint() == describe("acme/tiny").fingerprint()


def test_a_model_that_is_nowhere_is_told_in_one_line(hub_cache):
    with pytest.raises(ModelError, match="acme/other: neither a folder, nor in the local") as told:
        locate("acme/other")
    assert "\n" not in str(told.value)
    with pytest.raises(ModelError, match="no such model folder"):
        locate("./models/not here")


def test_a_snapshot_without_weights_is_told(hub_cache):
    (hub_cache / "snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"acme/tiny: .*hub|no \*\.safetensors"):
        describe("acme/tiny")


def test_a_local_folder_has_no_revisions(make_model):
    with pytest.raises(ModelError, match="--revision is for hub ids"):
        locate(make_model(), "main")
