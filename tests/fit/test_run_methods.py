"""Every method through the fitting loop: interrupted in any pass, resumed, the same folder."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit import run
from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.run import fit
from kvstore_xfer.mapper.artifact import load
from kvstore_xfer.mapper.maps import Method

PASSES = {
    FitOptions(weighted=True): 2,
    FitOptions(Method.FULL_HEAD, weighted=True): 2,
    FitOptions(Method.LOW_RANK, rank=5): 1,
    FitOptions(Method.LOW_RANK_RESIDUAL, rank=5): 1,
    FitOptions(Method.RESIDUAL): 1,
    FitOptions(Method.MLP, hidden=8): 2,
}


@pytest.fixture(scope="module")
def worker():
    file = Path(__file__).with_name("fit_worker.py")
    spec = importlib.util.spec_from_file_location("fit_worker", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fit_now(worker):
    """Fits two models of one geometry; stops with an error at the `stop`-th look at the source."""

    def call(out, options, stop=None, **fields):
        source, target = worker.side("source", 2, 0), worker.side("target", 2, 0)
        looks = iter(range(10_000))

        def capture(tokens):
            if next(looks) == stop:
                raise RuntimeError("the machine went down")
            return source.capture(tokens)

        def queries(tokens):
            generator = torch.Generator().manual_seed(sum(tokens))
            return target.capture(tokens), torch.randn(2, len(tokens), 4, 8, generator=generator)

        def sensitivity(tokens, seed):
            page = target.capture([*tokens, seed])
            return KvPage(page.keys[:, 2:], page.values[:, 2:])

        target = replace(target, queries=queries, sensitivity=sensitivity)
        sides = replace(source, capture=capture), target
        return fit(*sides, worker.sequences(), out, options, **fields)

    return call


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("options", PASSES, ids=lambda o: o.method.value)
def test_a_fit_goes_on_in_the_pass_it_was_in(fit_now, options, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", -1.0)
    out, seen = tmp_path / "out", []
    for stop in (17, 40 * PASSES[options] - 30):
        with pytest.raises(RuntimeError, match="went down"):
            fit_now(out, options, stop, resume=True)
    fit_now(out, options, resume=True, progress=lambda done, total: seen.append((done, total)))
    fit_now(tmp_path / "straight", options)
    assert files(out) == files(tmp_path / "straight")
    assert seen[0][0] > 17
    assert seen[-1] == (40 * PASSES[options],) * 2
    made = load(out)
    assert made.mapper.method is options.method
    assert made.fit["weights"] == ("attention" if options.weighted else "none")


def test_weights_are_another_fit(fit_now, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", -1.0)
    with pytest.raises(RuntimeError, match="went down"):
        fit_now(tmp_path, FitOptions(), 9)
    with pytest.raises(ConfigError, match=r"another fit \(--weights differs\)"):
        fit_now(tmp_path, FitOptions(weighted=True), resume=True)
