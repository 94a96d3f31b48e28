import logging

import pytest

from kvstore_xfer.family import load_family
from kvxfer_lmcache.start import log_as, say_what_is_there


@pytest.fixture
def manifest(family_mapper, tmp_path):
    file = tmp_path / "family.yaml"
    file.write_text(
        "family: tiny\nstore: 'valkey://user:secret@host'\n"
        "models: {small: {path: s}, large: {path: l}, other: {path: o}}\n"
        f"pairs:\n- {{source: small, target: large, mapper: {family_mapper.folder}}}\n"
        "- {source: large, target: small, mapper: nowhere}\n"
    )
    return file


def test_the_start_names_family_store_and_pairs(manifest, family_mapper, caplog):
    caplog.set_level(logging.INFO)
    say_what_is_there(manifest, load_family(manifest))
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.startswith("kvxfer: ") for line in lines)
    assert f"family tiny ({manifest}), valkey store, models: small, large, other" in lines[0]
    assert f"pair small -> large: {family_mapper.folder}, checked in " in lines[1]
    assert "pair large -> small is off (mapper): " in lines[2]
    assert "nowhere" in lines[2]
    assert "secret" not in caplog.text


def test_loggers_that_have_no_form_get_the_engines(monkeypatch):
    given, root = [], logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_as(lambda name: given.append(name) or logging.getLogger(name))
    assert given == ["kvstore_xfer", "kvxfer_lmcache"]
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
    log_as(lambda name: given.append("again") or logging.getLogger(name))
    assert "again" not in given
