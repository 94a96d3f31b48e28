"""Into a pipe or a file tables are as wide as what is in them, whatever COLUMNS says."""

import re
from pathlib import Path

import pytest
import yaml

from kvstore_xfer.blocks.header import BlockHeader
from kvstore_xfer.cli import bench_map, demo, predict, top
from kvstore_xfer.cli import eval as evaluation
from kvstore_xfer.cli.common import progress
from kvstore_xfer.cli.main import main
from kvstore_xfer.cli.output import open_console
from kvstore_xfer.cli.show_record import print_record
from kvstore_xfer.gate.handoff import Drift
from kvstore_xfer.gate.predict import Forecast, MethodForecast
from kvstore_xfer.scrape import Scrape
from kvstore_xfer.store.base import WriteRequest
from kvstore_xfer.store.local import LocalStore
from kvstore_xfer.store.testing import block_key

FAMILY = Path(__file__).parents[1] / "data" / "family"
CLI = Path(demo.__file__).parent
LONG = "[a]-name-that-alone-is-wider-than-the-forty-columns-of-this-terminal"
CELL = {"mean": 0.5, "low": 0.25, "high": 0.75}
TOLD = "0.5000 [0.2500, 0.7500]"


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")


@pytest.fixture
def printed(capfd):
    """What was printed, without the escapes of a terminal; none of it cut."""

    def call():
        text = capfd.readouterr().out
        assert "…" not in text
        assert "\x1b" not in text
        return text

    return call


def row_of(text, *cells):
    """All cells stand in one line, in order."""
    assert re.search(".*".join(map(re.escape, cells)), text), text


def test_describe(printed):
    assert main(["describe", str(FAMILY / "small")]) == 0
    row_of(printed(), "RoPE", "default, 32 of 32 dimensions, half-split pairs")


def test_a_manifest(printed, family_mapper, tmp_path):
    manifest = tmp_path / "family.yaml"
    models = {
        name: {"path": str(FAMILY / name[-5:])} for name in (f"{LONG}-small", f"{LONG}-large")
    }
    pair = dict(zip(("source", "target"), models, strict=True), mapper=str(family_mapper.folder))
    store = f"local:{tmp_path / 'store'}?min_free=0"
    content = {"family": "f", "store": store, "models": models, "pairs": [pair]}
    manifest.write_text(yaml.safe_dump(content))
    assert main(["family", "validate", str(manifest)]) == 0
    digest = family_mapper.artifact.mapper.digest[:12]
    row_of(printed(), f"{LONG}-small", f"{LONG}-large", "up", digest, "float32: serves")
    main(["doctor", str(manifest)])
    lines = printed().splitlines()
    assert all(line.startswith(("ok ", "note ", "PROBLEM ", "    ")) for line in lines)


def test_a_store(printed, tmp_path):
    identity = LONG.replace("[a]", "a")
    key = block_key(1, identity)
    with LocalStore(tmp_path, min_free_bytes=0) as store:
        store.write([WriteRequest(BlockHeader(key, 4096), [memoryview(bytes(4096))])])
    assert main(["store", "stat", f"local://{tmp_path}?min_free=0"]) == 0
    row_of(printed(), identity, "native", "1", "KiB")


def test_a_record_of_the_gate(printed, family_mapper):
    print_record(family_mapper.record, open_console())
    text = printed()
    cells = family_mapper.record.arms["mapped"]
    told = ["{mean:.4f} [{low:.4f}, {high:.4f}]".format(**cells[n]) for n in ("loss", "kl", "top1")]
    row_of(text, *told)
    row_of(text, "attention output, cosine: ", ", worst layer ", "]")


def test_a_forecast(printed):
    method = MethodForecast("full-head", 12, 123456789, *[0.5] * 5, "")
    forecast = Forecast("likely", "full-head", "", (method,), (("none", 0.5),), 48)
    predict._print(forecast, 12.0, open_console())
    row_of(printed(), "full-head", "12", "123,456,789", *["0.5000"] * 5)


def test_benchmarks_and_drift(printed):
    row = evaluation.TaskRow("s", "t", LONG, "acc", 1000, 0.25, 0.75, 0.5, 0.25, 0.5, 0.125)
    evaluation._print([row], [Drift(10, LONG, CELL, CELL, CELL)], open_console())
    text = printed()
    row_of(text, f"{LONG} (acc)", "1000", "0.250", "0.500 ± 0.125", "0.667", "0.500", "0.000")
    row_of(text, "10", LONG, TOLD, TOLD, TOLD)


def test_totals_of_engines(printed):
    labels = {"source": LONG, "target": LONG, "outcome": "missed", "reason": "absent"}
    samples = {"kvxfer_lookup_tokens_total": {tuple(sorted(labels.items())): 1234567.0}}
    now = Scrape(0.0, samples)
    open_console().print(top.view(now, now))
    row_of(printed(), LONG, LONG, "missed", "absent", "1,234,567")


def test_the_demo_and_the_speed_of_mapping(printed):
    lookup = dict.fromkeys(("native", "derived", "converted", "declined", "missed"), 1234567)
    seconds = {f"ttft_{way}_s": 1.0 for way in ("native", "converted", "derived")}
    texts = {f"continuation_{way}": LONG for way in ("native", "converted", "prompt")}
    facts = {"lookups": [lookup, lookup], "prompt_tokens": 192, "blocks": 12, "find_s": 0.001}
    demo._print({**facts, **seconds, **texts}, open_console())
    text = printed()
    row_of(text, "again", *["1,234,567"] * 5, "1000 ms")
    row_of(text, LONG, LONG)
    bench_map._print("title", ("pair", "ms"), iter([(LONG, 0.125)]))
    row_of(printed(), LONG, "0.125")


def test_the_last_line_of_a_bar(capfd):
    with progress("relating it to retention, as long as a description may be") as update:
        update(3, 4)
    (line,) = filter(None, capfd.readouterr().err.splitlines())
    row_of(line, "relating it to retention, as long as a description may be", "3/4", "0:00:0")


def test_nothing_is_told_of_a_loop_that_never_began(capfd):
    with pytest.raises(ValueError, match="before"), progress("fitting"):
        raise ValueError("before its first step")
    assert capfd.readouterr().err == ""


def test_no_command_has_a_console_of_its_own():
    others = [file for file in CLI.glob("*.py") if file.name != "output.py"]
    assert [file.name for file in others if "Console(" in file.read_text()] == []


def test_states_of_pairs_without_their_markup(printed):
    pair = tuple(sorted({"source": LONG, "target": LONG, "direction": "up"}.items()))
    shut = tuple(sorted({"source": "b", "target": LONG, "direction": "up"}.items()))
    now = Scrape(0.0, {"kvxfer_gate_open": {pair: 1.0, shut: 0.0}})
    open_console().print(top.view(now, now))
    text = printed()
    row_of(text, f"{LONG}  {LONG}  up         open")
    row_of(text, f"  {LONG}  up         closed")
