"""What `outbox migrate --check` sees: each kind of difference, named; and what a relay does about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from outbox_pipelines.core.table_locks import LimitedSession
from outbox_pipelines.database import schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.postgres import Postgres
from tests.schema.servers import Database, fresh


@dataclass(frozen=True)
class Drift:
    """A change by hand, and how the line begins that the check must print."""

    change: str
    line: str

    @property
    def object(self) -> str:
        return self.line.split()[2].removesuffix("()")


DRIFTS = {
    "dropped column": Drift(
        "ALTER TABLE outbox_days DROP COLUMN manifest_sha256",
        "missing: column outbox_days.manifest_sha256 text",
    ),
    "added column": Drift("ALTER TABLE outbox ADD COLUMN mine int", "unknown: column outbox.mine integer"),
    "changed type": Drift(
        "ALTER TABLE outbox_keys ALTER COLUMN event_id TYPE text",
        "missing: column outbox_keys.event_id uuid",
    ),
    "dropped NOT NULL": Drift(
        "ALTER TABLE outbox ALTER COLUMN payload DROP NOT NULL",
        "missing: column outbox.payload jsonb not null",
    ),
    "changed default": Drift(
        "ALTER TABLE outbox ALTER COLUMN tx SET DEFAULT '0'",
        "missing: column outbox.tx xid8 not null default pg_current_xact_id()",
    ),
    "cached sequence": Drift(
        "ALTER SEQUENCE outbox_seq CACHE 10", "missing: sequence outbox_seq bigint increment 1 cache 1"
    ),
    "missing constraint": Drift(
        "ALTER TABLE outbox_shards DROP CONSTRAINT outbox_shards_tick",
        "missing: constraint outbox_shards.outbox_shards_tick",
    ),
    "missing index": Drift("DROP INDEX outbox_tx", "missing: index outbox_tx "),
    "extra index": Drift("CREATE INDEX outbox_mine ON outbox (event_type)", "unknown: index outbox_mine "),
    "dropped trigger": Drift(
        "DROP TRIGGER outbox_append_only ON outbox", "missing: trigger outbox.outbox_append_only"
    ),
    "disabled trigger": Drift(
        "ALTER TABLE outbox DISABLE TRIGGER outbox_checked",
        "missing: trigger outbox.outbox_checked CREATE",
    ),
    "trigger for replicas only": Drift(
        "ALTER TABLE outbox ENABLE REPLICA TRIGGER outbox_unique_and_waiting",
        "missing: trigger outbox.outbox_unique_and_waiting CREATE",
    ),
    "replaced function body": Drift(
        "CREATE OR REPLACE FUNCTION outbox_refuse_change() RETURNS trigger LANGUAGE plpgsql "
        "SET search_path FROM CURRENT AS $$ BEGIN RETURN coalesce(NEW, OLD); END $$",
        "missing: function outbox_refuse_change()",
    ),
    "function without a search_path": Drift(
        "ALTER FUNCTION outbox_claim_and_wait() RESET search_path",
        "missing: function outbox_claim_and_wait()",
    ),
    "function with another search_path": Drift(
        "ALTER FUNCTION outbox_check_row() SET search_path = elsewhere, public",
        "missing: function outbox_check_row()",
    ),
    "dropped function": Drift(
        "DROP FUNCTION outbox_ensure_partitions", "missing: function outbox_ensure_partitions("
    ),
    "changed view": Drift(
        "DO $$ BEGIN EXECUTE 'CREATE OR REPLACE VIEW outbox_events AS SELECT * FROM ('"
        " || rtrim(pg_get_viewdef('outbox_events'::regclass), ';') || ') e LIMIT 10'; END $$",
        "missing: view outbox_events ",
    ),
    "row security": Drift(
        "ALTER TABLE outbox_parked ENABLE ROW LEVEL SECURITY",
        "missing: row security of outbox_parked: off",
    ),
    "rewrite rule": Drift(
        "CREATE RULE gone AS ON INSERT TO outbox DO INSTEAD NOTHING", "unknown: rules of outbox: gone"
    ),
    "table lost in a crash": Drift(
        "ALTER TABLE outbox_shards SET UNLOGGED", "unknown: table outbox_shards (unlogged)"
    ),
}


def apply(database: Database, drift: Drift) -> None:
    database.rows(drift.change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY", "row security of outbox: off, but found: on;"),
        (
            "CREATE RULE gone AS ON DELETE TO outbox DO INSTEAD NOTHING",
            "rules of outbox: none, but found: gone;",
        ),
        ("DROP FUNCTION outbox_ensure_partitions", r"function outbox_ensure_partitions\([^;]*;"),
    ],
)
def test_a_refusal_says_what_is_there(server: Postgres, template: str, change: str, says: str) -> None:
    """Guards against a message that names only what there should be: `none`."""
    with fresh(server, template) as database:
        database.rows(change)
        with pytest.raises(SetupError, match=f"drifted; missing or changed: {says}"):
            schema.require_schema(database.settings)


@pytest.fixture(scope="module")
def differences(server: Postgres, template: str) -> Iterator[list[str]]:
    """What is found after all these changes: each is on another object, so that none hides another."""
    with fresh(server, template) as database:
        for drift in DRIFTS.values():
            apply(database, drift)
        yield schema.drift(database.settings)


@pytest.mark.parametrize("drift", DRIFTS.values(), ids=list(DRIFTS))
def test_every_kind_of_difference_is_found(differences: list[str], drift: Drift) -> None:
    """Guards against a change by hand that removes a guarantee unnoticed."""
    assert any(line.startswith(drift.line) for line in differences)


@pytest.mark.parametrize("kind", ["missing index", "disabled trigger"])
def test_a_relay_refuses_what_has_changed(database: Database, kind: str) -> None:
    """Guards against a relay that starts on a schema which no longer keeps its promises."""
    apply(database, DRIFTS[kind])
    with pytest.raises(SetupError, match="run `outbox migrate --check`") as refused:
        schema.require_schema(database.settings)
    assert DRIFTS[kind].object in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_command_checks_the_schema_in_its_own_session(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a second login, and another process of the server, for each command and job."""
    opened: list[str] = []
    connect = LimitedSession.connect

    def noted(*given: Any, **named: Any) -> LimitedSession:
        opened.append(named["application_name"])
        return connect(*given, **named)

    monkeypatch.setattr(LimitedSession, "connect", noted)
    assert database.outbox("partitions", "list").exit_code == 0
    assert opened == ["outbox partitions"]


def test_a_relay_tolerates_an_added_index(database: Database) -> None:
    """Guards against a relay that is down because an operator added an index for a query."""
    apply(database, DRIFTS["extra index"])
    schema.require_schema(database.settings)


@pytest.mark.parametrize("kind", ["missing index", "extra index", "dropped function"])
def test_migrate_refuses_a_changed_schema(database: Database, kind: str) -> None:
    """Guards against a migrate that builds on something unknown, or does not report what is wrong."""
    apply(database, DRIFTS[kind])
    before = database.catalog()

    checked = database.outbox("migrate", "--check")
    assert checked.exit_code == 1
    assert checked.output.startswith(DRIFTS[kind].line)

    migrated = database.outbox("migrate")
    assert migrated.exit_code == 2
    assert DRIFTS[kind].line in migrated.output
    assert "nothing was changed" in migrated.output
    assert migrated.output.count("\n") == 1
    assert database.catalog() == before


def test_a_disabled_trigger_on_one_day_is_found(database: Database) -> None:
    """Guards against one partition that can be updated silently, while the table itself looks guarded."""
    [(leaf,)] = database.rows("SELECT 'outbox_' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    database.rows(f"ALTER TABLE {leaf} DISABLE TRIGGER outbox_append_only")
    [line] = schema.drift(database.settings)
    assert line.startswith(f"unknown: trigger {leaf}.outbox_append_only (disabled)")


def test_a_relay_names_the_file_that_was_not_applied(database: Database) -> None:
    """Guards against a relay of a newer version on an older schema, failing later and somewhere else."""
    database.rows("DELETE FROM outbox_migrations WHERE name = '0006_events_view'")
    with pytest.raises(
        SetupError, match=r"is older than .*: it lacks 0006_events_view: run `outbox migrate`"
    ):
        schema.require_schema(database.settings)


def test_a_relay_runs_with_a_newer_schema(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against relays that cannot restart during an upgrade, or after the way back."""
    database.rows(
        "INSERT INTO outbox_migrations (name, description) "
        "VALUES ('0010_future', '{server 99 form 0,table new}')"
    )
    schema.require_schema(database.settings)
    assert "is newer than outbox-pipelines" in caplog.text
    assert "(0010_future), which runs with it: install the version that made it" in caplog.text


def test_a_relay_refuses_a_schema_that_needs_a_later_version(database: Database) -> None:
    """Guards against a first release that no later one can tell that its relays must stop."""
    database.rows(
        "INSERT INTO outbox_migrations (name, needs) VALUES ('0010_future', '2.0.0'), ('0011_more', NULL)"
    )
    with pytest.raises(
        SetupError, match=r"\(0010_future, 0011_more\) and needs 2\.0\.0: install that version"
    ):
        schema.require_schema(database.settings)


def test_a_detached_day_is_no_drift(database: Database) -> None:
    """Guards against retention that stops later migrates after an interruption between detach and drop."""
    leaf = database.value(
        "SELECT min(inhrelid::regclass::text) FROM pg_inherits WHERE inhparent = 'outbox'::regclass"
    )
    database.rows(f"ALTER TABLE outbox DETACH PARTITION {leaf}")
    assert schema.drift(database.settings) == []


def test_a_hardened_database_is_no_drift(database: Database) -> None:
    """Guards against a relay that refuses to start where PUBLIC may call no function."""
    database.rows("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC")
    assert schema.drift(database.settings) == []


def test_an_upgraded_server_is_no_drift(database: Database) -> None:
    """Guards against a relay that refuses to start after pg_upgrade, because views are printed
    differently."""
    database.rows(
        "UPDATE outbox_migrations SET description = "
        "array_append(array_remove(description, (SELECT line FROM unnest(description) line "
        "WHERE line LIKE 'server %')), 'view outbox_events 0')",
    )
    schema.require_schema(database.settings)
