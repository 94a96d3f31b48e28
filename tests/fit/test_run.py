"""The fitting loop: interrupted, resumed, and refused when the checkpoint is somebody else's."""

import importlib.util
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvstore_xfer.errors import ArtifactError, ConfigError
from kvstore_xfer.fit import checkpoint, run
from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import fit
from kvstore_xfer.mapper import artifact
from kvstore_xfer.mapper.artifact import load
from kvstore_xfer.mapper.maps import Method

WORKER = Path(__file__).with_name("fit_worker.py")


@pytest.fixture(scope="module")
def worker():
    spec = importlib.util.spec_from_file_location("fit_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fit_now(worker):
    def call(out, first=0, options=None, **fields):
        sides = worker.side("source", 2, 0), worker.side("target", 3, 0)
        return fit(*sides, worker.sequences(first), out, options or FitOptions(), **fields)

    return call


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module", params=[signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "TERM"])
def interrupted(request, tmp_path_factory):
    """A folder in which a fit was interrupted by a real signal, and the sequences it kept."""
    folder = tmp_path_factory.mktemp("interrupted") / "out"
    command = [sys.executable, str(WORKER), str(folder), "0.03"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == "5":
                process.send_signal(request.param)
                break
        rest = process.stdout.read().splitlines()
    assert process.returncode == 130
    kept = int(rest[-1].removeprefix("interrupted: ").split()[0])
    assert rest[-1] == f"interrupted: {kept} of 40 sequences are kept"
    assert 5 <= kept < 40
    return folder, kept


@pytest.fixture
def folder(interrupted, tmp_path):
    return shutil.copytree(interrupted[0], tmp_path / "out")


def test_a_resumed_fit_equals_an_uninterrupted_one(interrupted, folder, fit_now, tmp_path):
    seen = []
    fit_now(folder, resume=True, progress=lambda done, total: seen.append((done, total)))
    fit_now(tmp_path / "straight")
    assert seen == [(n, 40) for n in range(interrupted[1] + 1, 41)]
    assert files(folder) == files(tmp_path / "straight")
    assert set(files(folder)) == {"manifest.json", "mapper.safetensors"}


def test_without_resume_a_fit_starts_from_the_beginning(folder, fit_now):
    seen = []
    fit_now(folder, progress=lambda done, total: seen.append(done))
    assert seen == list(range(1, 41))
    assert not (folder / checkpoint.FOLDER).exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"first": 1}, "--text, --sequences or --sequence-tokens"),
        ({"options": FitOptions(method=Method.FULL_HEAD)}, "--method"),
    ],
)
def test_the_checkpoint_of_another_fit_is_refused(folder, fit_now, changes, named):
    with pytest.raises(ConfigError, match=rf"belongs to another fit \({named} differs\)"):
        fit_now(folder, resume=True, **changes)


def test_the_checkpoint_of_other_models_is_refused(folder, worker):
    sides = worker.side("source", 2, 0), worker.side("tarnet", 3, 0)
    with pytest.raises(ConfigError, match=r"another fit \(--target differs\)"):
        fit(*sides, worker.sequences(), folder, FitOptions(), resume=True)


def test_layers_and_ridge_may_be_chosen_anew(folder, fit_now, tmp_path):
    """They do not touch the moments; a fit that failed over its ridge need not start again."""
    options = FitOptions(layers=2, ridge=1e-2)
    fit_now(folder, resume=True, options=options)
    fit_now(tmp_path / "straight", options=options)
    assert files(folder) == files(tmp_path / "straight")


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_damaged_checkpoint_is_named(folder, fit_now, length):
    file = folder / checkpoint.FOLDER / "moments.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ConfigError, match=r"moments\.safetensors: damaged checkpoint .*--resume"):
        fit_now(folder, resume=True)


def test_resume_without_a_checkpoint_starts_from_the_beginning(fit_now, tmp_path):
    seen = []
    fit_now(tmp_path / "out", resume=True, progress=lambda done, total: seen.append(done))
    assert seen == list(range(1, 41))


def test_moments_are_kept_once_a_minute(fit_now, tmp_path, monkeypatch):
    """Seconds pass as the clock of the loop says; each due checkpoint holds what was seen."""
    saved = []
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        run, "save_checkpoint", lambda out, key, moments, following, number: saved.append(following)
    )
    fit_now(tmp_path / "out")
    assert saved[0] == 3
    assert len(saved) > 5


def test_a_full_disk_is_one_line_and_leaves_the_old_mapper(fit_now, tmp_path, monkeypatch):
    out = tmp_path / "out"
    fit_now(out)
    before = files(out)

    def full(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "save_file", full)
    with pytest.raises(ArtifactError, match=r"mapper\.safetensors: cannot be written \(No space"):
        fit_now(out, options=FitOptions(layers=1))
    assert files(out) == before
    with pytest.raises(ArtifactError, match="No space"):
        fit_now(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_cannot_be_written_keeps_the_one_before(folder, worker, monkeypatch):
    before = files(folder / checkpoint.FOLDER)

    def full(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ConfigError, match=r"--out .*No space left on device.*has room"):
        checkpoint.save_checkpoint(folder, {}, {}, 3)
    assert files(folder / checkpoint.FOLDER) == before


def test_the_manifest_tells_how_the_maps_were_made(fit_now, tmp_path):
    made = fit_now(tmp_path / "out", options=FitOptions(layers=1, ridge=1e-3))
    fitted = load(tmp_path / "out").fit
    assert fitted == made.fit
    assert fitted["calibration"]["sequences"] == 40
    assert fitted["calibration"]["tokens_per_sequence"] == 10
    assert fitted["calibration"]["documents"] == sorted(f"d{n}" for n in range(40))
    assert (fitted["k"], fitted["ridge"]) == (1, {"keys": [1e-3] * 3, "values": [1e-3] * 3})
    assert fitted["libraries"]["torch"] == torch.__version__
    assert [len(row) for row in fitted["held_out_r2"].values()] == [3, 3]


def test_a_checkpoint_with_a_flipped_bit_is_refused(tmp_path):
    from kvstore_xfer.errors import ConfigError
    from kvstore_xfer.fit.checkpoint import FOLDER, load_checkpoint, save_checkpoint
    from kvstore_xfer.fit.moments import Moments

    moments = {"keys.fitted": Moments.zero(1, 4, 4)}
    save_checkpoint(tmp_path, {}, moments, 3)
    (file,) = (tmp_path / FOLDER).iterdir()
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match="checksum"):
        load_checkpoint(tmp_path, {}, moments)
