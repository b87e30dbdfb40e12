"""A report as one HTML page, which loads nothing, and its pictures, which Dagster shows, too.

Invariants:
- Names are the users' data: each is one line, and escaped.
- A browser loads nothing for the page and runs nothing in it, whatever a name is.
- In a chart, what is too long is cut; the whole name is in the title that a pointer shows. What is not zero
  is visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from html import escape
from typing import Final

from outbox_pipelines.core.text import counted, plain, size
from outbox_pipelines.days.archive.report import Aggregates, Figures, Payload, Report

# Colors of the browser's light or dark scheme.
_STYLE: Final = """
:root { color-scheme: light dark }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 76rem; margin: auto; padding: 1rem }
body { background: Canvas; color: CanvasText }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.pictures { display: grid; gap: 1.5rem }
.pictures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
svg { width: 100% } svg text { fill: CanvasText }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem } dt { opacity: .75 }
dd { margin: 0; font-size: 1.25rem }
div.table { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; vertical-align: top; white-space: nowrap }
th { font-weight: normal; opacity: .75 } tr { border-bottom: 1px solid #8884 }
.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 9rem }
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_FORMATS: Final = {"day": "%Y-%m-%d", "week": "%Y-%m-%d", "month": "%Y-%m", "year": "%Y"}
_COLUMNS: Final = (
    *("Events", "Payloads", "Mean payload", "Largest", "Dead letters", "Discarded"),
    *("Lag, median", "Lag, p99"),
)
_SECONDS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def page(report: Report, largest: Sequence[Payload], aggregates: Sequence[Aggregates]) -> str:
    """Return the HTML."""
    title = f"Outbox archive, {report.since} to {report.until}"
    missing = (report.until - report.since).days + 1 - report.archived
    note = f" {counted(missing, 'day')} of the range not archived." if missing else ""
    total = report.total
    files = report.file_bytes.total()
    key = {
        "Events": _number(total.events),
        "Event types": _number(report.types),
        "Aggregates": _number(aggregates[0].of_all_types if aggregates else 0),
        "Payloads": size(total.payload_bytes),
        "Files": size(files),
        "Lag, median and p99": f"{_lag(total.lag_median)}, {_lag(total.lag_p99)}",
        "Dead letters": _number(total.dead_letters),
    }
    by_period = [
        (_label(report, period), *_cells(figures), size(report.file_bytes[period]))
        for period, figures in sorted(report.by_period.items())
    ]
    return "".join(
        [
            "<!doctype html><html lang='en'><meta charset='utf-8'>",
            f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>",
            f"<p>Of {_escaped(report.source)}. {counted(report.archived, 'day')} (UTC), by {report.unit}."
            f"{note} Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.</p><dl>",
            *(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in key.items()),
            "</dl>",
            f"<div class='pictures'>{''.join(f'<div>{each}</div>' for each in pictures(report))}</div>",
            _table("Event types", ["Type", *_COLUMNS], _of_types(report), {0}),
            _table(f"By {report.unit}", ["First day", *_COLUMNS, "Files"], by_period, {0}),
            _table(
                "Largest payloads",
                ["Bytes", "Type", "Aggregate", "Day", "Id"],
                _of_payloads(largest),
                {1, 2, 3, 4},
            ),
            _table("Aggregates", ["Type", "Aggregates", "Events"], _of_aggregates(aggregates), {0}),
            "<p>Payloads: bytes of the JSON text; a body in a store is not counted. Lag: from created_at to "
            "published_at, which is known to the second; quantiles are approximate. Dead letters and "
            "discarded events: as of the archiving.</p></html>\n",
        ]
    )


def pictures(report: Report, *, are_images: bool = False) -> list[str]:
    """Return the charts, each as SVG; as `bars` for images or for a page."""
    labels = [_label(report, period) for period in report.periods]
    lags = [report.by_period.get(period, Figures()) for period in report.periods]
    factor, unit = _unit(max((figures.lag_p99 or 0.0 for figures in lags), default=0.0))
    medians = [(figures.lag_median or 0.0) / factor for figures in lags]
    # The bars end at the 99th percentile.
    above = [(lag.lag_p99 or 0.0) / factor - median for lag, median in zip(lags, medians, strict=True)]

    def drawn(title: str, series: Mapping[str, Sequence[float]], shown: Callable[[float], str]) -> str:
        return bars(f"{title} per {report.unit}", labels, series, shown, is_image=are_images)

    return [
        drawn("Events", _by_type(report, lambda each: each.events), _number),
        drawn("Payload bytes", _by_type(report, lambda each: each.payload_bytes), size),
        drawn("File bytes", {"files": [report.file_bytes[period] for period in report.periods]}, size),
        drawn("Lag", {"median": medians, "from there to p99": above}, lambda lag: f"{lag:,.3g} {unit}"),
        drawn("Dead letters", _by_type(report, lambda each: each.dead_letters), _number),
    ]


def _by_type(report: Report, value: Callable[[Figures], float]) -> dict[str, list[float]]:
    """Return the values of each period, by the types that have most, and of the others."""
    ranked = sorted(
        (kind for kind, found in report.by_type.items() if kind is not None and value(found)),
        key=lambda kind: -value(report.by_type[kind]),
    )
    named = ranked if len(ranked) <= MOST and None not in report.by_type else ranked[: MOST - 1]

    def of(period: date, kind: str | None) -> float:
        return value(report.by_both.get((period, kind), Figures()))

    found = {plain(kind): [of(period, kind) for period in report.periods] for kind in named}
    rest = [
        value(report.by_period.get(period, Figures())) - sum(values)
        for period, *values in zip(report.periods, *found.values(), strict=True)
    ]
    return {**found, **({f"{report.types - len(named):,} others": rest} if any(rest) else {})}


def _of_types(report: Report) -> Iterator[tuple[str, ...]]:
    for kind, figures in sorted(report.by_type.items(), key=lambda each: (each[0] is None, -each[1].events)):
        others = report.types - len(report.by_type) + 1
        yield counted(others, "other") if kind is None else kind, *_cells(figures)


def _of_payloads(largest: Iterable[Payload]) -> Iterator[tuple[str, ...]]:
    for event in largest:
        aggregate = f"{event.aggregate_type} {event.aggregate_id}"
        yield _number(event.size), event.event_type, aggregate, str(event.day), event.id


def _of_aggregates(aggregates: Sequence[Aggregates]) -> Iterator[tuple[str, ...]]:
    for row in aggregates:
        yield row.aggregate_type, _number(row.aggregates), _number(row.events)


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        _number(figures.events),
        size(figures.payload_bytes),
        size(figures.payload_bytes / figures.events if figures.events else None),
        size(figures.largest),
        _number(figures.dead_letters),
        _number(figures.discarded),
        _lag(figures.lag_median),
        _lag(figures.lag_p99),
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: set[int]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if place in texts else ''}>{_escaped(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<h2>{title}</h2><div class='table'><table><tr>{line(columns, 'th')}</tr>{body}</table></div>"


def _label(report: Report, period: date) -> str:
    return f"{period:{_FORMATS[report.unit]}}"


def _escaped(text: str) -> str:
    return escape(plain(text))


def _number(value: float) -> str:
    return f"{value:,.10g}"


def _lag(seconds: float | None) -> str:
    """Return a duration in its largest unit."""
    if seconds is None:
        return "unknown"
    factor, unit = _unit(seconds)
    return f"{seconds / factor:,.3g} {unit}"


def _unit(seconds: float) -> tuple[int, str]:
    return next((each for each in _SECONDS if seconds >= 2 * each[0]), _SECONDS[-1])


_WIDTH, _HEIGHT, _LEFT, _TOP = 440, 150, 74, 30
_COLORS: Final = (
    *("#4e79a7", "#e08214", "#4a9f4e", "#d9534f", "#9467bd"),
    *("#b8960c", "#2a9d9d", "#9c6b4f", "#8a8a8a"),
)
MOST: Final = len(_COLORS)
"""So many series have a color of their own."""
_LABELS, _COLUMNS_OF_BARS, _NAME = 4, 2, 28
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
        row, column = divmod(place, _COLUMNS_OF_BARS)
        x, y = column * _WIDTH / _COLUMNS_OF_BARS, bottom + 38 + row * 18
        parts.append(f"<path d='M{x:.0f} {y - 9}h10v10h-10z' fill='{color}'/>")
        cut = name if len(name) <= _NAME else name[: _NAME - 1] + "…"
        parts.append(f"<g><title>{escape(name)}</title>{_text(x + 15, y, cut)}</g>")
    height = bottom + 24 + math.ceil(len(series) / _COLUMNS_OF_BARS) * 18
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
