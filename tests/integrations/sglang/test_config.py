from dataclasses import replace
from pathlib import Path

import pytest

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.family import Family
from kvstore_xfer.models.description import describe
from kvstore_xfer.tier.members import recognise
from kvxfer_sglang.config import Settings, read_settings

FAMILY = Path(__file__).parents[2] / "data" / "family"
SGLANG = {"backend_name": "b", "module_path": "m", "class_name": "c", "interface_v1": 1}


def family(**paths):
    models = {name: {"path": str(path)} for name, path in paths.items()}
    return Family.model_validate({"family": "f", "store": "local:s", "models": models})


def test_the_extra_config_names_manifest_and_member():
    settings = read_settings({**SGLANG, "family": "/a.yaml", "model": "big"})
    assert settings == Settings(settings.manifest, "big")
    assert str(settings.manifest) == "/a.yaml"


def test_the_manifest_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVXFER_CONFIG", "/b.yaml")
    assert str(read_settings(SGLANG).manifest) == "/b.yaml"
    assert str(read_settings({"family": "/a.yaml"}).manifest) == "/a.yaml"


def test_no_manifest_and_unknown_keys_are_errors(monkeypatch):
    monkeypatch.delenv("KVXFER_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="KVXFER_CONFIG"):
        read_settings(None)
    with pytest.raises(ConfigError, match="famly"):
        read_settings({"famly": "/a.yaml"})


@pytest.fixture
def small(tmp_path):
    """The trained small model, by a path of its own."""
    path = tmp_path / "models" / "small"
    path.parent.mkdir()
    path.symlink_to(FAMILY / "small")
    return path


def test_a_model_is_recognised_by_its_path(small, tmp_path):
    model = describe(small)
    known = family(other="elsewhere/model", tiny="models/small")
    assert recognise(known, tmp_path, model, str(small), None) == "tiny"
    assert recognise(known, tmp_path, model, str(small.resolve()), None) == "tiny"


def test_a_copied_model_is_recognised_by_its_fingerprint(small, tmp_path):
    model = describe(small)
    known = family(broken=tmp_path, tiny=small)
    assert recognise(known, tmp_path, model, "/another/place", None) == "tiny"
    other = replace(model, weights_digest="other")
    assert recognise(known, tmp_path, other, "/another/place", None) is None


def test_a_hub_id_is_compared_with_its_revision(small, tmp_path):
    known = Family.model_validate(
        {
            "family": "f",
            "store": "local:s",
            "models": {"pinned": {"path": "org/model", "revision": "v2"}},
        }
    )
    model = describe(small)
    assert recognise(known, tmp_path, model, "org/model", "v2") == "pinned"
    assert recognise(known, tmp_path, model, "org/model", None) is None
