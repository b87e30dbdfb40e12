"""How fast a dropped day is redacted, all of its events or few, beside its archiving.

As a program: ``python -m benchmarks.redaction archive|redact DSN ARCHIVE DAY [WHERE]`` prints rows, seconds
and the peak memory of the process in MB.
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import date
from typing import Final

from benchmarks import programs, usage
from benchmarks.past import ago, fill_day
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Ratio, Row, memory, rate
from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.archive.redact import redact
from outbox_pipelines.settings import Settings, load_settings

_EVENTS: Final = sized(2_000_000, 100_000)
_MEMBER: Final = "customer"
_ALL: Final = "true"
_FEW: Final = "aggregate_id = '7'"


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    with fresh_outbox(servers) as settings, tempfile.TemporaryDirectory(prefix="outbox-bench-") as directory:
        fill_day(settings, ago(2), _EVENTS)
        archived = settings.model_copy(update={"archive": directory})
        given = (settings.dsn, directory, ago(2))
        before = programs.run(settings, "redaction", "archive", *given)
        assert drop.drop(archived, ago(2)).now
        # Few first: what is redacted already is not redacted again.
        few = programs.run(settings, "redaction", "redact", *given, _FEW)
        every = programs.run(settings, "redaction", "redact", *given, _ALL)
    day = f"a day of {_EVENTS:,}"
    return [
        Row(f"{day}: archived", (rate(before[0] / before[1]), memory([before[2]]))),
        *(
            Row(
                f"{day}: a member redacted in {name}",
                (rate(found[0] / found[1]), memory([found[2]])),
                (Ratio(found[1] / before[1], "archiving", "time"),),
            )
            for name, found in (("the events of one aggregate", few), ("all events", every))
        ),
    ]


def main(what: str, dsn: str, directory: str, day: str, where: str = "") -> None:
    """Archive or redact a day."""
    settings = load_settings(dsn=dsn, archive=directory)
    started = time.perf_counter()
    if what == "archive":
        rows = archive.archive(settings, date.fromisoformat(day)).manifest.rows
    else:
        done = redact(settings, date.fromisoformat(day), where, [_MEMBER], reason="measured", actor="bench")
        assert done.events, done
        rows = done.rows
    seconds = time.perf_counter() - started
    print(rows, seconds, usage.peak())


if __name__ == "__main__":
    main(*sys.argv[1:])
