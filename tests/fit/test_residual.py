"""The residual between fine-tunes: exact where a change is simple, nothing where there is none."""

import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit.accumulate import FitOptions
from kvstore_xfer.fit.residual import ResidualAccumulator
from kvstore_xfer.mapper.convert_dense import DenseConverter
from kvstore_xfer.mapper.maps import Method
from kvstore_xfer.rope.rotate import apply_rope, rope_tables, strip_rope

TOKENS, LAYERS, HEADS, WIDTH = 24, 3, 2, 8


@pytest.fixture
def pair(make_description):
    return (
        make_description("base", LAYERS, HEADS, WIDTH),
        make_description("tuned", LAYERS, HEADS, WIDTH, theta=500.0),
    )


def changed(page, pair, noise, seed):
    """Layer 0 as it was, layer 1 corrected in two directions, layer 2 shifted by a constant."""
    tables = [rope_tables(model.rope, torch.arange(TOKENS)) for model in pair]
    keys = strip_rope(page.keys, pair[0].rope, *tables[0])
    generator = torch.Generator().manual_seed(7)
    down, up = (torch.randn(HEADS * WIDTH, 2, generator=generator) / 4 for _ in range(2))
    own = torch.Generator().manual_seed(seed)
    parts = []
    for part in (keys, page.values):
        new = part.clone()
        new[1] += (part[1].flatten(1) @ down @ up.T).view(TOKENS, HEADS, WIDTH)
        new[2] += 3.0
        parts.append(new + noise * torch.randn(new.shape, generator=own))
    return KvPage(apply_rope(parts[0], pair[1].rope, *tables[1]), parts[1])


@pytest.fixture
def captured(pair, random_page):
    pages = [random_page(pair[0], TOKENS, n) for n in range(24)]
    return [(page, changed(page, pair, 0.01, n)) for n, page in enumerate(pages)]


def fitted(pair, captured, **options):
    accumulator = ResidualAccumulator(*pair, FitOptions(Method.RESIDUAL, **options))
    for index, pages in enumerate(captured):
        accumulator.add(index, *pages)
    return accumulator.finish()


def test_each_layer_gets_the_rank_it_needs(pair, captured):
    mapper, choice = fitted(pair, captured)
    for maps in (mapper.keys, mapper.values):
        assert [layer.weight.shape[0] for layer in maps] == [0, 2, 0]
        assert torch.equal(maps[0].bias, torch.zeros(HEADS, WIDTH))
        torch.testing.assert_close(maps[2].bias, torch.full((HEADS, WIDTH), 3.0), atol=5e-3, rtol=0)
    assert min(map(min, choice.scores)) > 0.99


def test_the_map_gives_the_tuned_models_cache(pair, captured, random_page):
    mapper, _ = fitted(pair, captured)
    source = random_page(pair[0], TOKENS, 999)
    target = KvPage.empty(source.shape)
    DenseConverter(mapper).convert([source], [0], [target])
    expected = changed(source, pair, 0.0, 0)
    torch.testing.assert_close(target.keys[:, 1:], expected.keys[:, 1:], atol=0.05, rtol=0)
    torch.testing.assert_close(target.values[:, 1:], expected.values[:, 1:], atol=0.05, rtol=0)
    mean = torch.stack([page.values[:, 0] for _, page in captured]).mean(0)
    torch.testing.assert_close(target.values[:, 0], mean)  # position 0 is no row of the fit


def test_two_copies_of_one_model_need_nothing_anywhere(pair, random_page):
    pages = [random_page(pair[0], TOKENS, n) for n in range(24)]
    mapper, _ = fitted((pair[0], pair[0]), [(page, page) for page in pages])
    target = KvPage.empty(pages[0].shape)
    DenseConverter(mapper).convert([pages[0]], [0], [target])
    assert mapper.parameters == sum(layer.bias.numel() for layer in (*mapper.keys, *mapper.values))
    assert torch.equal(target.values, pages[0].values)
    torch.testing.assert_close(target.keys, pages[0].keys)


def test_a_rank_may_be_given(pair, captured):
    mapper, _ = fitted(pair, captured, rank=1)
    assert {layer.weight.shape[0] for layer in mapper.keys} == {1}


def test_a_rank_that_no_map_can_have_is_refused(pair):
    ResidualAccumulator(*pair, FitOptions(Method.RESIDUAL, rank=HEADS * WIDTH))
    with pytest.raises(ConfigError, match=rf"--rank {HEADS * WIDTH + 1}: .* is {HEADS * WIDTH};"):
        ResidualAccumulator(*pair, FitOptions(Method.RESIDUAL, rank=HEADS * WIDTH + 1))


def test_models_of_other_geometry_are_one_line(pair, make_description):
    other = make_description("other", LAYERS + 1, HEADS, WIDTH)
    with pytest.raises(ConfigError, match="--method residual: the models differ"):
        ResidualAccumulator(pair[0], other, FitOptions(Method.RESIDUAL))
