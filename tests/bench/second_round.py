"""A second fitting round, for the ablation: value maps fitted to the target's attention output.

With the mapped keys in place, attention weights a over the prefix give for a query at the hand-off
o = sum_i a_i v_i. The value map is affine, so o is affine in the source's values pooled by a: one
more least-squares problem, whose rows are queries. Its normal equations are added to those of the
tokens, and both are solved at once.
"""

from dataclasses import replace

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.gate.arms import converted
from kvstore_xfer.mapper.convert_select import make_converter

RIDGE = 1e-4


class SecondRound:
    """Streams sequences into the two sets of normal equations, one each per layer and head."""

    def __init__(self, mapper, model, prefix: int) -> None:
        self._mapper, self._model, self._prefix = mapper, model, prefix
        self._converter = make_converter(mapper, torch.float32, "cpu")
        self._heads = torch.tensor(mapper.head_assignment)
        self._tokens, self._pooled = [], []
        for layer in mapper.values:
            inputs = layer.weight.shape[1] + 1  # the last column is the bias
            shape = (len(self._heads), inputs, inputs + layer.weight.shape[2])
            self._tokens.append(torch.zeros(shape, dtype=torch.float64))
            self._pooled.append(torch.zeros(shape, dtype=torch.float64))

    def add(self, source: KvPage, tokens) -> None:
        """`source` is the source's cache of all of `tokens`."""
        native, queries = self._model.capture_queries(tokens)
        page = KvPage(
            source.keys[:, : self._prefix].contiguous(),
            source.values[:, : self._prefix].contiguous(),
        )
        mapped = converted(self._converter, page, self._mapper.target)
        for number, layer in enumerate(self._mapper.values):
            read = page.values[list(layer.source_layers), 1:].index_select(2, self._heads)
            inputs = read.permute(2, 1, 0, 3).flatten(2)
            inputs = torch.cat([inputs, torch.ones(*inputs.shape[:2], 1)], -1)
            outputs = native.values[number, 1 : self._prefix].transpose(0, 1)
            self._tokens[number] += _normal(inputs, outputs)
            asked = queries[number, self._prefix :]
            rows = self._rows(number, native, mapped, asked, inputs)
            self._pooled[number] += _normal(*rows)

    def _rows(self, number, native, mapped, queries, inputs):
        """Pooled inputs, and what they should give: outputs less what is not mapped."""
        prefix = self._prefix
        own = (native.keys[number], native.values[number])
        wanted = _attention(queries, own[0], prefix)
        wanted = torch.einsum("hgtn,nhd->hgtd", wanted, own[1])
        keys = torch.cat([mapped.keys[number], own[0][prefix:]])
        weights = _attention(queries, keys, prefix)
        kept = torch.cat([weights[..., :1], weights[..., prefix:]], -1)
        values = torch.cat([mapped.values[number, :1], own[1][prefix:]])
        rest = wanted - torch.einsum("hgtn,nhd->hgtd", kept, values)
        pooled = torch.einsum("hgtn,hnp->hgtp", weights[..., 1:prefix], inputs)
        return pooled.flatten(1, 2), rest.flatten(1, 2)

    def solve(self, strength: float):
        """The mapper whose rows of queries weigh `strength` times as much as those of tokens."""
        layers = []
        for layer, tokens, pooled in zip(
            self._mapper.values, self._tokens, self._pooled, strict=True
        ):
            inputs = tokens.shape[1]
            share = strength * _trace(tokens[..., :inputs]) / _trace(pooled[..., :inputs])
            both = tokens + share[:, None, None] * pooled
            gram, cross = both[..., :inputs].clone(), both[..., inputs:]
            diagonal = gram.diagonal(dim1=1, dim2=2)[:, :-1]
            diagonal += RIDGE * diagonal.mean(1, keepdim=True)
            solved = torch.linalg.solve(gram, cross).float()
            weight, bias = solved[:, :-1].contiguous(), solved[:, -1].contiguous()
            layers.append(replace(layer, weight=weight, bias=bias))
        return replace(self._mapper, values=tuple(layers))


def _normal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``[H, p, p + q]``: x' x beside x' y."""
    x, y = x.double(), y.double()
    return torch.cat([x.mT @ x, x.mT @ y], -1)


def _trace(squares: torch.Tensor) -> torch.Tensor:
    return squares.diagonal(dim1=1, dim2=2).sum(-1)


def _attention(queries: torch.Tensor, keys: torch.Tensor, first: int) -> torch.Tensor:
    """``[H, G, T, N]`` of queries ``[T, H_q, d]`` from position `first` on, over keys."""
    grouped = queries.reshape(len(queries), keys.shape[1], -1, keys.shape[2])
    logits = torch.einsum("thgd,nhd->hgtn", grouped, keys)
    seen = first + torch.arange(len(queries))[:, None]
    return logits.masked_fill(torch.arange(len(keys)) > seen, -torch.inf).softmax(-1)
