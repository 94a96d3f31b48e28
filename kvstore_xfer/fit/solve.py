"""The ridge solution in closed form, and its error on other data, both from moments alone.

For the chosen input columns, with A and B the centred sums of the fit:
``W = (A + lambda I)^-1 B``, ``b = mean(Y) - mean(X) W``, ``lambda = rho * mean(diag(A))``.
The intercept is not penalised. `rho` is relative, so it means the same for any number of rows
(methods compared in arXiv 2608.03893 and 2609.00891 quote an absolute lambda, which does not).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.errors import ConfigError

if TYPE_CHECKING:
    from kvstore_xfer.fit.moments import Moments


@dataclass(frozen=True)
class Affine:
    """``y = x W + b`` per group: weight ``[groups, p, q]``, bias ``[groups, q]``, float64."""

    weight: torch.Tensor
    bias: torch.Tensor


def solve_ridge(
    moments: Moments, inputs: torch.Tensor, outputs: torch.Tensor, rho: float
) -> Affine:
    """Fit the outputs (column indices) on the inputs (column indices) with relative ridge `rho`.

    Raises ConfigError when the system is singular in float64 at this ridge.
    """
    gram = moments.xx[:, inputs][:, :, inputs]
    cross = moments.xy[:, inputs][:, :, outputs]
    diagonal = gram.diagonal(dim1=1, dim2=2)
    scale = diagonal.mean(1)
    # Inputs without any variance carry nothing: the identity keeps the system solvable, W is zero.
    ridge = torch.where(scale > 0, rho * scale, torch.ones_like(scale))
    diagonal.add_(ridge[:, None])
    factor, failed = torch.linalg.cholesky_ex(gram)
    if failed.any():
        raise ridge_too_small(rho)
    weight = torch.cholesky_solve(cross, factor)
    mean_x, mean_y = moments.mean_x[:, inputs], moments.mean_y[:, outputs]
    bias = mean_y - torch.bmm(mean_x[:, None], weight)[:, 0]
    return Affine(weight, bias)


def ridge_too_small(rho: float) -> ConfigError:
    """The error of a singular system: a ridge of 1e-5 is enough for all but degenerate texts."""
    return ConfigError(
        f"--ridge {rho:g}: too small for these inputs; give {max(1e-5, 100 * rho):g} or more"
    )


def r_squared(
    affine: Affine, moments: Moments, inputs: torch.Tensor, outputs: torch.Tensor
) -> torch.Tensor:
    """Explained share of the outputs' variance on the rows behind `moments`, ``[groups]``.

    On held-out moments this is the held-out R^2, and may be negative.
    """
    gram = moments.xx[:, inputs][:, :, inputs]
    cross = moments.xy[:, inputs][:, :, outputs]
    total = moments.yy[:, outputs].sum(1)
    explained = 2 * (affine.weight * cross).sum((1, 2))
    spread = (affine.weight * (gram @ affine.weight)).sum((1, 2))
    mean_x, mean_y = moments.mean_x[:, inputs], moments.mean_y[:, outputs]
    offset = mean_y - torch.bmm(mean_x[:, None], affine.weight)[:, 0] - affine.bias
    error = total - explained + spread + moments.rows * offset.square().sum(1)
    return 1 - error / total.clamp_min(torch.finfo(torch.float64).tiny)
