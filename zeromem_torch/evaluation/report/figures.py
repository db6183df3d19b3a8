"""Figures 3 and 4 as SVG that takes its colours from the page, so that one drawing serves light, dark and print."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from html import escape
from typing import Any

# Stand-ins that no other part of a drawing uses, and what the page calls the colour.
INK, SOFT, LINE, ACCENT = "#010101", "#020202", "#030303", "#040404"
_PAGE = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", ACCENT: "var(--accent)"}
_STYLE = {
    "svg.fonttype": "none",  # text stays text: found by a search, in the page's font
    "svg.hashsalt": "zeromem",  # the same ids each time
    "text.parse_math": False,
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
}
_WIDTH = 4.7  # inches; the page scales it to its column

Interval = tuple[float, float] | None


def bars(values: Mapping[str, tuple[float, Interval]], main: str, axis: str, about: str) -> str:
    """A horizontal bar for each label, in percent, with its interval where there is one; ``main`` stands out."""
    labels = list(values)
    figure, axes = _axes(0.34 * len(labels) + 0.7)
    for place, (label, (value, interval)) in enumerate(values.items()):
        color, alpha = (ACCENT, 1.0) if label == main else (SOFT, 0.45)
        axes.barh(place, 100 * value, height=0.62, color=color, alpha=alpha)
        low, high = interval or (value, value)
        if interval is not None:
            error = [[100 * (value - low)], [100 * (high - value)]]
            axes.errorbar(100 * value, place, xerr=error, color=INK, elinewidth=1.1, capsize=2.5, capthick=1.1)
        end = (100 * max(value, high), place)
        axes.annotate(f"{100 * value:.1f}", end, (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_xlim(left=0)
    axes.margins(x=0.14)
    axes.set_xlabel(axis)
    return _svg(figure, about)


def lines(series: Mapping[str, Mapping[int, float]], main: str | None, axis: str, about: str) -> str:
    """Percent over k, a line for each label, named at its end; ``main`` stands out."""
    figure, axes = _axes(2.9)
    styles = ["-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (2, 2)), (0, (8, 2))]
    for place, (label, points) in enumerate(series.items()):
        ours = label == main
        color, width = (ACCENT, 2.2) if ours else (SOFT, 1.2)
        ks, values = list(points), [100 * value for value in points.values()]
        marker = "o" if len(points) < 12 else None
        axes.plot(
            ks, values, color=color, linewidth=width, linestyle=styles[place % len(styles)], marker=marker, markersize=3
        )
    last = max(max(points) for points in series.values())
    axes.set_xlim(min(min(points) for points in series.values()), last)
    axes.margins(y=0.06)
    low, high = axes.get_ylim()
    ends = {label: 100 * points[max(points)] for label, points in series.items()}
    for label, height in _spread(ends, gap=(high - low) * 0.062).items():
        color, weight = (ACCENT, "bold") if label == main else (INK, "normal")
        axes.annotate(label, (last, height), (5, 0), textcoords="offset points", va="center", color=color, weight=weight)
    ticks = [k for k in (1, 5, 10, 15, 20) if k <= last]
    axes.set_xticks(ticks)
    axes.grid(axis="y")
    axes.set_xlabel("k, items handed to the reader")
    axes.set_ylabel(axis)
    return _svg(figure, about)


def _spread(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """The heights, moved apart as little as keeps their order and the gap between any two."""
    placed: list[tuple[list[str], float]] = []  # groups of labels a gap apart, with the height of their middle
    for label, height in sorted(heights.items(), key=lambda pair: pair[1]):
        placed.append(([label], height))
        while len(placed) > 1:
            (below, low), (above, high) = placed[-2:]
            if high - low >= gap * (len(below) + len(above)) / 2:
                break
            both = len(below) + len(above)
            placed[-2:] = [(below + above, (low * len(below) + high * len(above)) / both)]
    return {
        label: middle + gap * (place - (len(group) - 1) / 2) for group, middle in placed for place, label in enumerate(group)
    }


def _axes(height: float) -> tuple[Any, Any]:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the report's figures need matplotlib; run `pip install 'zeromem-torch[report]'`") from error
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="tight")
        axes = figure.subplots()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Any, about: str) -> str:
    from matplotlib import rc_context

    written = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(_STYLE):
        figure.savefig(written, format="svg", transparent=True, bbox_inches="tight", pad_inches=0.02, metadata=nothing)
    drawn = written.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # an id stands once in a page, and nothing refers to these
    drawn = re.sub("|".join(_PAGE), lambda found: _PAGE[found[0]], drawn)
    return re.sub(r' width="[^"]*" height="[^"]*"', lambda _: f' role="img" aria-label="{escape(about)}"', drawn, count=1)
