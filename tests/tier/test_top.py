"""`kvxfer top` shows what an endpoint exports, and says in one line when it cannot."""

import http.server
import threading

import pytest
from prometheus_client import start_http_server
from rich.console import Console

from kvstore_xfer.cli import top
from kvstore_xfer.cli.main import main
from kvstore_xfer.scrape import Scrape, scrape


@pytest.fixture
def endpoint():
    server, thread = start_http_server(0, addr="127.0.0.1")
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_once_prints_the_totals(toy, tiers, endpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    toy.prefill(source, toy.source, list(range(50, 62)))
    toy.ask(target, list(range(50, 62)))
    assert main(["top", endpoint, "--once"]) == 0
    shown = capsys.readouterr().out
    now = scrape([endpoint])
    converted = now.total("kvxfer_lookup_tokens_total", target="target", outcome="converted")
    assert converted >= 12
    assert f"{converted:,.0f} (" in shown
    for heading in ("tokens asked for", "why not served", "stages", "store", "pairs", "map"):
        assert heading in shown


def test_a_live_view_shows_rates_between_two_scrapes():
    name, labels = "kvxfer_lookup_tokens_total", (("outcome", "native"), ("target", "m"))
    before = Scrape(10.0, {name: {labels: 100.0}})
    now = Scrape(12.0, {name: {labels: 500.0}})
    console = Console(width=160)
    with console.capture() as capture:
        console.print(top.view(before, now))
    row = next(line for line in capture.get().splitlines() if line.startswith("m "))
    assert "500 (100%)" in row
    assert " 200 " in row


def test_quantiles_are_bucket_bounds():
    rows = {(("le", bound),): count for bound, count in (("0.1", 5), ("1.0", 9), ("+Inf", 10))}
    now = Scrape(0.0, {"s_bucket": rows})
    assert now.quantile("s", 0.5) == 0.1
    assert now.quantile("s", 0.9) == 1.0
    assert now.quantile("s", 0.95) == float("inf")


class Other(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# TYPE up gauge\nup 1\n")

    def log_message(self, *_):
        pass


def test_an_endpoint_that_is_not_ours_is_one_line(capsys):
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert main(["top", f"http://127.0.0.1:{server.server_port}"]) == 2
        thread.join()
    assert "has no kvxfer metrics" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/metrics", "ftp://host/", "nonsense"])
def test_a_wrong_url_is_one_line(url, capsys):
    assert main(["top", url, "--once"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert url in error
