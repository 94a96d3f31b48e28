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

        def numbers(*shape):
            return torch.randn(shape, generator=generator) / shape[-2] ** 0.5

        if method.residual:
            target = source
            models = (models[0], make_description("target", *source, theta=500.0))
            own = [(n,) for n in range(source[0])]
            chosen = [(0, 2)] * source[0] if method.encoded else own
        heads, everything = target[1], source[1] * (source[2] + source[3])

        def layer(sources, width_in, width_out):
            width = len(sources) * width_in
            before, inner = (), 5
            if method is Method.HEAD_LOCAL:
                weight = numbers(heads, width, width_out)
            elif method is Method.FULL_HEAD:
                weight = numbers(width * source[1], heads * width_out)
            elif method is Method.MLP:
                shapes = ((heads, width, inner), (heads, inner, inner))
                before = tuple(
                    part.half()
                    for s in shapes
                    for part in (numbers(*s), numbers(1, heads, s[-1])[0])
                )
                weight = numbers(heads, inner, width_out)
            else:
                weight = numbers(inner, heads * width_out)
                if method is Method.RESIDUAL:
                    before = (numbers(width * source[1], inner).half(),)
            bias = torch.randn(heads, width_out, generator=generator)
            return LayerMap(tuple(sources), weight.half(), bias, before)

        encoder = None
        if method.encoded:
            encoder = numbers(len(chosen[0]) * everything, 5).half()
        return Mapper(
            method,
            *models,
            assign_heads(source[1], target[1]),
            tuple(layer(sources, source[2], target[2]) for sources in chosen),
            tuple(layer(sources, source[3], target[3]) for sources in chosen),
            encoder=encoder,
        )

    return make
