"""What running engines say of themselves, in their metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_xfer.doctor.findings import ok, problem
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.scrape import scrape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore_xfer.doctor.findings import Finding
    from kvstore_xfer.scrape import Scrape


def check_running(url: str) -> Iterator[Finding]:
    about = f"engine {url}"
    try:
        now = scrape([url])
    except ConfigError as error:
        remedy = "start the engine with KVXFER_CONFIG and --enable-metrics, or give its URL"
        yield problem(about, "no_metrics", str(error), remedy)
        return
    found = [*_refusals(about, now), *_store(about, now), *_errors(about, now)]
    yield from found
    if not found:
        yield ok(about, f"{now.total('kvxfer_lookups_total'):,.0f} lookups, no errors")


def _refusals(about: str, now: Scrape) -> Iterator[Finding]:
    for (target, reason), value in now.values(
        "kvxfer_conversion_refused", "target", "reason"
    ).items():
        if value:
            text = f"{target}: nothing is converted ({reason})"
            remedy = "docs/sglang.md, 'What turns conversion off', says what the reason means"
            yield problem(about, f"refused_{reason}", text, remedy)


def _store(about: str, now: Scrape) -> Iterator[Finding]:
    for (store,), up in now.values("kvxfer_store_up", "store").items():
        if not up:
            text = f"its store ({store}) does not answer"
            remedy = (
                "free its disk, mount it read-write, or give its folder back"
                if store == "local"
                else "start the store's server"
            )
            yield problem(about, "store_down", text, remedy)


def _errors(about: str, now: Scrape) -> Iterator[Finding]:
    for (target, call), count in now.values("kvxfer_errors_total", "target", "call").items():
        if count:
            text = f"{target}: {count:,.0f} unexpected errors in {call} became misses"
            yield problem(about, "errors", text, "see the traceback in the engine's log; report it")
