"""OpenTelemetry spans, where opentelemetry-api is installed; else nothing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore_xfer import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.trace import Span

try:
    from opentelemetry import trace
except ImportError:  # the extra `otel` is not installed
    _installed = False
else:
    _installed = True


@contextmanager
def span(name: str, attributes: Mapping[str, str | int]) -> Iterator[Span | None]:
    """A span below the current one, which is the engine's where it traces in this thread.

    None without opentelemetry-api, and while nobody has set a tracer provider.
    """
    if not _installed or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        yield None
        return
    tracer = trace.get_tracer("kvstore_xfer", __version__)
    with tracer.start_as_current_span(name, attributes=dict(attributes)) as current:
        yield current
