"""The MLP learns what no linear map can, stops on held-out rows, and is what is served."""

import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit import mlp as module
from kvstore_xfer.fit.accumulate import Accumulator, FitOptions
from kvstore_xfer.fit.mlp import RowFiles, train
from kvstore_xfer.mapper.convert_dense import DenseConverter

TOKENS, SEQUENCES = 64, 32


@pytest.fixture
def pair(make_description):
    return make_description("source", 1, 2, 2), make_description("target", 1, 2, 2, theta=500.0)


@pytest.fixture
def captured(pair, random_page):
    """Values whose sign is lost: a linear map explains nothing of them."""
    pages = [random_page(pair[0], TOKENS, n) for n in range(SEQUENCES)]
    return [(page, KvPage(page.keys, page.values.abs())) for page in pages]


@pytest.fixture
def choice(pair, captured):
    accumulator = Accumulator(*pair, FitOptions())
    for index, pages in enumerate(captured):
        accumulator.add(index, *pages)
    return accumulator.choose()


@pytest.fixture
def files(pair, captured, tmp_path):
    rows = RowFiles(tmp_path / "rows", *pair)
    for index, pages in enumerate(captured):
        rows.add(index, *pages)
    return rows


def trained(pair, files, choice, monkeypatch, epochs=20):
    monkeypatch.setattr(module, "BATCH", 64)
    return train(files, *pair, choice, hidden=24, epochs=epochs)


def test_it_learns_what_a_linear_map_cannot(pair, files, choice, captured, monkeypatch):
    mapper, scores = trained(pair, files, choice, monkeypatch)
    assert max(choice.scores[1]) < 0.1
    assert min(scores[1]) > 0.7
    source, target = captured[-1]
    found = KvPage.empty(source.shape)
    DenseConverter(mapper).convert([source], [0], [found])
    error = (found.values - target.values).square().mean()
    assert error < 0.35 * (target.values - target.values.mean()).square().mean()


def test_equal_rows_give_equal_maps(pair, files, choice, monkeypatch):
    one, other = (trained(pair, files, choice, monkeypatch, 2)[0] for _ in range(2))
    for a, b in zip(one.values, other.values, strict=True):
        assert all(map(torch.equal, a.tensors(), b.tensors()))


def test_training_stops_when_held_out_rows_say_so(pair, files, choice, monkeypatch):
    reached = iter([0.1, 0.5, 0.4, 0.3, 0.9] * 10)
    called = []
    monkeypatch.setattr(module, "_score", lambda *_: called.append(1) or next(reached))
    _, scores = trained(pair, files, choice, monkeypatch)
    assert scores[0] == (0.5,)
    assert len(called) == 4 + 3  # keys stop after four epochs, values then find 0.9 first


def test_rows_without_a_held_out_side_are_named(pair, captured, choice, tmp_path):
    rows = RowFiles(tmp_path / "rows", *pair)
    rows.add(0, *captured[0])
    with pytest.raises(ConfigError, match="--sequences"):
        train(rows, *pair, choice)
