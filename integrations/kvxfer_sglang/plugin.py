"""The SGLang plug-in: the tier by one environment variable, and word of changed weights.

SGLang calls `activate` in each of its processes, before it parses arguments. With ``KVXFER_CONFIG``
set to a family manifest, the engine starts with the hierarchical cache and this package's storage;
options that the operator gave are kept.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from kvxfer_sglang.weights import weights

CONFIG_VARIABLE = "KVXFER_CONFIG"
PAGE_SIZE = 64
EXTRA_CONFIG = {
    "backend_name": "kvxfer",
    "module_path": "kvxfer_sglang.hicache",
    "class_name": "KvxferStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    # A conversion takes longer than a read; SGLang's defaults are 1 and 0.25 seconds.
    "prefetch_timeout_base": 2,
    "prefetch_timeout_per_ki_token": 0.5,
}
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES = ("distributed", "tensor", "ipc")
_FLUSH = "sglang.srt.managers.scheduler.Scheduler.flush_cache"

_log = logging.getLogger(__name__)


def activate() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_UPDATER}.update_weights_from_disk", _after_disk, HookType.AFTER)
    for source in _UPDATES:
        target = f"{_UPDATER}.update_weights_from_{source}"
        HookRegistry.register(target, _after_update, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.begin_weight_update", _before_session, HookType.BEFORE)
    HookRegistry.register(_FLUSH, _after_flush, HookType.AFTER)
    weights.watch()
    if os.environ.get(CONFIG_VARIABLE):
        target = "sglang.srt.server_args.ServerArgs.resolve_once"
        HookRegistry.register(target, _before_resolution, HookType.BEFORE)


def turn_on(server_args: Any, manifest: str) -> None:
    """Set what the tier needs on unresolved server arguments, where the operator set nothing."""
    if server_args.hicache_storage_backend not in (None, "dynamic"):
        _log.warning(
            "kvxfer: %s is set, but --hicache-storage-backend %s was given; the tier is off",
            CONFIG_VARIABLE,
            server_args.hicache_storage_backend,
        )
        return
    given = _extra_config(server_args.hicache_storage_backend_extra_config)
    if given is None or given.get("class_name", "KvxferStorage") != "KvxferStorage":
        _log.warning(
            "kvxfer: %s is set, but the extra config of the storage backend names another one or "
            "a file; the operator's options are used as they are",
            CONFIG_VARIABLE,
        )
        return
    config = {**EXTRA_CONFIG, "family": manifest, **given}
    server_args.hicache_storage_backend_extra_config = json.dumps(config)
    server_args.hicache_storage_backend = "dynamic"
    server_args.enable_hierarchical_cache = True
    if server_args.page_size is None:
        server_args.page_size = PAGE_SIZE


def _extra_config(text: str | None) -> dict[str, Any] | None:
    """The operator's inline extra config; None when it is a file or no JSON object."""
    if not text:
        return {}
    try:
        config = json.loads(text)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def _before_resolution(server_args: Any, *_: Any, **__: Any) -> None:
    if not getattr(server_args, "_resolution_finished", False):
        turn_on(server_args, os.environ[CONFIG_VARIABLE])


def _after_disk(result: Any, _: Any, request: Any) -> None:
    _after(result, request, from_files=request.load_format in (None, "auto"))


def _after_update(result: Any, _: Any, request: Any) -> None:
    _after(result, request, from_files=False)


def _after(result: Any, request: Any, *, from_files: bool) -> None:
    weights.updated(
        from_files=from_files, success=bool(result.success), emptied=bool(request.flush_cache)
    )
    _tell()


def _before_session(*_: Any, **__: Any) -> None:
    """From here to the session's first flushed update, pages of either weights are about."""
    weights.updating()
    _tell()


def _after_flush(result: Any, *_: Any, **__: Any) -> None:
    if result and weights.emptied():
        _tell()


def _tell() -> None:
    hicache = sys.modules.get("kvxfer_sglang.hicache")
    if hicache is not None:  # else no storage of ours was ever attached here
        hicache.weights_changed()
