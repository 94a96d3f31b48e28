"""Metrics on a port of our own, for engines that do not expose them."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:
    from kvstore_xfer.family import MetricsEntry

_log = logging.getLogger(__name__)
PORTS = 64  # engines and ranks of one host take the next free port
_MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
_lock = threading.Lock()
_serving: dict[tuple[str, int], int] = {}


def serve(entry: MetricsEntry) -> int | None:
    """Serve ``/metrics`` on the first free port from ``entry.port`` on; once per process.

    Returns the port, None when none of the ports is free: then an error is logged and the tier
    goes on without. In prometheus_client's multiprocess mode the answer covers every process of
    the engine.
    """
    with _lock:
        wanted = (entry.address, entry.port)
        if wanted not in _serving:
            port = _start(entry)
            if port is None:
                return None
            _serving[wanted] = port
        return _serving[wanted]


def _start(entry: MetricsEntry) -> int | None:
    last = min(entry.port + PORTS - 1, 65535)
    for port in range(entry.port, last + 1):
        try:
            start_http_server(port, addr=entry.address, registry=_registry())
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        _log.info("kvxfer: metrics on http://%s:%d/metrics", entry.address, port)
        return port
    _log.error(
        "kvxfer: no metrics on %s, ports %d to %d: %s; change metrics in the manifest",
        entry.address,
        entry.port,
        last,
        reason,
    )
    return None


def _registry() -> CollectorRegistry:
    if _MULTIPROCESS not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
