"""Streamed second moments of inputs X and outputs Y: all that a least-squares fit needs.

``groups`` independent problems share one object (head-local maps: one per target head). Rows come
in batches and are forgotten; batches are merged by the pairwise update of Chan, Golub and LeVeque
(1979), in float64, so that neither memory nor cancellation grows with the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass
class Moments:
    """Row count, means and centred scatter matrices, float64.

    Attributes
    ----------
    rows
        Number of rows seen. Weights have mean one, so that this is their sum, too.
    squares
        Sum of the squared weights, ``[groups]``.
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
    squares: torch.Tensor

    @classmethod
    def zero(cls, groups: int, p: int, q: int, device: str = "cpu") -> Moments:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(groups, *shape, dtype=torch.float64, device=device)

        return cls(0, zeros(p), zeros(q), zeros(p, p), zeros(p, q), zeros(q), zeros())

    @staticmethod
    def bytes_needed(groups: int, p: int, q: int) -> int:
        """Memory of one object, in bytes."""
        return 8 * groups * (p + 2 * q + p * p + p * q)

    def update(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add a batch of rows: x ``[groups, n, p]``, y ``[groups, n, q]``, any float dtype.

        `weights` ``[groups, n]`` have mean one in every group; None means all are one.
        """
        count = x.shape[1]
        if not count:
            return
        x, y = x.double(), y.double()
        row = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device)
        if weights is not None:
            row = weights.double()
        mean_x, mean_y = (torch.bmm(row[:, None], part)[:, 0] / count for part in (x, y))
        x, y = x - mean_x[:, None], y - mean_y[:, None]
        self._absorb_means(count, mean_x, mean_y)
        weighted = x if weights is None else x * row[..., None]
        self.xx.baddbmm_(weighted.mT, x)
        self.xy.baddbmm_(weighted.mT, y)
        self.yy += torch.bmm(row[:, None], y.square())[:, 0]
        self.squares += row.square().sum(1)

    def merge(self, other: Moments) -> None:
        """Add all rows that `other` has seen."""
        self._absorb_means(other.rows, other.mean_x, other.mean_y)
        self.xx += other.xx
        self.xy += other.xy
        self.yy += other.yy
        self.squares += other.squares

    def plus(self, other: Moments) -> Moments:
        """The moments of both sets of rows; neither is changed."""
        copies = {f.name: getattr(self, f.name).clone() for f in fields(self) if f.name != "rows"}
        both = Moments(rows=self.rows, **copies)
        both.merge(other)
        return both

    def blended(self, other: Moments, share: torch.Tensor) -> Moments:
        """Moments of the same rows under the weights ``(1 - share) * own + share * other``.

        `share` ``[groups]`` is between 0 and 1; `squares` of the result are not defined.
        """
        part = share[:, None]
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        between = (self.rows * share * (1 - share))[:, None, None]
        cube = share[:, None, None]
        return Moments(
            self.rows,
            self.mean_x + part * dx,
            self.mean_y + part * dy,
            torch.lerp(self.xx, other.xx, cube) + between * dx[:, :, None] * dx[:, None],
            torch.lerp(self.xy, other.xy, cube) + between * dx[:, :, None] * dy[:, None],
            torch.lerp(self.yy, other.yy, part) + between[:, 0] * dy.square(),
            torch.full_like(self.squares, float("nan")),
        )

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
