"""A chart of stacked bars as SVG, which a page shows in light and dark colors, also as an image.

Invariants:
- Every name is escaped. What is too long is cut; the whole name is in the title that a pointer shows.
- What is not zero is visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Final

_WIDTH, _HEIGHT, _LEFT, _TOP = 440, 150, 74, 30
_COLORS: Final = (
    *("#4e79a7", "#e08214", "#4a9f4e", "#d9534f", "#9467bd"),
    *("#b8960c", "#2a9d9d", "#9c6b4f", "#8a8a8a"),
)
MOST: Final = len(_COLORS)
"""So many series have a color of their own."""
_LABELS, _COLUMNS, _NAME = 4, 2, 28
# The least height of a bar, and the most width.
_LEAST, _WIDEST = 1.5, 40


def bars(
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    shown: Callable[[float], str],
    *,
    is_image: bool = False,
) -> str:
    """Return the SVG.

    Args:
        labels: one for each bar.
        series: by name, a value for each bar; the first is at the bottom.
        shown: writes a value with its unit.
        is_image: without the values that a pointer shows in a page.
    """
    top = _rounded(max(map(sum, zip(*series.values(), strict=True)), default=0))
    step = (_WIDTH - _LEFT) / len(labels)
    width = min(step * 0.85, _WIDEST)
    bottom = _TOP + _HEIGHT
    parts = [_text(_LEFT, 14, title, "font-size='14' font-weight='bold'")]
    for share in (0, 0.5, 1):
        y = bottom - share * _HEIGHT
        parts.append(f"<path d='M{_LEFT} {y}H{_WIDTH}' stroke='#999' stroke-opacity='.4'/>")
        parts.append(_text(_LEFT - 6, y + 4, shown(top * share), "text-anchor='end'"))
    heights = [0.0] * len(labels)
    for color, values in zip(_COLORS, series.values(), strict=False):
        path = ""
        for place, value in enumerate(values):
            if value > 0:
                height = max(value / top * _HEIGHT, _LEAST)
                heights[place] += height
                x = _LEFT + (place + 0.5) * step - width / 2
                path += f"M{x:.1f} {bottom - heights[place]:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"
        parts.append(f"<path d='{path}' fill='{color}'/>")
    every = math.ceil(len(labels) / _LABELS)
    for place, label in enumerate(labels):
        x = _LEFT + place * step
        if place % every == 0:
            parts.append(_text(x + step / 2, bottom + 18, label, "text-anchor='middle'"))
        if is_image:
            continue
        of_it = "".join(f"\n{name}: {shown(each[place])}" for name, each in series.items() if each[place])
        parts.append(
            f"<rect x='{x:.1f}' y='{_TOP}' width='{step:.1f}' height='{_HEIGHT}' fill-opacity='0'>"
            f"<title>{escape(label + of_it)}</title></rect>"
        )
    for place, (color, name) in enumerate(zip(_COLORS, series, strict=False)):
        row, column = divmod(place, _COLUMNS)
        x, y = column * _WIDTH / _COLUMNS, bottom + 38 + row * 18
        parts.append(f"<path d='M{x:.0f} {y - 9}h10v10h-10z' fill='{color}'/>")
        cut = name if len(name) <= _NAME else name[: _NAME - 1] + "…"
        parts.append(f"<g><title>{escape(name)}</title>{_text(x + 15, y, cut)}</g>")
    height = bottom + 24 + math.ceil(len(series) / _COLUMNS) * 18
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' role='img' "
        f"font-family='system-ui,sans-serif' font-size='12' fill='#777'>"
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _rounded(value: float) -> float:
    """Return the next of 1, 2, 3, 4, 6, 10, 20, …, which a label can show, as half of it can."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(power * step for step in (1, 2, 3, 4, 6, 10) if power * step >= value)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{escape(text)}</text>"
