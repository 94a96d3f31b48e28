"""``kvxfer describe`` for people and for programs."""

from __future__ import annotations

import argparse
import json

from kvstore_xfer.cli import describe as command
from kvstore_xfer.models.description import describe


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    args = parser.parse_args(["describe", *map(str, arguments)])
    return args.run(args)


def test_json_holds_the_description_and_what_follows_from_it(make_model, capsys):
    folder = make_model()
    assert run(folder, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    found = describe(folder)
    assert printed.pop("convertible") is True
    assert printed.pop("fingerprint") == found.fingerprint()
    assert printed.pop("kv_bytes_per_token") == found.kv_bytes_per_token("bfloat16")
    assert printed == json.loads(json.dumps(found.to_json()))


def test_the_table_says_why_a_model_does_not_convert(make_model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(make_model(model_type="mistral", sliding_window=128)) == 0
    shown = capsys.readouterr().out
    assert "no: sliding-window attention (window 128)" in shown
    assert "4 query, 2 KV, key width 16" in shown


def test_the_table_shows_the_rope(make_model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 128
    run(make_model(rope_parameters=rope))
    assert (
        "yarn, 16 of 16 dimensions, half-split pairs, attention factor 1.13863"
        in capsys.readouterr().out
    )
