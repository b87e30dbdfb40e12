"""What cannot be adopted, or not yet: one line each, and nothing changes."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg.conninfo import make_conninfo

from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing.adopt import steps
from outbox_pipelines.relay import service
from tests.conftest import wait_until
from tests.existing import guides
from tests.existing.adopt.conftest import Adopted, Make

KEY = "00000000-0000-0000-0000-000000000001"


def _then(more: str) -> Callable[[str], str]:
    return lambda ddl: f"{ddl}; {more}"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "CREATE TABLE sent (event uuid REFERENCES outbox)",
            "foreign key public.sent.sent_event_fkey refers to",
        ),
        (
            "CREATE TABLE shop (id uuid PRIMARY KEY); ALTER TABLE outbox ADD shop uuid REFERENCES shop",
            "foreign key outbox_shop_fkey of public.outbox has no counterpart",
        ),
        ("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY", "row security of public.outbox"),
        ("ALTER TABLE outbox ALTER id TYPE text", 'ALTER COLUMN "id" TYPE uuid USING "id"::uuid'),
        (
            "ALTER TABLE outbox ALTER payload TYPE text",
            'ALTER COLUMN "payload" TYPE jsonb USING "payload"::jsonb',
        ),
        (
            "ALTER TABLE outbox ADD n int GENERATED ALWAYS AS (1) STORED",
            "column n of public.outbox is generated",
        ),
        ("CREATE TABLE more () INHERITS (outbox)", "part of an inheritance tree"),
        ("ALTER TABLE outbox SET UNLOGGED", "unlogged or temporary"),
        ("CREATE RULE r AS ON DELETE TO outbox DO INSTEAD NOTHING", "rule r of public.outbox cannot be kept"),
        (
            "CREATE TABLE shop (id int); CREATE RULE also AS ON DELETE TO shop DO ALSO DELETE FROM outbox",
            "rule also of public.shop has public.outbox in its action",
        ),
        (
            "CREATE FUNCTION f() RETURNS bigint LANGUAGE sql BEGIN ATOMIC SELECT count(*) FROM outbox; END",
            "function public.f() has public.outbox in its body",
        ),
        ("ALTER TABLE outbox ADD EXCLUDE (id WITH =)", "exclusion constraint outbox_id_excl"),
        (
            "ALTER TABLE outbox DROP CONSTRAINT outbox_idempotency_key_key; "
            "DROP INDEX outbox_idempotency_key_idx",
            "column idempotency_key of public.outbox has no index",
        ),
    ],
)
def test_tables_that_cannot_be_adopted(make: Make, more: str, words: str) -> None:
    """Guards against a switch that breaks what depends on the table."""
    adopted = make(guides.A, ddl=_then(more))
    plan = adopted.table.outbox.outbox("adopt", "plan", **adopted.environment)
    assert plan.returncode == 1
    assert words in plan.stdout
    code, said = adopted.refuse("adopt", "prepare")
    assert (code, words in said) == (2, True), said


@pytest.mark.extended
@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("ALTER TABLE outbox ADD tenant text", "column:tenant"),
        (
            "ALTER TABLE outbox ADD UNIQUE (aggregate_id, event_type)",
            "unique:outbox_aggregate_id_event_type_key",
        ),
        ("ALTER TABLE outbox DROP CONSTRAINT outbox_idempotency_key_key", "keys"),
        ("CREATE VIEW pending AS SELECT * FROM outbox WHERE published_at IS NULL", "view:public.pending"),
        ("CREATE PUBLICATION changes FOR TABLE outbox", "publication:changes"),
        ("ALTER TABLE outbox ALTER payload TYPE json", "json"),
        (
            "CREATE FUNCTION t() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; "
            "CREATE TRIGGER notify AFTER INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION t()",
            "trigger:notify",
        ),
        (
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, published_at) "
            f"VALUES ('Order', '{KEY}', '', '{{}}', now())",
            "values",
        ),
    ],
)
def test_consequences_are_accepted_by_name(make: Make, more: str, name: str) -> None:
    """Guards against values, constraints or triggers that end without a word."""
    adopted = make(guides.A, ddl=_then(more))
    adopted.write((KEY, 0))
    assert f"--accept {name}: " in adopted.run("adopt", "plan")
    adopted.run("adopt", "prepare")
    code, said = adopted.refuse("adopt", "switch")
    assert (code, said.endswith(f"--accept {name}")) == (2, True), said
    adopted.run("adopt", "switch", "--accept", name)
    adopted.write((KEY, 1))
    adopted.run("adopt", "drain")
    adopted.relay()
    assert adopted.numbers() == {KEY: [0, 1]}


def test_a_mapping_without_a_schema(make: Make) -> None:
    """Guards against the new table, taken for the old one."""
    adopted = make(guides.A)
    table = json.dumps(adopted.settings.table).replace("public.", "")
    assert 'write name = "public.outbox"' in adopted.refuse("adopt", "plan", OUTBOX_TABLE=table)[1]


@pytest.mark.extended
def test_events_that_are_their_own_aggregates(make: Make) -> None:
    """Guards against a traceback, where one column has two meanings."""
    adopted = make(guides.A)
    table = adopted.settings.table
    table = {**table, "columns": {**table["columns"], "aggregate_id": "id"}}
    words = "column id of public.outbox is id and aggregate_id: map a column aggregate_id"
    assert words in adopted.refuse("adopt", "prepare", OUTBOX_TABLE=json.dumps(table))[1]


def test_the_schema_of_the_table(make: Make) -> None:
    """Guards against two tables of one name."""
    adopted = make(guides.A)
    code, said = adopted.refuse("adopt", "prepare", OUTBOX_SCHEMA="public")
    assert (code, "set OUTBOX_SCHEMA to a schema of its own" in said) == (2, True)


def test_no_file_and_no_table(make: Make) -> None:
    """Guards against a trace in place of a line."""
    adopted = make(guides.A)
    assert "OUTBOX_TABLE is not set" in adopted.refuse("adopt", "plan", OUTBOX_TABLE="")[1]
    with adopted.connect() as connection:
        connection.execute("ALTER TABLE outbox RENAME TO elsewhere; CREATE VIEW outbox AS SELECT 1 AS id")
    assert "is not a table" in adopted.refuse("adopt", "plan")[1]
    with adopted.connect() as connection:
        connection.execute("DROP VIEW outbox")
    assert "does not exist" in adopted.refuse("adopt", "prepare")[1]


@pytest.mark.extended
@pytest.mark.parametrize("schema", ["box", "My-Box"])
def test_the_order_of_the_steps(make: Make, schema: str) -> None:
    """Guards against a step that is taken before the one it needs."""
    adopted = Adopted(guides.A, make(guides.A).table.with_(db_schema=schema))
    for step in ("switch", "drain", "back", "finish"):
        assert "is not prepared: run `outbox adopt plan`" in adopted.refuse("adopt", step)[1]
    adopted.run("adopt", "prepare")
    assert "run `outbox adopt switch` first" in adopted.refuse("adopt", "drain")[1]
    assert adopted.run("adopt", "back") == "nothing left to undo\n"
    adopted.write((KEY, 0))
    assert "'nan' is not a number of seconds" in adopted.refuse("adopt", "switch", "--wait-seconds", "nan")[1]
    adopted.run("adopt", "switch")
    for step in ("plan", "switch", "drain"):
        assert f"set OUTBOX_SCHEMA={schema}" in adopted.refuse("adopt", step, OUTBOX_SCHEMA="other")[1]
    assert "run `outbox adopt drain` first" in adopted.refuse("adopt", "back")[1]
    assert "run `outbox adopt drain` first" in adopted.refuse("adopt", "finish")[1]


@pytest.mark.extended
def test_a_way_back_that_is_continued(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a command that completes the step, and says that nothing was left."""
    adopted = make(guides.D)
    adopted.run("adopt", "prepare")
    adopted.switch()

    def killed(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "_left", killed)
        with pytest.raises(KeyboardInterrupt):
            adopted.back()
    assert adopted.state() == "returning"
    assert adopted.run("adopt", "back") == "the table has its name again; its relay may run\n"
    assert adopted.run("adopt", "back") == "nothing left to undo\n"


@pytest.mark.extended
def test_a_relay_waits_for_the_old_rows(make: Make) -> None:
    """Guards G2: the database refuses the shard, whichever role starts the relay."""
    adopted = make(guides.A)
    adopted.run("adopt", "prepare")
    adopted.write((KEY, 0))
    adopted.switch()
    adopted.write((KEY, 1))
    done = adopted.table.outbox.outbox("relay", "--until-empty", **adopted.environment | {"OUTBOX_TABLE": ""})
    assert (done.returncode, "run `outbox adopt drain`" in done.stderr) == (1, True)
    status = adopted.table.outbox.outbox("status", **adopted.environment | {"OUTBOX_TABLE": ""})
    assert "relays wait for the remaining rows of public.outbox: run `outbox adopt drain`" in status.stdout
    # The relay of the table finds it under its new name.
    assert "table public.outbox_adopted" in adopted.run("status")
    adopted.relay(table=True)
    adopted.drain()
    adopted.relay()
    assert adopted.numbers() == {KEY: [0, 1]}


def test_the_configuration_of_before(make: Make) -> None:
    """Guards G8: a relay and a status by [table] that are green while events wait in the outbox."""
    adopted = make(guides.A)
    adopted.run("adopt", "prepare")
    adopted.write((KEY, 0))
    adopted.switch()
    stop = threading.Event()
    # A relay by [table] publishes the rest, and ends once the table is drained.
    words = "was adopted by the append-only outbox in schema box"
    with ThreadPoolExecutor(1) as pool:
        relay = pool.submit(service.relay, adopted.table.with_(lease_seconds=1).settings, stop=stop)
        try:
            wait_until(lambda: adopted.numbers() == {KEY: [0]})
            assert "run `outbox adopt drain`" in adopted.refuse("status", "--check")[1]
            adopted.drain()
            wait_until(relay.done)
        finally:
            stop.set()
        with pytest.raises(SetupError, match=words):
            relay.result()
    adopted.write((KEY, 1))
    for schema in ("box", "public"):
        for command in (("relay",), ("status", "--check"), ("dead-letters", "list")):
            done = adopted.table.outbox.outbox(*command, **adopted.environment | {"OUTBOX_SCHEMA": schema})
            if command[0] == "dead-letters":
                assert (done.returncode, done.stdout) == (0, "none\n")
            else:
                assert (done.returncode, words in done.stderr) == (2, True), (command, done)
                assert "which only `outbox adopt` needs, and set OUTBOX_SCHEMA=box" in done.stderr
        checked = adopted.table.outbox.outbox(
            "table", "check", **adopted.environment | {"OUTBOX_SCHEMA": schema}
        )
        assert (checked.returncode, words in checked.stdout) == (1, True)
    assert "set OUTBOX_SCHEMA=box" in adopted.refuse("adopt", "drain", OUTBOX_SCHEMA="public")[1]
    adopted.back()
    adopted.write((KEY, 2))
    adopted.relay(table=True)
    assert adopted.numbers() == {KEY: [0, 1, 2]}
    assert "table public.outbox" in adopted.run("status", "--check")


@pytest.mark.extended
def test_relays_must_be_stopped(make: Make) -> None:
    """Guards against a relay that publishes on one side while names change."""
    adopted = make(guides.A)
    adopted.run("adopt", "prepare")
    with adopted.table.relayed():
        code, said = adopted.refuse("adopt", "switch")
    assert (code, "a relay of public.outbox is running" in said) == (1, True)
    with adopted.table.relayed(table={}):
        code, said = adopted.refuse("adopt", "switch")
    assert (code, "a relay has shard 0 of the append-only outbox" in said) == (1, True)
    adopted.run("adopt", "switch")


@pytest.mark.extended
def test_a_transaction_that_holds_the_table(make: Make) -> None:
    """Guards G7: the command gives way, and changes nothing."""
    adopted = make(guides.A)
    adopted.run("adopt", "prepare")
    with adopted.connect_to_write() as connection:
        connection.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")
        code, said = adopted.refuse("adopt", "switch", "--wait-seconds", "0.5")
        assert (code, "nothing was changed" in said) == (1, True)
        connection.rollback()
    assert adopted.state() == "prepared"
    adopted.run("adopt", "switch")


@pytest.mark.extended
def test_a_role_without_rights(make: Make) -> None:
    """Guards against a half of the work done."""
    adopted = make(guides.A)
    role, stranger = (f"other_{uuid.uuid4().hex[:8]}" for _ in range(2))
    with adopted.connect() as connection:
        connection.execute(f"CREATE ROLE {role}; ALTER TABLE outbox OWNER TO {role}".encode())
        connection.execute(f"CREATE ROLE {stranger} LOGIN PASSWORD 'x'".encode())
        try:
            dsn = make_conninfo(adopted.settings.dsn, user=stranger, password="x", passfile="")
            for step in ("plan", "prepare"):
                said = adopted.refuse("adopt", step, OUTBOX_DSN=dsn)[1]
                assert f"public.outbox belongs to role {role}: run the command as this role" in said
            # A superuser may act for the owner, who keeps the rights on the view.
            adopted.run("adopt", "prepare")
            said = adopted.refuse("adopt", "switch", OUTBOX_DSN=dsn)[1]
            assert "may not use schema box (OUTBOX_SCHEMA): run the command as the role that" in said
            adopted.run("adopt", "switch")
            connection.execute(f"SET ROLE {role}".encode())
            columns = "aggregate_type, aggregate_id, event_type, payload"
            insert = f"INSERT INTO outbox ({columns}) VALUES ('a', '{KEY}', 'b', '1')"
            connection.execute(insert.encode())
            connection.execute("RESET ROLE")
        finally:
            connection.execute(f"RESET ROLE; DROP OWNED BY {role} CASCADE; DROP ROLE {role}".encode())
            connection.execute(f"DROP ROLE {stranger}".encode())


def test_plan_prints_every_statement(make: Make) -> None:
    """Guards against a plan that says less than is done."""
    adopted = make(guides.C)
    adopted.write((KEY, 0))
    said = adopted.run("adopt", "plan")
    for words in (
        "LOCK TABLE",
        "RENAME TO",
        "CREATE VIEW",
        "INSTEAD OF INSERT",
        "DROP VIEW",
        "DROP TABLE",
        "50 ms",
    ):
        assert words in said
    assert re.search(r"public\.outbox_events: not prepared, (about \d+ rows, )?1 pending", said)
    adopted.run("adopt", "prepare")
    assert "public.outbox_events: prepared" in adopted.run("adopt", "plan")
