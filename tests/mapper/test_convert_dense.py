"""Low-rank, residual and MLP maps against their formulas, token by token in float64."""

import numpy as np
import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper import convert_dense
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.convert_dense import DenseConverter
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.mapper.maps import Method

FIRSTS = (0, 640, 7)
TOKENS = (5, 1, 9)


@pytest.fixture(
    params=[m for m in Method if not m.affine],
    ids=lambda m: m.value,
)
def mapper(request, make_mapper):
    return make_mapper((3, 4, 8, 6), (2, 2, 4, 8), request.param)


@pytest.fixture
def sources(mapper, random_page):
    return [random_page(mapper.source, n, seed) for seed, n in enumerate(TOKENS)]


def empty(mapper, heads=None, dtype=torch.float32):
    model, heads = mapper.target, heads or mapper.target.kv_heads
    shapes = [(model.layers, heads, width) for width in (model.key_dim, model.value_dim)]
    return [
        KvPage(*(torch.full((la, n, h, w), torch.nan, dtype=dtype) for la, h, w in shapes))
        for n in TOKENS
    ]


def convert(mapper, sources, heads=None):
    targets = empty(mapper, heads)
    DenseConverter(mapper).convert(sources, FIRSTS, targets)
    return targets


def turn(keys, model, first, sign):
    half = model.key_dim // 2
    angles = (first + np.arange(keys.shape[1]))[:, None] * np.array(model.rope.inv_freq)
    cos, sin = np.cos(angles)[:, None], sign * np.sin(angles)[:, None]
    a, b = keys[..., :half], keys[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def numbers(tensor):
    return tensor.double().numpy()


def token(mapper, place, layer, keys, values, own):
    """One token of one component of layer `place`, ``[H_t, d_t]``; inputs ``[L_s, H_s, d]``."""
    weight, bias = numbers(layer.weight), numbers(layer.bias)
    if mapper.method.encoded:
        chosen = list(layer.source_layers)
        row = np.concatenate([keys[chosen].ravel(), values[chosen].ravel()])
        mapped = (row @ numbers(mapper.encoder) @ weight).reshape(bias.shape) + bias
        return mapped + own[place] if mapper.method.residual else mapped
    if mapper.method is Method.RESIDUAL:
        x = own[layer.source_layers[0]]
        change = x.ravel() @ numbers(layer.before[0]) @ weight
        return x + change.reshape(bias.shape) + bias
    result = np.empty_like(bias)
    first, first_bias, second, second_bias = map(numbers, layer.before)
    for head, origin in enumerate(mapper.head_assignment):
        row = np.concatenate([own[s, origin] for s in layer.source_layers])
        hidden = np.maximum(row @ first[head] + first_bias[head], 0)
        hidden = np.maximum(hidden @ second[head] + second_bias[head], 0)
        result[head] = hidden @ weight[head] + bias[head]
    return result


def reference(mapper, page, first):
    keys = turn(numbers(page.keys), mapper.source, first, -1)
    values = numbers(page.values)
    found = []
    for maps, own in ((mapper.keys, keys), (mapper.values, values)):
        found.append(
            np.stack(
                [
                    [
                        token(mapper, place, layer, keys[:, n], values[:, n], own[:, n])
                        for n in range(keys.shape[1])
                    ]
                    for place, layer in enumerate(maps)
                ]
            )
        )
    return turn(found[0], mapper.target, first, 1), found[1]


def test_blocks_are_stripped_mapped_and_rotated(mapper, sources):
    mapper.validate()
    for page, first, target in zip(sources, FIRSTS, convert(mapper, sources), strict=True):
        expected = reference(mapper, page, first)
        for found, wanted in zip((target.keys, target.values), expected, strict=True):
            np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-4, atol=5e-5)


def test_blocks_of_one_call_do_not_mix(mapper, sources, monkeypatch):
    """However blocks are put together, each becomes what it becomes alone."""
    together = convert(mapper, sources)
    monkeypatch.setattr(convert_dense, "_TOKENS", 6)
    for a, b in zip(together, convert(mapper, sources), strict=True):
        torch.testing.assert_close(a.keys, b.keys)
        torch.testing.assert_close(a.values, b.values)


@pytest.mark.parametrize("heads", [(0, 1), (1, 2)])
def test_a_shard_is_its_part_of_the_whole(mapper, sources, heads):
    whole = convert(mapper, sources)
    shard = convert(mapper.shard(*heads), sources, heads[1] - heads[0])
    for a, b in zip(whole, shard, strict=True):
        torch.testing.assert_close(a.keys[:, :, slice(*heads)], b.keys)
        torch.testing.assert_close(a.values[:, :, slice(*heads)], b.values)


def test_the_residual_of_rank_zero_is_the_identity(make_mapper, random_page):
    made = make_mapper((2, 2, 8, 6), (2, 2, 8, 6), Method.RESIDUAL)
    for layer in (*made.keys, *made.values):
        layer.bias.zero_()
    bare = [
        type(layer)(layer.source_layers, layer.weight[:0], layer.bias, (layer.before[0][:, :0],))
        for layer in (*made.keys, *made.values)
    ]
    mapper = type(made)(
        made.method, made.source, made.source, (0, 1), tuple(bare[:2]), tuple(bare[2:])
    )
    mapper.validate()
    page = random_page(mapper.source, 5, 0)
    (target,) = empty(mapper)[:1]
    DenseConverter(mapper).convert([page], [0], [target])
    assert torch.equal(target.values, page.values)
    torch.testing.assert_close(target.keys, page.keys)


def test_each_method_has_its_converter(make_mapper):
    for method in Method:
        mapper = make_mapper(method=method)
        kind = TorchConverter if method.affine else DenseConverter
        assert isinstance(make_converter(mapper, torch.float32, "cpu"), kind)
        if method.affine:
            with pytest.raises(ValueError, match="TorchConverter"):
                DenseConverter(mapper)
