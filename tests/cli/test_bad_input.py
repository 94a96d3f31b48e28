"""Bad input: one line on stderr that names file, field or remedy, exit code 2, disk unchanged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_xfer.cli.main import main

FAMILY = Path(__file__).parents[1] / "data" / "family"
TEXT = FAMILY / "text" / "heldout.jsonl"


@pytest.fixture
def fit(fails, tmp_path):
    def call(source=FAMILY / "small", target=FAMILY / "large", text=TEXT, out=None, *more):
        out = out or tmp_path / "out"
        return fails(
            "fit", "--source", source, "--target", target, "--text", text, "--out", out, *more
        )

    return call


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(FAMILY / "small", tmp_path / "model"))


def test_a_missing_model_text_and_mapper(fit, fails, tmp_path):
    assert "no-model" in fit(source=tmp_path / "no-model")
    assert "no.jsonl: No such file or directory" in fit(text=tmp_path / "no.jsonl")
    assert "none/manifest.json: No such file" in fails("check", tmp_path / "none", "--text", TEXT)


def test_a_truncated_safetensors_file(fit, fails, model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors" in fit(source=model)
    assert "model.safetensors" in fails("describe", model)


def test_two_models_with_different_tokenizers(fit, model):
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["merges"].pop()
    file.write_text(json.dumps(tokenizer))
    assert "tokenizers differ" in fit(source=model)


def test_one_model_as_source_and_target(fit, fails, model):
    """Also as a copy in another folder, in which it would be easy to miss."""
    line = fit(target=model)
    assert "--target" in line
    assert "is the source itself" in line
    pair = ("--source", FAMILY / "small", "--target", model, "--text", TEXT)
    assert "is the source itself" in fails("predict", *pair, "--sequence-tokens", 64)


def test_a_model_whose_cache_does_not_convert(fit, model):
    file = model / "config.json"
    config = json.loads(file.read_text())
    mla = {"model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    config.pop("architectures", None)
    file.write_text(json.dumps({**config, **mla}))
    line = fit(source=model)
    assert "cannot be converted" in line
    assert "MLA" in line or "mla" in line or "latent" in line


def test_an_empty_text_and_a_text_shorter_than_one_sequence(fit, tmp_path):
    for name, content, message in (
        ("empty.txt", "", "holds no text"),
        ("short.txt", "A short text.", "--sequence-tokens"),
    ):
        (tmp_path / name).write_text(content)
        line = fit(text=tmp_path / name)
        assert name in line
        assert message in line


def test_too_few_sequences_to_fit_or_forecast(fit, fails, tmp_path):
    """Each message names what is too small; only text that holds too little is asked for more."""
    missing = tmp_path / "no-model"
    line = fit(missing, missing, missing, None, "--sequences", "7")
    assert "--sequences 7: every 8th is held out of a fit; give 8 or more" in line
    line = fit(missing, missing, missing, None, "--sequence-tokens", "1")
    assert "--sequence-tokens 1: a fit leaves the first token out; give 2 or more" in line
    line = fit(FAMILY / "small", FAMILY / "large", TEXT, None, "--sequence-tokens", "4000")
    told = "holds 6 sequences of 4000 tokens, a fit needs 8; give more text or a smaller"
    assert f"{TEXT}: {told} --sequence-tokens" in line
    pair = ["predict", "--source", missing, "--target", missing, "--text", missing]
    assert "--sequences 17: a forecast needs 18" in fails(*pair, "--sequences", 17)
    assert "--sequence-tokens 4: a forecast needs 5" in fails(*pair, "--sequence-tokens", 4)


def test_too_few_passages_to_check(fails, family_mapper, tmp_path):
    check = ["check", family_mapper.folder, "--dtype", "float32", "--text"]
    line = fails(*check, tmp_path / "none.jsonl", "--passages", 15)
    assert "--passages 15: the gate needs 16; give 16 or more" in line
    manifest = tmp_path / "family.yaml"
    pair = {"source": "a", "target": "b", "mapper": str(family_mapper.folder)}
    models = {name: {"path": name} for name in "ab"}
    content = {"family": "f", "store": "local:s", "models": models, "pairs": [pair]}
    manifest.write_text(json.dumps(content | {"gate": {"min_passages": 90}}))
    line = fails(*check, TEXT, "--family", manifest)
    assert "--passages 60: the gate needs 90; give 90 or more" in line


def test_passages_that_no_document_holds(fails, family_mapper, tmp_path):
    """`check` has no --sequence-tokens."""
    text = tmp_path / "short.txt"
    text.write_text("A short text.")
    line = fails("check", family_mapper.folder, "--dtype", "float32", "--text", text)
    assert line.endswith("give longer documents or smaller --prefix-tokens and --tail-tokens")
    text.write_text(json.loads(TEXT.read_text().splitlines()[0])["text"])
    sizes = ["--prefix-tokens", 40, "--tail-tokens", 8, "--lengths", "calibration"]
    line = fails("check", family_mapper.folder, "--dtype", "float32", "--text", text, *sizes)
    assert "give text of more documents (a .txt is one), or smaller --prefix-tokens" in line


@pytest.mark.parametrize(
    ("given", "ignored", "chosen"),
    [
        (["--tasks", "a"], "--handoffs", "--turns"),
        (["--tasks", "a"], "--turn-tokens", "--turns"),
        (["--tasks", "a"], "--conversations", "--turns"),
        (["--turns", "t", "--back", "m"], "--limit", "--tasks"),
        (["--turns", "t", "--back", "m"], "--few-shot", "--tasks"),
        (["--turns", "t", "--back", "m"], "--hold-back", "--tasks"),
        (["--turns", "t", "--back", "m"], "--split-at", "--tasks"),
        (["--turns", "t", "--back", "m"], "--include", "--tasks"),
    ],
)
def test_options_that_an_evaluation_would_ignore(fails, given, ignored, chosen):
    line = fails("eval", "no-mapper", *given, ignored, "3")
    assert line == f"kvxfer: error: {ignored}: acts on {chosen} only; add that, or leave it out"


def test_a_manifest_with_an_unknown_field(fails, tmp_path):
    file = tmp_path / "family.yaml"
    file.write_text("family: f\nstore: local:s\nmodels:\n  a: {path: x}\ncolour: red\n")
    assert f"{file}:5: colour: unknown field" in fails("family", "validate", file)


def test_a_store_of_an_unknown_scheme(fails, tmp_path):
    assert "unknown scheme 'ftp'" in fails("store", "ls", "ftp://host/x")
    file = tmp_path / "family.yaml"
    file.write_text("family: f\nstore: ftp://host\nmodels:\n  a: {path: x}\n")
    assert "store: " in fails("family", "validate", file)


def test_a_flipped_byte_in_a_mapper_folder(fails, family_mapper, tmp_path):
    for name in ("manifest.json", "mapper.safetensors"):
        folder = Path(shutil.copytree(family_mapper.folder, tmp_path / name.partition(".")[0]))
        raw = bytearray((folder / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / name).write_bytes(raw)
        line = fails("check", folder, "--text", TEXT)
        assert str(folder / name) in line
        assert "damaged" in line


def test_a_folder_where_nothing_can_be_written(fit):
    assert "--out /proc/kvxfer/out" in fit(out=Path("/proc/kvxfer/out"))


def test_a_read_only_folder(tmp_path):
    """As somebody who is not root, in a process of its own: root may write everywhere."""
    code = f"""
import os, sys
from pathlib import Path
from kvstore_xfer.cli.fit import _require_writable
from kvstore_xfer.errors import KvxferError
if os.geteuid() == 0: os.seteuid(65534)
try: _require_writable(Path({str(tmp_path / "locked" / "out")!r}))
except KvxferError as error: print(error); sys.exit(2)
"""
    (tmp_path / "locked").mkdir(mode=0o555)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert "locked/out" in done.stdout
    assert not (tmp_path / "locked" / "out").exists()


@pytest.mark.parametrize(
    ("method", "option", "fitting"),
    [
        ("head-local", ["--hidden", "512"], "mlp"),
        ("head-local", ["--hidden", "1024"], "mlp"),
        ("low-rank", ["--hidden", "512"], "mlp"),
        ("head-local", ["--rank", "8"], "low-rank, residual, low-rank-residual"),
        ("full-head", ["--rank", "8"], "low-rank, residual, low-rank-residual"),
        ("mlp", ["--rank", "8"], "low-rank, residual, low-rank-residual"),
        ("residual", ["--layers", "2"], "head-local, full-head, low-rank, low-rank-residual, mlp"),
        (
            "mlp",
            ["--ridge", "1e-3"],
            "head-local, full-head, low-rank, residual, low-rank-residual",
        ),
        ("low-rank", ["--weights", "attention"], "head-local, full-head"),
        ("residual", ["--weights", "attention"], "head-local, full-head"),
        ("mlp", ["--weights", "attention"], "head-local, full-head"),
    ],
)
def test_options_of_another_method_are_refused_before_anything_is_read(
    fit, tmp_path, method, option, fitting
):
    missing = tmp_path / "no-model"
    line = fit(missing, missing, missing, None, "--method", method, *option)
    name, value = option[0], option[1].replace("1e-3", "0.001")
    assert line == (
        f"kvxfer: error: {name} {value}: not for --method {method}, only for {fitting}; "
        "leave it out, or change --method"
    )


@pytest.mark.parametrize("method", ["low-rank", "residual"])
def test_a_rank_that_no_map_can_have(fit, model, method):
    """4 heads of width 32, keys and values; the smaller model has 6 layers."""
    largest = {"low-rank": 6 * 2 * 4 * 32, "residual": 4 * 32}[method]
    weights = model / "model.safetensors"
    *data, last = weights.read_bytes()
    weights.write_bytes(bytes([*data, last ^ 1]))  # another model of the same geometry
    target = model if method == "residual" else FAMILY / "large"
    options = ["--method", method, "--rank", str(largest + 1), "--sequence-tokens", "32"]
    line = fit(FAMILY / "small", target, TEXT, None, *options)
    assert f"--rank {largest + 1}: " in line
    assert line.endswith(f"give 1 to {largest} or 'auto'")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--layers", "7"], "--layers 7: "),
        (["--method", "residual"], "--method residual: the models differ in layers or heads"),
        (["--method", "low-rank-residual"], "--method low-rank-residual: the models differ"),
        (["--sequence-tokens", "4097"], "small can use 4096, as its config says; give 4096 at"),
    ],
)
def test_what_these_models_cannot_do_is_refused_before_they_are_loaded(
    fit, tmp_path, monkeypatch, options, told
):
    def load(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr("kvstore_xfer.cli.fit.load_pair", load)
    assert told in fit(FAMILY / "small", FAMILY / "large", TEXT, None, *options)


def test_a_forecast_beyond_what_a_model_can_use(fails):
    pair = ["--source", FAMILY / "small", "--target", FAMILY / "large", "--text", TEXT]
    line = fails("predict", *pair, "--sequence-tokens", 4097)
    assert "--sequence-tokens 4097: " in line
    assert line.endswith("give 4096 at most")


def test_a_folder_whose_parent_is_missing(fit, tmp_path):
    out = tmp_path / "mapers" / "small-large"
    assert f"--out {out}: there is no folder {tmp_path / 'mapers'}; make it" in fit(out=out)
    (tmp_path / "file").write_text("")
    assert f"there is no folder {tmp_path / 'file'}" in fit(out=tmp_path / "file" / "mapper")


def test_ctrl_c_is_one_line_and_130(monkeypatch, capsys):
    from kvstore_xfer.cli import describe

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(describe, "run", interrupt)
    assert main(["describe", "x"]) == 130
    assert capsys.readouterr().err == "kvxfer: interrupted\n"


def test_the_installed_command_reports_the_same(tmp_path):
    command = Path(sys.executable).with_name("kvxfer")
    done = subprocess.run(
        [command, "store", "ls", "ftp://x"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvxfer: error: store 'ftp://x': unknown scheme")
    assert len(done.stderr.splitlines()) == 1


def test_a_demo_says_before_its_work_that_it_cannot_write_its_figures(fails, tmp_path):
    line = fails("demo", "--json", tmp_path / "missing" / "figures.json")
    assert "--json" in line
    assert "figures.json" in line


def test_looking_at_a_store_that_is_not_there_creates_nothing(fails, tmp_path):
    assert "no folder" in fails("store", "stat", f"local:{tmp_path / 'nowhere'}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "holds other files" in fails("store", "ls", f"local:{tmp_path / 'model'}")


def test_weights_that_do_not_follow_the_config(fit, model):
    config = model / "config.json"
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 6', '"num_hidden_layers": 7')
    )
    assert "weights are missing" in fit(source=model)


def test_a_fault_of_ours_is_one_line_too(monkeypatch, capsys):
    from kvstore_xfer.cli import main as entry

    def broken(_):
        raise RecursionError("nested\ntoo deeply")

    monkeypatch.setattr(entry, "_parser", broken)
    assert entry.main(["describe", "x"]) == 70
    error = capsys.readouterr().err
    assert error.startswith("kvxfer: error: RecursionError: nested; not foreseen")
    assert error.count("\n") == 1
