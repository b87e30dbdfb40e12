"""Months that are made for a real table, beside writers."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from outbox_pipelines.defs.outbox import Outbox as Served
from outbox_pipelines.defs.upkeep import make_months, make_months_schedule
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.existing import months
from outbox_pipelines.existing.months import ensure
from tests.existing.cleaning.conftest import MONTHS, MONTHS_MAPPING, Cleaning, Make, make

__all__ = ["make"]

ROOT = Path(__file__).parents[3]
PARENT = MONTHS.split("CREATE TABLE events_01", 1)[0]
NAMES = """
SELECT c.relname::text, pg_get_expr(c.relpartbound, c.oid)
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'events'::regclass ORDER BY 1"""


@pytest.fixture
def table(make: Make) -> Cleaning:
    """Without a partition."""
    return make(f"{PARENT}CREATE INDEX ON events (created_at) WHERE published_at IS NULL", MONTHS_MAPPING)


def _month(table: Cleaning, ahead: int) -> str:
    """The begin of a month after the current one, as SQL prints it."""
    ((month,),) = table.execute(
        "SELECT to_char(date_trunc('month', now() AT TIME ZONE 'UTC') + %s * interval '1 month', "
        "'YYYY-MM-DD')",
        ahead,
    )
    return str(month)


def test_events_of_now_and_of_later_have_a_partition(table: Cleaning) -> None:
    made = ensure(table.settings, 2)
    assert len(made.made) == 3
    assert [name for name, _ in table.execute(NAMES)] == [name.removeprefix("public.") for name in made.made]
    assert made.until is not None
    assert made.until.strftime("%Y-%m-%d %H:%M:%S%z") == f"{_month(table, 3)} 00:00:00+0000"
    table.execute(
        "INSERT INTO events (created_at) SELECT at FROM unnest(ARRAY[now(), "
        f"'{_month(table, 1)}Z', '{_month(table, 3)}Z'::timestamptz - interval '1 microsecond']) AS at"
    )
    with pytest.raises(psycopg.errors.CheckViolation, match="no partition"):
        table.execute(f"INSERT INTO events (created_at) VALUES ('{_month(table, 3)}Z')")
    # Made already.
    assert ensure(table.settings, 2).made == []
    assert len(ensure(table.settings, 3).made) == 1
    assert len(table.execute("SELECT indexname FROM pg_indexes WHERE tablename LIKE 'events_p%'")) == 4


def test_a_new_partition_is_as_the_others(table: Cleaning) -> None:
    """Guards against a month without what the operators gave the table and its partitions."""
    role = "reader_" + table.execute("SELECT current_database()")[0][0]
    table.execute(
        f"CREATE SCHEMA parts; CREATE ROLE {role}; GRANT SELECT, DELETE ON events TO {role}; "
        f"CREATE TABLE parts.events_first PARTITION OF events FOR VALUES FROM ('{_month(table, 0)}Z') "
        f"TO ('{_month(table, 1)}Z') WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01); "
        "ALTER TABLE parts.events_first REPLICA IDENTITY FULL"
    )
    try:
        (name,) = ensure(table.settings, 1).made
        assert name.startswith("parts.events_p")
        found = table.execute(
            "SELECT reloptions, relreplident::text, has_table_privilege(%s, oid, 'SELECT'), "
            "has_table_privilege(%s, oid, 'DELETE'), has_table_privilege(%s, oid, 'UPDATE') "
            "FROM pg_class WHERE oid = %s::regclass",
            *(role, role, role, name),
        )
        assert found == [(["fillfactor=70", "autovacuum_vacuum_scale_factor=0.01"], "f", True, True, False)]
    finally:
        table.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("kind", ["timestamp", "date"])
def test_times_without_a_zone(make: Make, kind: str) -> None:
    """Guards against bounds of the session's zone."""
    table = make(PARENT.replace("created_at timestamptz", f"created_at {kind}"), MONTHS_MAPPING)
    ((database,),) = table.execute("SELECT current_database()")
    table.execute(f"ALTER DATABASE {database} SET TimeZone = 'Asia/Tokyo'")
    ensure(table.settings, 1)
    zero = " 00:00:00" if kind == "timestamp" else ""
    assert [bound for _, bound in table.execute(NAMES)] == [
        f"FOR VALUES FROM ('{_month(table, n)}{zero}') TO ('{_month(table, n + 1)}{zero}')" for n in (0, 1)
    ]


def test_writers_do_not_wait(table: Cleaning) -> None:
    """Guards against a lock on the table: transactions that write into it are open all the time."""
    ensure(table.settings, 1)
    with table.connect(autocommit=False) as writer, table.connect(autocommit=False) as other:
        writer.execute("INSERT INTO events (created_at) VALUES (now())")
        assert len(ensure(table.settings, 3).made) == 2
        other.execute("SET lock_timeout = '100ms'; INSERT INTO events (created_at) VALUES (now())")


def test_a_default_partition_with_rows_of_that_month(table: Cleaning) -> None:
    """The statements of docs/existing-tables.md move them."""
    table.execute("CREATE TABLE events_default PARTITION OF events DEFAULT")
    table.execute("INSERT INTO events (created_at) VALUES ('2000-01-01Z')")
    assert len(ensure(table.settings, 1).made) == 2
    table.execute(f"INSERT INTO events (created_at) VALUES ('{_month(table, 2)}Z')")
    with pytest.raises(SetupError, match=r"its rows are in the default partition \(.*\): move them as docs/"):
        ensure(table.settings, 2)
    assert len(table.execute(NAMES)) == 3
    (block,) = re.findall(r"```sql\n(BEGIN;.*?)```", (ROOT / "docs" / "existing-tables.md").read_text(), re.S)
    since, until = _month(table, 2), _month(table, 3)
    named = block.replace("2026-11-01", since).replace("2026-12-01", until)
    table.execute(named.replace("events_p2026_11", f"events_p{since[:7].replace('-', '_')}"))
    assert table.execute("SELECT created_at < now() FROM events_default") == [(True,)]
    assert table.execute("SELECT count(*) FROM events") == [(2,)]
    assert ensure(table.settings, 2).made == []
    assert len(ensure(table.settings, 3).made) == 1


def test_a_default_partition_that_is_held(table: Cleaning, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against writers that wait behind a lock that is waited for."""
    table.execute("CREATE TABLE events_default PARTITION OF events DEFAULT")
    monkeypatch.setattr(months, "_ATTEMPTS", 5)
    failures: list[NotReadyError] = []

    def run() -> None:
        with pytest.raises(NotReadyError, match="cannot be made now: transactions hold") as caught:
            ensure(table.settings, 1)
        failures.append(caught.value)

    with table.connect(autocommit=False) as holder, table.connect() as writer:
        holder.execute("INSERT INTO events (created_at) VALUES ('2000-01-01Z')")
        writer.execute("SET statement_timeout = '2s'")
        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            writer.execute("INSERT INTO events (created_at) VALUES ('2000-01-01Z')")
        thread.join()
        assert len(failures) == 1
        holder.rollback()
    assert len(ensure(table.settings, 1).made) == 2


@pytest.mark.extended
def test_two_runs_at_the_same_time(table: Cleaning) -> None:
    with table.connect() as other:
        ((oid,),) = table.execute("SELECT 'events'::regclass::oid::bigint")
        other.execute("SELECT pg_advisory_lock(%s)", [months._LOCK << 32 | oid])
        with pytest.raises(NotReadyError, match=r"months of public.events are being made by session \d+ of"):
            ensure(table.settings, 1)


@pytest.mark.parametrize(
    ("ddl", "words"),
    [
        (PARENT.split(" PARTITION BY")[0], "public.events is not partitioned by ranges of one time"),
        (PARENT.replace("RANGE (created_at)", "RANGE (aggregate_id)"), "is not partitioned by ranges of one"),
        (PARENT.replace("RANGE (created_at)", "LIST (created_at)"), "is not partitioned by ranges of one"),
        (PARENT.replace("(created_at);", "(created_at, id);"), "is not partitioned by ranges of one"),
        (
            f"{PARENT}CREATE TABLE rest PARTITION OF events FOR VALUES FROM ('2026-01-01Z') TO (MAXVALUE)",
            "partition public.rest of public.events has no end",
        ),
        (
            f"{PARENT}CREATE TABLE rest PARTITION OF events FOR VALUES FROM ('2026-01-01Z') TO ('infinity')",
            "partition public.rest of public.events has no end",
        ),
    ],
)
def test_tables_without_months(make: Make, ddl: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        ensure(make(ddl, MONTHS_MAPPING).settings, 1)


def test_a_table_of_that_name(table: Cleaning) -> None:
    (_, last) = ensure(table.settings, 1).made
    table.execute(f"ALTER TABLE events DETACH PARTITION {last}")
    with pytest.raises(SetupError, match=rf"table {last} exists and is no partition of public.events"):
        ensure(table.settings, 1)


def test_a_role_that_does_not_own_the_table(table: Cleaning) -> None:
    with (
        table.role("SELECT, UPDATE ON events") as dsn,
        pytest.raises(
            SetupError, match=r"role cleaner_\w+ does not own public.events.*GRANT postgres TO clea"
        ),
    ):
        ensure(table.settings.model_copy(update={"dsn": dsn}), 1)


def test_a_role_that_is_a_member_of_the_owner(table: Cleaning) -> None:
    """Guards against months that their owner cannot drop."""
    owner = "owner_" + table.execute("SELECT current_database()")[0][0]
    table.execute(
        f"CREATE ROLE {owner}; GRANT CREATE ON SCHEMA public TO {owner}; ALTER TABLE events OWNER TO {owner}"
    )
    try:
        ensure(table.settings, 1)
        assert {
            each
            for (each,) in table.execute(
                "SELECT pg_get_userbyid(relowner) FROM pg_class "
                "WHERE relname LIKE 'events%' AND relkind IN ('r', 'p')"
            )
        } == {owner}
    finally:
        table.execute(f"REASSIGN OWNED BY {owner} TO CURRENT_USER; DROP OWNED BY {owner}; DROP ROLE {owner}")


def test_the_command(table: Cleaning) -> None:
    done = table.table.outbox.outbox("table", "months", **table.environment)
    assert (done.returncode, "OUTBOX_MONTHS_AHEAD is not set" in done.stderr) == (2, True)
    environment = table.environment | {"OUTBOX_MONTHS_AHEAD": "2"}
    done = table.table.outbox.outbox("table", "months", "--json", **environment)
    assert (done.returncode, len(json.loads(done.stdout)["made"])) == (0, 3)
    done = table.table.outbox.outbox("table", "months", **environment)
    assert done.stdout.startswith("public.events: 0 partitions made; the newest ends ")


def test_the_job(table: Cleaning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TABLE", json.dumps(table.settings.table))
    served = Served(settings={"dsn": table.settings.dsn, "kafka": table.settings.kafka})
    schedule = make_months_schedule(served)
    with dg.build_schedule_context() as context:
        skipped = schedule(context)
        monkeypatch.setenv("OUTBOX_MONTHS_AHEAD", "1")
        assert isinstance(schedule(context), dg.RunRequest)
    assert isinstance(skipped, dg.SkipReason)
    assert make_months(served).execute_in_process().success
    assert len(table.execute(NAMES)) == 2
