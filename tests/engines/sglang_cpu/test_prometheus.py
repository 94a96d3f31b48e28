"""A real Prometheus over real engines with the tier, and over the tier's own port, under load.

    KVXFER_PICTURES=docs/pictures pytest tests/engines/sglang_cpu/test_prometheus.py

writes the pictures of the documents; without the variable they go to a temporary folder.
"""

import functools
import http.server
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from environments import REPOSITORY
from sglang_cpu.conftest import MODELS
from sglang_cpu.engine import write_manifest
from sglang_cpu.server import eventually, free_port

from kvstore_xfer import metrics
from kvstore_xfer.gate.watch import make_watch, save_watch
from kvstore_xfer.mapper.convert import TorchConverter
from kvxfer_transformers.queries import capture_queries

sys.path.insert(0, str(REPOSITORY / "tests" / "deploy"))
import tools

OBSERVE = REPOSITORY / "tests" / "engines" / "observe"
DASHBOARDS = sorted((REPOSITORY / "deploy" / "grafana").glob("*.json"))
# They say what is, and are right when they never move.
CONSTANT = {"kvxfer_build_info", "kvxfer_gate_retention", "kvxfer_store_up"}
PROMPTS = 16


class Prometheus:
    """A server that scrapes the given endpoints every second, and what it answers."""

    def __init__(self, folder, targets):
        self.port, self.started = free_port(), time.time()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
            "rule_files": [str(REPOSITORY / "deploy" / "prometheus" / "kvxfer.rules.yaml")],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                for name, port in targets.items()
            ],
        }
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self.log = folder / "prometheus.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    tools.prometheus(),
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--web.cors.origin=.*",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        eventually(self._ready, 60, self.log.read_text)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def get(self, path, **query):
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)["data"]

    def series(self, expression):
        """Values over the time since the start, by series; only numbers."""
        now = time.time()
        step = max(1, int((now - self.started) / 1000))
        rows = self.get(
            "/api/v1/query_range", query=expression, start=self.started, end=now, step=step
        )["result"]
        values = ([float(value) for _, value in row["values"]] for row in rows)
        return [row for row in ([v for v in row if math.isfinite(v)] for row in values) if row]

    def stop(self):
        self.process.terminate()
        self.process.wait(30)

    def _ready(self):
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@pytest.fixture(scope="module")
def watched_mapper(family_mapper, tmp_path_factory):
    """The family's mapper with what a check leaves for production."""
    folder = tmp_path_factory.mktemp("watched") / "mapper"
    shutil.copytree(family_mapper.folder, folder)
    pair = family_mapper
    record = make_watch(
        pair.artifact.mapper.digest,
        pair.source,
        pair.target,
        TorchConverter(pair.artifact.mapper, torch.float32),
        functools.partial(capture_queries, pair.target),
        pair.passages,
        192,
    )
    save_watch(folder, "float32", record)
    return SimpleNamespace(folder=folder, record=record)


@pytest.fixture(scope="module")
def own_port(watched_mapper, tmp_path_factory):
    """The tier's own port, under load in another process."""
    folder = tmp_path_factory.mktemp("own")
    file = folder / "family.yaml"
    pair = {"source": "small", "target": "large", "mapper": str(watched_mapper.folder)}
    # Two levels, of which the first is too small: blocks move between them.
    levels = f"local://{folder}/near?min_free=0&max_size=3MiB|local://{folder}/far?min_free=0"
    write_manifest(file, levels, MODELS, [pair])
    file.write_text(file.read_text() + f"metrics: {{port: {free_port()}}}\n")
    paths = [REPOSITORY, REPOSITORY / "kernels", REPOSITORY / "integrations"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, OBSERVE / "own_port.py", file, "3600"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    line = process.stdout.readline()
    assert line, (folder / "log").read_text()
    yield json.loads(line)["port"]
    process.kill()
    process.wait()
    process.stdout.close()


def damage_blocks(store):
    """Flip the last byte of every payload file of the store."""
    for path in Path(store).rglob("*"):
        if path.is_file() and path.suffix != ".mdb" and path.stat().st_size > 20_000:
            data = bytearray(path.read_bytes())
            data[-1] ^= 0xFF
            path.write_bytes(data)


@pytest.fixture(scope="module")
def scraped(engines, own_port, watched_mapper, manifest, texts, tmp_path_factory):
    """Prometheus after everything that metrics tell of has happened."""
    folder = tmp_path_factory.mktemp("prometheus")
    targets = {
        "small": engines.small.server.port,
        "large": engines.large.server.port,
        "tier": own_port,
    }
    prometheus = Prometheus(folder, targets)
    try:
        _everything_happens(engines, watched_mapper, manifest, texts, folder / "store")
        time.sleep(12)  # the store's totals are refreshed every ten seconds
        yield prometheus
    finally:
        for engine in (engines.small, engines.large):
            engine.attach(engines.manifest)
        prometheus.stop()


def _everything_happens(engines, mapper, manifest, texts, store):
    prompts = texts(PROMPTS)
    honest = {"mapper": mapper.folder, "policy": {"sampled_share": 0.4}}
    plain = manifest(store, query="?max_size=8MiB&min_free=0", **honest)
    engines.small.attach(plain)
    engines.large.attach(plain)
    for number, prompt in enumerate(prompts):
        engines.small.ask_and_store(prompt)
        engines.large.ask_and_store(prompt)
        if number % 5 == 0:
            engines.large.fresh(prompt)
    # A store with another cap; an engine that is none of its models; a pair that must go off.
    engines.small.attach(manifest(store, models={"large": MODELS["large"]}))
    time.sleep(3)  # several scrapes
    engines.small.attach(plain)
    strict = {"sampled_share": 1.0, "min_retention": 0.9999}
    query = "?max_size=9MiB&min_free=0"
    again = manifest(store, query=query, mapper=mapper.folder, policy=strict)
    engines.large.attach(again)
    later = texts(PROMPTS + 12)[PROMPTS:]
    for prompt in later:
        engines.small.ask_and_store(prompt)
        engines.large.ask_and_store(prompt)
    damage_blocks(store)
    for prompt in later[-3:]:  # older ones are evicted
        engines.small.fresh(prompt)
        engines.large.fresh(prompt)


@pytest.mark.timeout(900, func_only=True)
@pytest.mark.parametrize("metric", metrics.all_metrics(), ids=metrics.exported_name)
def test_every_metric_of_the_table_is_there_and_moves(metric, scraped):
    name = metrics.exported_name(metric)
    wanted = f"{name}_count" if metric._type == "histogram" else name
    series = scraped.series(wanted)
    assert series, f"{wanted} was never scraped"
    changed = any(len(set(values)) > 1 for values in series)
    assert changed or name in CONSTANT, f"{wanted} did not move"


def test_the_engines_and_the_own_port_are_both_scraped(scraped):
    rows = scraped.get("/api/v1/query", query="count by (job) (kvxfer_lookups_total)")["result"]
    assert {row["metric"]["job"] for row in rows} == {"small", "large", "tier"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_the_dashboards_returns_data(path, scraped):
    empty = []
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$target", ".*")
            if not scraped.series(expression.replace("$__rate_interval", "30s")):
                empty.append((panel["title"], expression))
    assert empty == []


def test_every_recorded_series_is_there(scraped):
    rules = yaml.safe_load((REPOSITORY / "deploy/prometheus/kvxfer.rules.yaml").read_text())
    recorded = [r["record"] for group in rules["groups"] for r in group["rules"] if "record" in r]
    assert [name for name in recorded if not scraped.series(name)] == []


def test_the_alert_of_the_pair_that_was_switched_off_fires(scraped):
    firing = scraped.get("/api/v1/alerts")["alerts"]
    names = {row["labels"]["alertname"] for row in firing if row["state"] == "firing"}
    assert "KvxferPairSwitchedOff" in names


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A web server for the page and the dashboards."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=REPOSITORY)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_drawn_in_a_browser(path, scraped, pages, tmp_path):
    query = urllib.parse.urlencode(
        {
            "dashboard": f"/{path.relative_to(REPOSITORY)}",
            "prometheus": scraped.url,
            "seconds": int(time.time() - scraped.started),
        }
    )
    address = f"{pages}/{OBSERVE.relative_to(REPOSITORY)}/page.html?{query}"
    folder = Path(os.environ.get("KVXFER_PICTURES") or tmp_path).resolve()
    picture = folder / f"{path.stem}.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=20000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    browser = functools.partial(
        subprocess.run, capture_output=True, text=True, timeout=120, check=True
    )
    page = browser([tools.browser(), *options, "--dump-dom", address]).stdout
    assert 'data-done="yes"' in page
    assert "</h2>no data" not in page
    assert page.count('class="panel"') == len(
        [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]
    )
    size = "--window-size=1400,1060"
    browser([tools.browser(), *options, size, f"--screenshot={picture}", address])
    assert picture.stat().st_size > 20_000
