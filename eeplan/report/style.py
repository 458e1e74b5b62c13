"""The one look of all figures: colours, sizes, and how a figure becomes a PNG file or inline SVG.

Predicted is hatched on a tint, measured is solid. Hues are those of Okabe and Ito, told apart by every common
kind of colour vision. Ink, rules and background are named, so that the page can swap them in the dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb, to_rgba
from matplotlib.figure import Figure

from eeplan.report.palette import INK, LIGHT, MUTED, PAPER, RULE

WIDTH_IN, HALF_WIDTH_IN = 10.8, 5.2
"""Of a figure as wide as the page, and of one in a column; 100 CSS pixels an inch on a wide screen."""
PNG_DPI = 180
HATCH = "/////"
TINT = 0.22
"""Opacity of the tint below a hatch."""
_STRIPE_PT = 2.5
"""Horizontal distance of the hatch's lines is twice this."""

_RC: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": False,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": PAPER,
    "figure.titlesize": 10.5,
    "figure.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "legend.borderaxespad": 0.0,
    "legend.borderpad": 0.0,
    "legend.columnspacing": 1.4,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 1.3,
    "legend.handleheight": 0.9,
    "legend.handletextpad": 0.5,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "eeplan",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": RULE,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": 8,
    "xtick.major.size": 3,
    "ytick.color": RULE,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": 8,
    "ytick.major.size": 0,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the look to figures made inside, whatever the user's matplotlib settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)  # type: ignore[arg-type]
        yield


def new_figure(width_in: float, height_in: float, title: str, caption: str) -> Figure:
    """An empty figure with its title on top and its caption (hardware, batch size) at the foot."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    figure.suptitle(title, x=0.008, ha="left")
    figure.supxlabel(caption, x=0.008, ha="left", fontsize=7, color=MUTED)
    return figure


def predicted_fill(colour: str) -> dict[str, Any]:
    """Keyword arguments of a predicted bar: hatched on a tint of its colour."""
    return {
        "facecolor": to_rgba(colour, TINT),
        "edgecolor": colour,
        "hatch": HATCH,
        "linewidth": 0.7,
    }


def measured_fill(colour: str, *, gap: bool = True) -> dict[str, Any]:
    """Keyword arguments of a measured bar: solid; ``gap`` sets it off from a neighbour of the same colour."""
    return {"facecolor": colour, "edgecolor": PAPER, "linewidth": 0.5 if gap else 0.0}


def label(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text a little to the right of a point in data units, as at the end of a bar."""
    axes.annotate(
        text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", annotation_clip=False, **style
    )


def legend_above(axes: Axes, handles: Sequence[Any], columns: int | None = None) -> None:
    """Legend in one line above the plot, at its left edge."""
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0.0, 1.02),
        ncols=columns or len(handles),
    )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """``positions`` moved apart as little as needed so that neighbours are at least ``gap`` away.

    Order is kept; the group stays centred on where it was. For labels at the ends of lines.
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [positions[i] for i in order]
    for _ in range(20 * len(placed)):
        for a in range(len(placed) - 1):
            overlap = gap - (placed[a + 1] - placed[a])
            if overlap > 1e-12:
                placed[a] -= overlap / 2
                placed[a + 1] += overlap / 2
    result = [0.0] * len(positions)
    for index, position in zip(order, placed, strict=True):
        result[index] = position
    return result


def png(figure: Figure) -> bytes:
    """The figure as a PNG file, with title and caption, on the light background."""
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return buffer.getvalue()


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an ``<svg>`` element for the page, without title and caption, which the page sets itself.

    Text stays text, in the page's font. Ink, rules and background become CSS variables. Ids start with
    ``name``, so that several figures can share a page.
    """
    title, caption = figure.get_suptitle(), figure.get_supxlabel()
    figure.suptitle("")
    figure.supxlabel("")
    buffer = io.StringIO()
    with house_style():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    figure.suptitle(title)
    figure.supxlabel(caption)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sid="([^"]+)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]+;?\s*", "", svg)
    # A presentation attribute cannot hold a variable, a style can.
    svg = re.sub(r'\b(fill|stroke)="(#[0-9a-f]{6})"', r'style="\1: \2"', svg)
    svg = re.sub(r"(fill: url\(#[^)]+\)); fill-opacity: [0-9.]+", r"\1", svg)
    svg = re.sub(
        r'<pattern id="([^"]+)".*?<rect [^>]*style="fill: (#[0-9a-f]{6})".*?</pattern>',
        _stripes, svg, flags=re.DOTALL,
    )  # fmt: skip
    for variable, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{variable})")
    opening = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', flags=re.DOTALL)
    return opening.sub(
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="\\1" role="img" aria-label="{escape(description)}">',
        svg,
        count=1,
    )


def _stripes(pattern: re.Match[str]) -> str:
    """A hatch as a repeated gradient, in place of matplotlib's pattern of the same id.

    Printed pages stay small (browsers print a pattern as one bitmap per bar), and the tint, which matplotlib
    applies to the lines as well, is on the background only.
    """
    name, colour = pattern.groups()
    mixed = tuple(TINT * a + (1 - TINT) * b for a, b in zip(to_rgb(colour), to_rgb(PAPER), strict=True))
    tint = to_hex((mixed[0], mixed[1], mixed[2]))
    tint += f"; stop-color: color-mix(in srgb, {colour} {TINT:.0%}, {PAPER})"
    stops = ((0.0, tint), (0.68, tint), (0.77, colour), (0.91, colour), (1.0, tint))
    return (
        f'<linearGradient id="{name}" gradientUnits="userSpaceOnUse" spreadMethod="repeat" '
        f'x1="0" y1="0" x2="{_STRIPE_PT}" y2="{_STRIPE_PT}">'
        + "".join(f'<stop offset="{at}" style="stop-color: {fill}"/>' for at, fill in stops)
        + "</linearGradient>"
    )
