"""Row weights from the target's own attention: how much an error at a token would be noticed.

CacheBridge (arXiv 2609.00891). At boundary c with query q of position c, attention over the tokens
up to c, ``a_i = softmax_i(q . k_i / sqrt(d))`` and ``o = sum_i a_i v_i``; summed over the query
heads u that share a KV head,

    r_i^V = sum_u a_ui^2                                     (|do / dv_i|^2, up to a factor)
    r_i^K = sum_u a_ui^2 |v_i - o_u|^2 |q_u|^2 / d           (|do / dk_i|^2)

Each boundary's weights are scaled to sum one, boundaries are added, and the sum is scaled to mean
one over the sequence. Tokens from c on, which the target computes itself, take no part.
"""

from __future__ import annotations

import math

import torch

BOUNDARIES = 128
FIRST_BOUNDARY = 12


def boundaries(tokens: int) -> torch.Tensor:
    """Up to `BOUNDARIES` positions from `FIRST_BOUNDARY` to the last one, log-spaced, int64."""
    last = tokens - 1
    if last <= FIRST_BOUNDARY:
        return torch.tensor([last]) if last > 0 else torch.empty(0, dtype=torch.int64)
    growth = math.log(last / FIRST_BOUNDARY) / (BOUNDARIES - 1)
    spaced = {round(FIRST_BOUNDARY * math.exp(growth * step)) for step in range(BOUNDARIES)}
    return torch.tensor(sorted(spaced))


def row_weights(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of keys and of values, each float32 ``[L, H, T]`` with mean one over T.

    Parameters
    ----------
    keys, values
        The target's cache ``[L, T, H, d]``, keys rotated.
    queries
        ``[L, T, H_q, d]``, rotated and scaled so that logits are ``q . k``; the query heads of KV
        head h are ``h * H_q / H`` and the following.
    """
    at = boundaries(keys.shape[1]).to(keys.device)
    parts = [
        _layer_weights(k.float(), v.float(), q.float(), at)
        for k, v, q in zip(keys, values, queries, strict=True)
    ]
    return torch.stack([k for k, _ in parts]), torch.stack([v for _, v in parts])


def _layer_weights(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = keys.shape
    chosen = queries[at].reshape(len(at), heads, -1, keys.shape[2])  # [C, H, G, d]
    logits = torch.einsum("chgd,thd->hgct", chosen, keys)
    position = torch.arange(tokens, device=keys.device)
    attention = logits.masked_fill(position > at[:, None], -math.inf).softmax(-1)
    output = torch.einsum("hgct,thd->hgcd", attention, values)
    squared = attention.square() * (position < at[:, None])
    by_head = values.transpose(0, 1)
    distance = (
        by_head.square().sum(-1)[:, None, None]
        - 2 * torch.einsum("hgcd,htd->hgct", output, by_head)
        + output.square().sum(-1, keepdim=True)
    ).clamp_min(0)  # |v_i - o|^2, [H, G, C, T]
    energy = chosen.square().sum(-1).permute(1, 2, 0)[..., None]
    return (
        _mean_one((squared * distance * energy).sum(1)),
        _mean_one(squared.sum(1)),
    )


def _mean_one(weights: torch.Tensor) -> torch.Tensor:
    """``[H, C, T]`` -> ``[H, T]``. A query that looks at itself alone says nothing."""
    mass = weights.sum(-1, keepdim=True)
    total = torch.where(mass > 0, weights / mass.clamp_min(1e-30), 0).sum(1)
    mean = total.mean(-1, keepdim=True)
    return torch.where(mean > 0, total / mean.clamp_min(1e-30), 1)


def later_weights(weights: torch.Tensor) -> torch.Tensor:
    """Row weights ``[..., T]`` behind position 0, again of mean one."""
    later = weights[..., 1:]
    mean = later.mean(-1, keepdim=True)
    return torch.where(mean > 0, later / mean.clamp_min(1e-30), 1)


def shrinkage(rows: float, squares: torch.Tensor, inputs: int) -> torch.Tensor:
    """How far to trust the weights: alpha in ``w = 1 + alpha (r - 1)``.

    The largest in [0, 1] for which Kish's effective number of rows, ``n / (1 + alpha^2 CV^2(r))``,
    is at least ``min(n, 2 p)``. `squares`: sum of r^2 over `rows` rows of mean one; `inputs`: p.
    """
    spread = (squares / rows - 1).clamp_min(1e-12)
    return ((rows / min(rows, 2 * inputs) - 1) / spread).sqrt().clamp_max(1)
