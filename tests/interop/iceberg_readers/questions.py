"""Questions of the flights, in the SQL that DuckDB and Spark share; what differs is written with @."""

from __future__ import annotations

import re
from typing import Final

_QUESTIONS: Final = (
    # How much happened on each day?
    """SELECT @text(event_date), count(*), count(DISTINCT aggregate_id)
    FROM events GROUP BY event_date ORDER BY event_date""",
    # What kinds of events are there?
    """SELECT @text(event_date), event_type, count(*) FROM events
    GROUP BY event_date, event_type ORDER BY event_date, event_type""",
    # What does an event say?
    """SELECT seq, id, aggregate_id, event_type, payload, headers, version, status, @text(event_date)
    FROM events WHERE event_date = DATE '2013-01-01' ORDER BY seq LIMIT 50""",
    # Where do most flights go?
    """SELECT @(destination), count(*) FROM events WHERE event_type = 'flight.departed'
    GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 5""",
    # What did one aircraft do on one day?
    """SELECT @epoch(created_at), event_type, @(number), concat(@(origin), '-', @(destination)),
           CAST(@(movement) AS int)
    FROM events WHERE event_date = DATE '2013-01-02' AND aggregate_type = 'aircraft'
      AND aggregate_id = 'N725MQ' ORDER BY seq""",
    # How late do flights leave?
    """WITH times AS (
        SELECT @(flight) AS flight, @(origin) AS origin,
               max(CASE WHEN event_type = 'flight.departed' THEN @epoch(created_at) END) AS departed,
               max(CASE WHEN event_type = 'flight.scheduled' THEN @epoch(@time(@(at))) END) AS planned
        FROM events GROUP BY 1, 2)
    SELECT origin, count(*), median((departed - planned) / 60),
           sum(CASE WHEN departed > planned + 900 THEN 1 ELSE 0 END)
    FROM times WHERE departed IS NOT NULL AND planned IS NOT NULL GROUP BY origin ORDER BY origin""",
    # Which airlines cancel most?
    """SELECT left(@(number), 2), count(*) FROM events WHERE event_type = 'flight.cancelled'
    GROUP BY 1 ORDER BY 2 DESC, 1""",
    # When do flights leave, by the clock of New York?
    """SELECT hour(@new_york(created_at)), count(*) FROM events WHERE event_type = 'flight.departed'
    GROUP BY 1 ORDER BY 1""",
    # Is anything missing?
    """SELECT count(*), sum(events), sum(CASE WHEN highest <> events THEN 1 ELSE 0 END) FROM (
        SELECT aggregate_id, count(*) AS events, max(CAST(@(movement) AS int)) AS highest
        FROM events GROUP BY aggregate_id) each""",
    # How many flights are in the air at once?
    """SELECT @text(event_date), max(in_the_air) FROM (
        SELECT event_date, sum(CASE event_type WHEN 'flight.departed' THEN 1 WHEN 'flight.arrived' THEN -1
                               ELSE 0 END) OVER (ORDER BY created_at, seq) AS in_the_air
        FROM events) running GROUP BY event_date ORDER BY event_date""",
    # What was the latest event of each aggregate? The view `latest`, which engines do not have.
    """SELECT event_type, count(*) FROM (
        SELECT event_type,
               row_number() OVER (PARTITION BY aggregate_type, aggregate_id ORDER BY seq DESC) AS age
        FROM events) aged WHERE age = 1 GROUP BY event_type ORDER BY event_type""",
)
_DUCKDB: Final = {
    "": r"(payload ->> '\1')",
    "text": r"CAST(\1 AS VARCHAR)",
    "epoch": r"CAST(epoch(\1) AS BIGINT)",
    "time": r"CAST(\1 AS TIMESTAMPTZ)",
    "new_york": r"(\1 AT TIME ZONE 'America/New_York')",
}
_SPARK: Final = {
    "": r"get_json_object(payload, '$.\1')",
    "text": r"CAST(\1 AS STRING)",
    "epoch": r"CAST(unix_timestamp(\1) AS BIGINT)",
    "time": r"CAST(\1 AS TIMESTAMP)",
    "new_york": r"from_utc_timestamp(\1, 'America/New_York')",
}


def in_duckdb() -> list[str]:
    """Return the questions for DuckDB."""
    return [_written(each, _DUCKDB) for each in _QUESTIONS]


def in_spark() -> list[str]:
    """Return the same for Spark."""
    return [_written(each, _SPARK) for each in _QUESTIONS]


def _written(sql: str, dialect: dict[str, str]) -> str:
    # From inside to outside.
    for name in ("", "time", "text", "epoch", "new_york"):
        inner = r"\w+" if not name else r"(?:[^()@]|\((?:[^()]|\([^()]*\))*\))+"
        sql = re.sub(rf"@{name}\(({inner})\)", dialect[name], sql)
    assert "@" not in sql, sql
    return sql
