import json
from types import SimpleNamespace

import pytest

from kvxfer_sglang import plugin
from kvxfer_sglang.plugin import PAGE_SIZE, turn_on


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


def test_an_update_is_told_only_where_storage_is_attached(monkeypatch):
    told = []
    request = SimpleNamespace(load_format=None, flush_cache=True)
    succeeded = SimpleNamespace(success=True)
    monkeypatch.delitem(plugin.sys.modules, "kvxfer_sglang.hicache", raising=False)
    plugin._after_disk(succeeded, None, request)
    module = SimpleNamespace(weights_changed=lambda **said: told.append(said))
    monkeypatch.setitem(plugin.sys.modules, "kvxfer_sglang.hicache", module)
    plugin._after_disk(succeeded, None, request)
    plugin._after_disk(succeeded, None, SimpleNamespace(load_format="npcache", flush_cache=True))
    plugin._after_update(succeeded, None, SimpleNamespace(flush_cache=False))
    plugin._after_update(SimpleNamespace(success=False), None, request)
    plugin._before_session(None)
    assert [(said["from_files"], said["certain"]) for said in told] == [
        (True, True),
        (False, True),
        (False, False),
        (False, False),
        (False, False),
    ]
