"""What Dagster shows of an archived day: numbers, which it plots over days, event types, and pictures.

Invariants:
- The cost is bounded: pictures are of at most 30 days, of fewer if their files are large.
- Names of events are in tables and pictures, where they are escaped; none is Markdown.
"""

from __future__ import annotations

from base64 import b64encode
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from outbox_pipelines.defs import pages

if TYPE_CHECKING:
    from outbox_pipelines.days.archive import Archive
    from outbox_pipelines.settings import Settings

_DAYS: Final = 30
_BYTES: Final = 1_000_000_000
_TYPES: Final = 20


def metadata(settings: Settings, day: date) -> dict[str, Any]:
    """Return the metadata.

    Raises:
        SetupError: a file cannot be read.
        UnavailableError: the archive does not answer.
    """
    from outbox_pipelines.days.archive import report, report_page
    from outbox_pipelines.days.archive.store import named

    archive = report.opened(named(settings))
    found = report.read(archive, _first(archive, day), day)
    total = found.by_period.get(day, report.Figures())
    types = [(kind, each) for (period, kind), each in found.by_both.items() if period == day and kind]
    types.sort(key=lambda one: -one[1].events)
    lags = {"lag_median_seconds": total.lag_median, "lag_p99_seconds": total.lag_p99}
    pictures = [b64encode(each.encode()).decode() for each in report_page.pictures(found, are_images=True)]
    return {
        "payload_megabytes": round(total.payload_bytes / 1e6, 3),
        **{name: seconds for name, seconds in lags.items() if seconds is not None},
        "dead_letters": total.dead_letters,
        "discarded": total.discarded,
        "event_types": pages.table(
            [
                {
                    "event_type": kind,
                    "events": each.events,
                    "bytes": each.payload_bytes,
                    "dead_letters": each.dead_letters,
                }
                for kind, each in types[:_TYPES]
            ],
            *("event_type", "events", "bytes", "dead_letters"),
        ),
        "pictures": dg.MetadataValue.md(
            "\n\n".join(f"![of the last days](data:image/svg+xml;base64,{picture})" for picture in pictures)
        ),
    }


def _first(archive: Archive, day: date) -> date:
    """Return the first day of the pictures."""
    first, size = day, 0
    for each in reversed([each for each in archive.manifests if day - timedelta(_DAYS) < each < day]):
        size += archive.manifests[each].size
        if size > _BYTES:
            break
        first = each
    return first
