"""The events of an archived day as a DataFrame: all of them, or a sample of a large day.

Invariants:
- Memory and time do not grow with the day: DuckDB reads it with limited memory, and the frame is limited in
  rows and in bytes of payloads.
- Rows with `weight` > 0 are a random part of the day, and the sum of `weight` is the number of its events.
- What breaks a rule about single columns is in the sample even if it is rare: such rows are added, with
  weight 0, up to `MOST_UNUSUAL`. Of payloads that are not in the sample nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted
from outbox_pipelines.days.archive.store import named
from outbox_pipelines.days.partitions.calendar import bounds_of
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import DaySettings

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

    from outbox_pipelines.days.archive import Archive

MOST: Final = 100_000
"""Events of a random part."""
MOST_UNUSUAL: Final = 10_000
"""Rows that are added to it."""
MOST_BYTES: Final = 64_000_000
"""Bytes of the payloads of a random part."""
LONGEST: Final = 100_000
"""Bytes of a payload; a longer one is NULL in the frame."""
DAYS_BEFORE: Final = 7
# Columns of the frame that a user may have added to the table, too.
_OURS: Final = ("latency_seconds", "weight")
_MEMORY: Final = 400_000_000
_THREADS: Final = 2

_SIZE: Final = "SELECT coalesce(sum(least(strlen(payload), $longest)), 0) FROM day"
_ROWS: Final = """
SELECT * REPLACE (CASE WHEN strlen(payload) <= $longest THEN payload END AS payload),
       (epoch_us(published_at) - epoch_us(created_at)) / 1e6 AS latency_seconds
FROM day"""
# The id alone would take all rows or none if many have the same one.
_RANDOM: Final = "hash(id, seq) <= $until"
# Repetitions are found by hashes, since texts would take four times the memory; a collision adds a row that
# is in order. Of each event type some rows are added, so that a rare type has payloads in the sample.
_UNUSUAL: Final = f"""
NOT ({_RANDOM}) AND (
    id IS NULL OR status <> 'PROCESSED' OR attempts > 0 OR created_at < $start OR created_at >= $stop
    OR aggregate_type = '' OR aggregate_id = '' OR event_type = '' OR idempotency_key = ''
    OR $known IS NOT NULL AND NOT list_contains($known, event_type)
    OR hash(id) IN (SELECT hash(id) FROM day GROUP BY 1 HAVING count(*) > 1 LIMIT $most)
    OR seq IN (SELECT seq FROM day GROUP BY 1 HAVING count(*) > 1 LIMIT $most)
    OR hash(idempotency_key) IN (SELECT hash(idempotency_key) FROM day WHERE idempotency_key IS NOT NULL
                                 GROUP BY 1 HAVING count(*) > 1 LIMIT $most)
    OR seq IN (SELECT unnest(min_by(seq, hash(id, seq), 20)) FROM day GROUP BY event_type LIMIT $most))
LIMIT $most"""


@dataclass(frozen=True, slots=True)
class Sample:
    """What of a day is judged."""

    day: date
    frame: pd.DataFrame
    """The columns of the archive, `latency_seconds` (from the event to its publication) and `weight`."""
    events: int
    """Events of the day."""
    random: int
    """Rows of the random part; equal to `events` if the frame has the whole day."""
    before: tuple[int, ...]
    """Events of the archived days before, up to a week."""

    @property
    def is_whole(self) -> bool:
        """Whether the frame has all events of the day."""
        return self.random == self.events

    def __str__(self) -> str:
        if self.is_whole:
            return f"all {counted(self.events, 'event')}"
        return (
            f"a sample: {self.random:,} of {self.events:,} events at random, and "
            f"{len(self.frame) - self.random:,} that are rare or unusual"
        )


def read(settings: DaySettings, day: date, known: Sequence[str] | None = None) -> Sample:
    """Return the events of an archived day.

    Args:
        known: the documented event types; events of others are unusual. None without an event catalog.

    Raises:
        SetupError: the day is not archived, or OUTBOX_ARCHIVE is not set.
        UnavailableError: the archive does not answer.
    """
    import duckdb

    from outbox_pipelines.days.archive import open_archive

    archive = open_archive(named(settings), memory_bytes=_MEMORY, threads=_THREADS)
    if day not in archive.manifests:
        raise SetupError(f"{day} is not archived: run `outbox archive day {day}` first")
    events = archive.manifests[day].rows
    earlier = [each for each in archive.days if each < day][-DAYS_BEFORE:]
    try:
        frame, random = _frame(archive, day, events, known)
    except duckdb.Error as error:
        raise SetupError(
            f"the archived file of {day} cannot be read ({first_line(error)}): run "
            f"`outbox archive verify {day}`"
        ) from None
    return Sample(day, frame, events, random, tuple(archive.manifests[each].rows for each in earlier))


def _frame(archive: Archive, day: date, events: int, known: Sequence[str] | None) -> tuple[pd.DataFrame, int]:
    """Return the frame, and the number of rows of its random part."""
    import pandas as pd

    names = [name for name in archive.of_days([day]).columns if name.casefold() not in _OURS]
    archive.of_days([day], columns=names).create_view("day")
    start, stop = bounds_of(day)
    connection = archive.connection
    ((size,),) = connection.execute(_SIZE, {"longest": LONGEST}).fetchall()
    part = min(1.0, MOST / max(1, events), MOST_BYTES / max(1, size))
    if part == 1.0:
        frame = _rows(connection.sql(_ROWS, params={"longest": LONGEST}))
        return frame.assign(weight=1.0), events
    given = {"longest": LONGEST, "until": int(part * (2**64 - 1))}
    random = _rows(connection.sql(f"{_ROWS} WHERE {_RANDOM} LIMIT {2 * MOST}", params=given))
    unusual = _rows(
        connection.sql(
            f"{_ROWS} WHERE {_UNUSUAL}",
            params={
                **given,
                "start": start,
                "stop": stop,
                "known": None if known is None else list(known),
                "most": MOST_UNUSUAL,
            },
        )
    )
    frame = pd.concat(
        [random.assign(weight=events / max(1, len(random))), unusual.assign(weight=0.0)], ignore_index=True
    )
    return frame, len(random)


def _rows(found: duckdb.DuckDBPyRelation) -> pd.DataFrame:
    import pandas as pd
    import pyarrow as pa

    # A number that can be missing would become a float.
    types: dict[Any, Any] = {pa.int32(): pd.Int32Dtype()}
    frame: pd.DataFrame = found.to_arrow_table().to_pandas(types_mapper=types.get, date_as_object=False)
    return frame
