"""Made-up mappers between made-up models."""

import pytest
import torch

from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads


@pytest.fixture(scope="session")
def make_mapper(make_description):
    def make(
        source=(3, 2, 8, 8), target=(2, 2, 8, 8), method=Method.HEAD_LOCAL, layers=None, seed=0
    ):
        models = (
            make_description("source", *source),
            make_description("target", *target, theta=500.0, parameters=5000),
        )
        chosen = layers or [(0, 2)] * target[0]
        generator = torch.Generator().manual_seed(seed)

        def layer(sources, width_in, width_out):
            width = len(sources) * width_in
            shape = (target[1], width, width_out)
            if method is Method.FULL_HEAD:
                shape = (width * source[1], target[1] * width_out)
            weight = torch.randn(shape, generator=generator) / width**0.5
            bias = torch.randn(target[1], width_out, generator=generator)
            return LayerMap(tuple(sources), weight.half(), bias)

        return Mapper(
            method,
            *models,
            assign_heads(source[1], target[1]),
            tuple(layer(sources, source[2], target[2]) for sources in chosen),
            tuple(layer(sources, source[3], target[3]) for sources in chosen),
        )

    return make
