"""Figures 3 and 4 as SVG that takes its colours from the page, so that one drawing serves light, dark and print."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from html import escape
from typing import Any
from warnings import catch_warnings, filterwarnings

from zeromem_torch.errors import install

# Stand-ins that no other part of a drawing uses, and what the page calls the colour.
INK, SOFT, LINE, ACCENT = "#010101", "#020202", "#030303", "#040404"
_PAGE = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", ACCENT: "var(--accent)"}
_STYLE: Any = {  # matplotlib types the names of its settings, in newer versions only
    "svg.fonttype": "none",  # text stays text: found by a search, in the page's font
    "svg.hashsalt": "zeromem",  # the same ids each time
    "text.parse_math": False,
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "figure.constrained_layout.use": True,
}
_WIDTH = 4.7  # inches; the page scales it to its column
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (2, 2)), (0, (8, 2)))

Interval = tuple[float, float]


def bars(values: Mapping[str, tuple[float, Interval | None]], main: str, axis: str, about: str) -> str:
    """A horizontal bar for each label, in percent, with its interval where there is one; ``main`` stands out."""

    def paint(axes: Any) -> None:
        for place, (label, (value, interval)) in enumerate(values.items()):
            color, alpha = (ACCENT, 1.0) if label == main else (SOFT, 0.45)
            axes.barh(place, 100 * value, height=0.62, color=color, alpha=alpha)
            low, high = interval or (value, value)
            if interval is not None:
                error = [[100 * (value - low)], [100 * (high - value)]]
                axes.errorbar(100 * value, place, xerr=error, color=INK, elinewidth=1.1, capsize=2.5, capthick=1.1)
            _write(axes, f"{100 * value:.1f}", 100 * max(value, high), place)
        axes.set_yticks(range(len(values)), list(values), color=INK)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.grid(axis="x")
        axes.set_xlabel(axis)

    return _drawn(paint, 0.34 * len(values) + 0.55, about)


def lines(series: Mapping[str, Mapping[int, float]], main: str, axis: str, about: str) -> str:
    """Percent over k, a line for each label, named at its end; ``main`` stands out."""
    last = max(max(points) for points in series.values())

    def paint(axes: Any) -> None:
        for place, (label, points) in enumerate(series.items()):
            color, width, above = (ACCENT, 2.2, 3) if label == main else (SOFT, 1.2, 2)
            look = {"color": color, "linewidth": width, "linestyle": _DASHES[place % len(_DASHES)], "zorder": above}
            marker = "o" if len(points) < 12 else None  # between few points a line says little
            axes.plot(list(points), [100 * value for value in points.values()], marker=marker, markersize=3, **look)
        axes.set_xlim(1, last)
        low, high = axes.get_ylim()
        ends = {label: 100 * points[max(points)] for label, points in series.items()}
        for label, height in spread(ends, (high - low) * 0.062).items():
            color, weight = (ACCENT, "bold") if label == main else (INK, "normal")
            _write(axes, label, last, height, color=color, weight=weight)
        axes.set_xticks([k for k in (1, 5, 10, 15, 20) if k <= last])
        axes.grid(axis="y")
        axes.set_xlabel("k, items handed to the reader")
        axes.set_ylabel(axis)

    return _drawn(paint, 2.9, about)


def spread(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """The heights, moved apart as little as keeps their order and ``gap`` between any two."""
    groups: list[tuple[list[str], float]] = []  # labels that stand a gap apart, and the height of their middle
    for label, height in sorted(heights.items(), key=lambda pair: pair[1]):
        groups.append(([label], height))
        while len(groups) > 1:
            (below, low), (above, high) = groups[-2:]
            both = below + above
            if high - low >= gap * len(both) / 2:
                break
            groups[-2:] = [(both, (low * len(below) + high * len(above)) / len(both))]
    return {
        label: middle + gap * (place - (len(group) - 1) / 2)
        for group, middle in groups
        for place, label in enumerate(group)
    }


def _write(axes: Any, words: str, x: float, y: float, **look: Any) -> None:
    """Just right of a point, even where that is outside the axes."""
    axes.annotate(words, (x, y), (5, 0), textcoords="offset points", va="center", annotation_clip=False, **look)


def _drawn(paint: Callable[[Any], None], height: float, about: str) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"the report's figures need matplotlib; {install('report')}") from error
    written = io.StringIO()
    with rc_context(_STYLE), catch_warnings():
        filterwarnings("ignore", "Glyph .* missing")  # the page's fonts may have it
        figure = Figure(figsize=(_WIDTH, height))
        paint(figure.subplots())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    drawn = written.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # an id stands once in a page, and nothing refers to these
    drawn = re.sub("|".join(_PAGE), lambda found: _PAGE[found[0]], drawn)
    named = f' role="img" aria-label="{escape(about)}"'
    return re.sub(r' width="[^"]*" height="[^"]*"', lambda _: named, drawn, count=1)
