from pathlib import Path

import pytest

from kvstore_xfer.errors import ConfigError
from kvxfer_lmcache.settings import DEFAULT_SECONDS, read_settings


def test_the_manifest_is_a_parameter_or_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVXFER_CONFIG", "/etc/one.yaml")
    assert read_settings({}).manifest == Path("/etc/one.yaml")
    settings = read_settings({"family": "/etc/two.yaml", "load_seconds": 3})
    assert settings.manifest == Path("/etc/two.yaml")
    assert settings.seconds == {**DEFAULT_SECONDS, "load": 3}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"famly": "x"}, "famly"),
        ({}, "KVXFER_CONFIG"),
        ({"family": "f", "load_seconds": 0}, "load_seconds"),
        ({"family": "f", "store_seconds": True}, "store_seconds"),
        ({"family": "f", "lookup_seconds": "5"}, "lookup_seconds"),
    ],
)
def test_mistakes_are_one_line_that_names_them(monkeypatch, given, named):
    monkeypatch.delenv("KVXFER_CONFIG", raising=False)
    with pytest.raises(ConfigError, match=named) as error:
        read_settings(given)
    assert "\n" not in str(error.value)
