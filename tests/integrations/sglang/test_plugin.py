import json
from types import SimpleNamespace

import pytest

from kvxfer_sglang import plugin
from kvxfer_sglang.plugin import PAGE_SIZE, turn_on
from kvxfer_sglang.weights import Weights


def arguments(**given):
    return SimpleNamespace(
        **{
            "hicache_storage_backend": None,
            "hicache_storage_backend_extra_config": None,
            "enable_hierarchical_cache": False,
            "page_size": None,
            **given,
        }
    )


def test_everything_that_the_tier_needs_is_set():
    args = arguments()
    turn_on(args, "/family.yaml")
    config = json.loads(args.hicache_storage_backend_extra_config)
    assert (args.hicache_storage_backend, args.enable_hierarchical_cache) == ("dynamic", True)
    assert args.page_size == PAGE_SIZE
    assert config["family"] == "/family.yaml"
    assert config["class_name"] == "KvxferStorage"
    assert (config["interface_v1"], config["hicache_storage_pass_prefix_keys"]) == (1, True)


def test_what_the_operator_gave_is_kept():
    extra = json.dumps({"prefetch_threshold": 64, "family": "/other.yaml"})
    args = arguments(page_size=16, hicache_storage_backend_extra_config=extra)
    turn_on(args, "/family.yaml")
    config = json.loads(args.hicache_storage_backend_extra_config)
    assert args.page_size == 16
    assert (config["prefetch_threshold"], config["family"]) == (64, "/other.yaml")


@pytest.mark.parametrize(
    "given",
    [
        {"hicache_storage_backend": "mooncake"},
        {"hicache_storage_backend_extra_config": "@other.yaml"},
        {"hicache_storage_backend_extra_config": "[1]"},
        {"hicache_storage_backend_extra_config": json.dumps({"class_name": "Other"})},
    ],
)
def test_another_storage_is_left_alone_and_said(given, caplog):
    args = arguments(**given)
    turn_on(args, "/family.yaml")
    assert args == arguments(**given)
    assert "KVXFER_CONFIG" in caplog.text


SUCCEEDED, FAILED = SimpleNamespace(success=True), SimpleNamespace(success=False)
FLUSHED = SimpleNamespace(load_format=None, flush_cache=True)


@pytest.fixture
def weights(monkeypatch):
    fresh = Weights()
    monkeypatch.setattr(plugin, "weights", fresh)
    return fresh


def test_an_update_is_told_only_where_storage_is_attached(monkeypatch, weights):
    told = []
    monkeypatch.delitem(plugin.sys.modules, "kvxfer_sglang.hicache", raising=False)
    plugin._after_disk(SUCCEEDED, None, FLUSHED)
    module = SimpleNamespace(weights_changed=lambda: told.append(weights.in_files))
    monkeypatch.setitem(plugin.sys.modules, "kvxfer_sglang.hicache", module)
    plugin._after_update(SUCCEEDED, None, FLUSHED)
    plugin._after_disk(SUCCEEDED, None, FLUSHED)
    assert told == [False, True]


def test_weights_of_no_file_are_remembered_for_a_storage_that_comes_later(weights):
    assert weights.in_files
    plugin._after_update(SUCCEEDED, None, FLUSHED)
    assert (weights.in_files, weights.mixed) == (False, False)
    plugin._after_disk(FAILED, None, FLUSHED)
    assert (weights.in_files, weights.mixed) == (False, True)
    plugin._after_disk(SUCCEEDED, None, FLUSHED)
    assert (weights.in_files, weights.mixed) == (True, False)
    plugin._after_disk(SUCCEEDED, None, SimpleNamespace(load_format="npcache", flush_cache=True))
    assert not weights.in_files


def test_pages_of_two_models_are_about_until_a_flush(monkeypatch, weights):
    told = []
    module = SimpleNamespace(weights_changed=lambda: told.append(weights.mixed))
    monkeypatch.setitem(plugin.sys.modules, "kvxfer_sglang.hicache", module)
    plugin._after_disk(SUCCEEDED, None, SimpleNamespace(load_format=None, flush_cache=False))
    plugin._after_flush(False)
    plugin._after_flush(True)
    plugin._after_flush(True)  # an ordinary flush concerns nobody
    plugin._before_session(None)
    assert told == [True, False, True]
