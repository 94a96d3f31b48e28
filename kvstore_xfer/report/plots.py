"""The page's figures as inline SVG.

Series differ by marker and line as well as by colour; colours are Okabe and Ito's, maps cividis:
both are told apart by colour-blind readers and in grey print.
"""

from __future__ import annotations

import io
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched and copied
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}
_SERIES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#000000", "D", ":"),
)


@dataclass(frozen=True)
class Series:
    """One line of a figure: its name, and means with interval ends over `x`."""

    name: str
    x: Sequence[float]
    cells: Sequence[dict[str, float]]


def lines(
    series: Sequence[Series], x_label: str, y_label: str, *, limit: float | None, log: bool
) -> str:
    """Means with 95 % intervals; `limit` is drawn as a threshold, `log` makes both axes so."""
    with _style(f"{x_label}-{y_label}"):
        figure = Figure(figsize=(7.8, 3.4), layout="constrained")
        axes = figure.add_subplot()
        for row, (colour, marker, dash) in zip(series, _SERIES, strict=False):
            axes.errorbar(
                row.x,
                [cell["mean"] for cell in row.cells],
                yerr=_ends(row.cells),
                label=row.name,
                color=colour,
                marker=marker,
                linestyle=dash,
                capsize=3,
            )
        if limit is not None:
            _threshold(axes, limit)
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            ticks = sorted({x for row in series for x in row.x})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            _plain_decades(axes.yaxis)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        figure.legend(loc="outside upper left", ncols=2, frameon=False)
        return _svg(figure)


def dots(names: Sequence[str], cells: Sequence[dict[str, float]], x_label: str) -> str:
    """One row per name, on a logarithmic axis: a mean and its interval."""
    with _style(x_label):
        figure = Figure(figsize=(7.8, 0.9 + 0.4 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        rows = range(len(names), 0, -1)
        axes.errorbar(
            [cell["mean"] for cell in cells],
            list(rows),
            xerr=_ends(cells),
            fmt="o",
            color=_SERIES[0][0],
            capsize=3,
        )
        axes.set_yticks(list(rows), names)
        axes.set_ylim(0.5, len(names) + 0.5)
        axes.set_xscale("log")
        _plain_decades(axes.xaxis)
        axes.set_xlabel(x_label)
        return _svg(figure)


def heat_maps(
    maps: dict[str, Sequence[Sequence[float]]], used: dict[str, Sequence[Sequence[int]]]
) -> str:
    """R^2 of single source layers (across) for target layers (down), side by side.

    A dot marks a source layer that the mapper reads (`used`, one list per target layer).
    """
    with _style("heat-maps"):
        first = next(iter(maps.values()))
        height = min(9.0, 1.6 + 0.16 * len(first))
        figure = Figure(figsize=(3.9 * len(maps), height), layout="constrained")
        for place, (name, rows) in enumerate(maps.items(), start=1):
            axes = figure.add_subplot(1, len(maps), place)
            axes.grid(visible=False)
            sizes = (range(len(rows[0])), range(len(rows)))
            image = axes.pcolormesh(*sizes, rows, cmap="cividis", vmin=0, vmax=1, shading="nearest")
            axes.invert_yaxis()
            marks = [(s, t) for t, chosen in enumerate(used[name]) for s in chosen]
            axes.scatter(
                [s for s, _ in marks],
                [t for _, t in marks],
                s=9,
                facecolor="white",
                edgecolor="black",
                linewidth=0.5,
            )
            axes.set_title(name)
            axes.set_xlabel("source layer")
            axes.set_ylabel("target layer")
        figure.colorbar(image, ax=figure.axes, label="held-out $R^2$", shrink=0.9)
        return _svg(figure)


def _ends(cells: Sequence[dict[str, float]]) -> list[list[float]]:
    """Distances from the means to both ends of the intervals."""
    below = [max(0.0, cell["mean"] - cell["low"]) for cell in cells]
    return [below, [max(0.0, cell["high"] - cell["mean"]) for cell in cells]]


def _plain_decades(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of every decade, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _threshold(axes: Axes, limit: float) -> None:
    axes.axhline(limit, color="black", linewidth=1.2, linestyle=(0, (1, 1)))
    axes.annotate(
        f"threshold {limit:g}",
        (1.0, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )


@contextmanager
def _style(name: str) -> Iterator[None]:
    """Ids within an SVG follow from the salt: two figures on one page must not share them."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": None}
    figure.savefig(buffer, format="svg", metadata=metadata)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
