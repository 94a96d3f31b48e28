"""Position 0 of converted blocks: what the mapper holds, rotated, and nothing else touched."""

from dataclasses import replace

import pytest
import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.errors import ArtifactError
from kvstore_xfer.mapper.artifact import Artifact, load, save
from kvstore_xfer.mapper.convert import TorchConverter
from kvstore_xfer.mapper.convert_dense import DenseConverter
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method

TOKENS = 4


def mapper_of(source, target, method=Method.HEAD_LOCAL, first=True):
    chance = torch.Generator().manual_seed(3)
    layers = tuple(range(source.layers))

    def component(width_in, width_out):
        def drawn(*shape):
            return torch.randn(*shape, generator=chance)

        return tuple(
            LayerMap(
                layers,
                drawn(target.kv_heads, len(layers) * width_in, width_out),
                drawn(target.kv_heads, width_out),
                (
                    (
                        drawn(target.kv_heads, len(layers) * width_in, 5),
                        drawn(target.kv_heads, 5),
                        drawn(target.kv_heads, 5, 5),
                        drawn(target.kv_heads, 5),
                    )
                    if method is Method.MLP
                    else ()
                ),
                drawn(target.kv_heads, width_out) if first else None,
            )
            for _ in range(target.layers)
        )

    def fitting(maps):
        if method is not Method.MLP:
            return maps
        return tuple(replace(layer, weight=layer.weight[:, :5].contiguous()) for layer in maps)

    heads = tuple(range(target.kv_heads))
    keys = fitting(component(source.key_dim, target.key_dim))
    values = fitting(component(source.value_dim, target.value_dim))
    return Mapper(method, source, target, heads, keys, values)


@pytest.fixture
def pair(make_description):
    target = make_description("target", 3, 2, 8, 8, theta=500.0)
    rope = replace(target.rope, attention_factor=1.5)
    return make_description("source", 2, 2, 8, 8), replace(target, rope=rope)


def converted(mapper, pages, firsts):
    converter = (
        DenseConverter(mapper)
        if mapper.method is Method.MLP
        else TorchConverter(mapper, torch.float32)
    )
    target = mapper.target
    shape = (target.layers, TOKENS, len(mapper.head_assignment), target.key_dim)
    made = [KvPage(torch.full(shape, 7.0), torch.full(shape, 7.0)) for _ in pages]
    converter.convert(pages, firsts, made)
    return made


@pytest.mark.parametrize("method", [Method.HEAD_LOCAL, Method.MLP])
def test_position_0_alone_is_what_the_mapper_holds(pair, random_page, method):
    pages = [random_page(pair[0], TOKENS, n) for n in range(3)]
    mapper = mapper_of(*pair, method)
    mapper.validate()
    with_it = converted(mapper, pages, [4, 0, 8])
    plain = replace(
        mapper,
        keys=tuple(replace(layer, first=None) for layer in mapper.keys),
        values=tuple(replace(layer, first=None) for layer in mapper.values),
    )
    without = converted(plain, pages, [4, 0, 8])
    for n, (found, mapped) in enumerate(zip(with_it, without, strict=True)):
        start = 1 if n == 1 else 0
        assert torch.equal(found.keys[:, start:], mapped.keys[:, start:])
        assert torch.equal(found.values[:, start:], mapped.values[:, start:])
    for layer in range(pair[1].layers):
        # At position 0 RoPE turns by nothing; YaRN's factor remains.
        assert torch.equal(with_it[1].keys[layer, 0], 1.5 * mapper.keys[layer].first)
        assert torch.equal(with_it[1].values[layer, 0], mapper.values[layer].first)


def test_a_shard_writes_its_own_heads(pair, random_page):
    page = random_page(pair[0], TOKENS, 0)
    mapper = mapper_of(*pair)
    (whole,) = converted(mapper, [page], [0])
    (part,) = converted(mapper.shard(1, 2), [page], [0])
    torch.testing.assert_close(part.keys, whole.keys[:, :, 1:])
    assert torch.equal(part.keys[:, 0], whole.keys[:, 0, 1:])
    assert torch.equal(part.values[:, 0], whole.values[:, 0, 1:])


def test_the_folder_keeps_it_under_the_digest(pair, tmp_path):
    with_it = save(tmp_path / "with", Artifact(mapper_of(*pair))).mapper
    without = save(tmp_path / "without", Artifact(mapper_of(*pair, first=False))).mapper
    assert with_it.digest != without.digest
    read = load(tmp_path / "with").mapper
    for saved, found in zip(with_it.keys, read.keys, strict=True):
        assert torch.equal(saved.first, found.first)
    assert load(tmp_path / "without").mapper.values[0].first is None


@pytest.mark.parametrize("wrong", [None, torch.zeros(2, 3)], ids=["missing", "shape"])
def test_half_a_position_0_is_refused(pair, wrong):
    mapper = mapper_of(*pair)
    keys = (*mapper.keys[:-1], replace(mapper.keys[-1], first=wrong))
    with pytest.raises(ArtifactError, match="position 0"):
        replace(mapper, keys=keys).validate()
