"""Streamed second moments of inputs X and outputs Y: all that a least-squares fit needs.

``groups`` independent problems share one object (head-local maps: one per target head). Rows come
in batches and are forgotten; batches are merged by the pairwise update of Chan, Golub and LeVeque
(1979), in float64, so that neither memory nor cancellation grows with the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Moments:
    """Row count, means and centred scatter matrices, float64.

    Attributes
    ----------
    rows
        Number of rows seen.
    mean_x, mean_y
        ``[groups, p]`` and ``[groups, q]``.
    xx, xy, yy
        Centred sums: ``[groups, p, p]``, ``[groups, p, q]``, and of the outputs only the diagonal,
        ``[groups, q]``.
    """

    rows: int
    mean_x: torch.Tensor
    mean_y: torch.Tensor
    xx: torch.Tensor
    xy: torch.Tensor
    yy: torch.Tensor

    @classmethod
    def zero(cls, groups: int, p: int, q: int, device: str = "cpu") -> Moments:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(groups, *shape, dtype=torch.float64, device=device)

        return cls(0, zeros(p), zeros(q), zeros(p, p), zeros(p, q), zeros(q))

    @staticmethod
    def bytes_needed(groups: int, p: int, q: int) -> int:
        """Memory of one object, in bytes."""
        return 8 * groups * (p + 2 * q + p * p + p * q)

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add a batch of rows: x ``[groups, n, p]``, y ``[groups, n, q]``, any float dtype."""
        if not x.shape[1]:
            return
        x, y = x.double(), y.double()
        mean_x, mean_y = x.mean(1), y.mean(1)
        x, y = x - mean_x[:, None], y - mean_y[:, None]
        self._absorb_means(x.shape[1], mean_x, mean_y)
        self.xx.baddbmm_(x.mT, x)
        self.xy.baddbmm_(x.mT, y)
        self.yy += y.square().sum(1)

    def merge(self, other: Moments) -> None:
        """Add all rows that `other` has seen."""
        self._absorb_means(other.rows, other.mean_x, other.mean_y)
        self.xx += other.xx
        self.xy += other.xy
        self.yy += other.yy

    def _absorb_means(self, rows: int, mean_x: torch.Tensor, mean_y: torch.Tensor) -> None:
        """Move the means to those of all rows, and add the scatter between the two sets."""
        total = self.rows + rows
        if not total:
            return
        dx, dy = mean_x - self.mean_x, mean_y - self.mean_y
        between = self.rows * rows / total
        self.xx.baddbmm_(dx[:, :, None], dx[:, None, :], alpha=between)
        self.xy.baddbmm_(dx[:, :, None], dy[:, None, :], alpha=between)
        self.yy += between * dy.square()
        self.mean_x += dx * (rows / total)
        self.mean_y += dy * (rows / total)
        self.rows = total
