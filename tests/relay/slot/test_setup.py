"""`outbox cdc` and `outbox cutover` as operators use them, and what prevents them."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from outbox_pipelines.database import schema
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.local import Stack
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay.read.slot.slot_cutover import read
from outbox_pipelines.relay.read.slot.slot_setup import remove, set_up, slot_name
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, end_sessions, may_log_in, wait_until
from tests.relay.slot.slots import make


def _slots(outbox: Outbox) -> list[str]:
    with outbox.connect() as connection:
        return [
            name
            for (name,) in connection.execute(
                "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
            )
        ]


def test_set_up_show_and_drop(outbox: Outbox) -> None:
    """Guards against commands that do not fit together."""
    shown = outbox.outbox("cdc", "status")
    assert (shown.returncode, shown.stdout) == (0, "source: polling (between snapshots); no slot\n")
    plan = outbox.outbox("cutover", "--to", "cdc", "--dry-run")
    assert len(plan.stdout.splitlines()) == 3
    assert _slots(outbox) == []
    done = outbox.outbox("cdc", "setup")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "relays read from it"
    (slot,) = _slots(outbox)
    again = outbox.outbox("cdc", "setup")
    assert again.stdout == "nothing to do: relays read from the slot already\n"
    shown = outbox.outbox("cdc", "status", "--json")
    found = json.loads(shown.stdout)
    assert (found["source"], found["slot"], found["reader"]) == ("cdc", slot, None)
    assert "start `outbox relay`" in found["problems"][0]
    assert shown.returncode == 1
    gone = outbox.outbox("cdc", "drop")
    assert gone.returncode == 0, gone.stderr
    assert _slots(outbox) == []
    assert outbox.outbox("cdc", "drop").stdout == "there was no slot\n"
    endless = outbox.outbox("cdc", "setup", "--wait-seconds", "nan")
    assert (endless.returncode, endless.stderr.splitlines()[-1].split(": ")[1:]) == (
        2,
        ["Invalid value for '--wait-seconds'", "'nan' is not a number of seconds"],
    )
    with outbox.connect() as connection:
        assert connection.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)


def test_interrupted_setups_leave_nothing(outbox: Outbox) -> None:
    """Guards against a slot that is forgotten, which fills the disk."""
    slot = make(outbox)
    with outbox.connect() as connection:
        # As a process leaves it that was killed between the slot and its row.
        connection.execute("UPDATE outbox_shards SET slot_snapshot = NULL")
    shown = outbox.outbox("cdc", "status")
    assert "setup was interrupted" in shown.stdout
    assert outbox.outbox("cdc", "setup").returncode == 0
    assert _slots(outbox) == [slot]
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET slot_ends = true")
    assert "run `outbox cutover --to polling` again" in outbox.outbox("cdc", "status").stdout
    assert outbox.outbox("cutover", "--to", "polling").returncode == 0
    assert _slots(outbox) == []


@pytest.mark.extended
def test_a_long_transaction_is_named_and_leaves_no_slot(outbox: Outbox) -> None:
    """Guards against a command that hangs without a word, and against what it leaves when it gives up."""
    said: list[str] = []
    with outbox.connect(autocommit=False) as slow:
        slow.execute("SELECT pg_current_xact_id()")
        # Another test may have an older one: test_slot_rows.py shows which is named.
        with pytest.raises(NotReadyError, match=r"waits for all transactions .* process \d+ "):
            set_up(outbox.settings, seconds=3, say=said.append)
        assert any(re.search(r"process \d+ ", line) for line in said)
        assert _slots(outbox) == []
        with outbox.connect() as connection:
            assert connection.execute("SELECT slot FROM outbox_shards").fetchone() == (None,)
        waiting = threading.Thread(target=make, args=(outbox,))
        waiting.start()
        slow.rollback()
    waiting.join(600)
    assert len(_slots(outbox)) == 1


@pytest.mark.extended
def test_many_rollbacks_beside_long_transactions(outbox: Outbox) -> None:
    """Guards against a busy server on which no slot is made: its snapshot has as much room as sessions."""
    stop, said = threading.Event(), list[str]()
    with outbox.connect() as connection:
        connection.execute("CREATE TABLE scratch ()")

    def write() -> None:
        with outbox.connect(autocommit=False) as writer:
            while not stop.is_set():
                for _ in range(500):
                    # A number each, which no commit names.
                    writer.execute("SAVEPOINT here")
                    writer.execute("INSERT INTO scratch DEFAULT VALUES")
                    writer.execute("ROLLBACK TO here; RELEASE here")
                writer.commit()

    def write_shortly() -> None:
        with outbox.connect() as writer:
            while not stop.is_set():
                writer.execute("SELECT pg_current_xact_id()")

    def say(line: str) -> None:
        said.append(line)
        if "rolled back" in line:
            stop.set()

    def has_tried_again() -> bool:
        set_up(outbox.settings, seconds=60, say=say)
        return stop.is_set() or not remove(outbox.settings, seconds=30, say=said.append)

    # A long one is always open.
    writers = [threading.Thread(target=each) for each in (write, write, write, write_shortly)]
    for writer in writers:
        writer.start()
    try:
        # Rarely, the long ones have all just begun.
        wait_until(has_tried_again, what="a snapshot that was too large")
    finally:
        stop.set()
        for writer in writers:
            writer.join(600)
    assert "too many transactions were rolled back while others ran: trying again" in said
    assert len(_slots(outbox)) == 1


@pytest.mark.extended
def test_a_role_without_the_right_is_told(outbox: Outbox) -> None:
    """Guards against PostgreSQL's message, which names no remedy."""
    with outbox.connect() as connection:
        role = f"relay_{connection.info.dbname}"
        connection.execute(f"CREATE ROLE {role} {may_log_in(outbox.settings.require_dsn())}".encode())
        try:
            connection.execute(f"GRANT USAGE ON SCHEMA public TO {role}".encode())
            connection.execute(f"GRANT SELECT, UPDATE ON ALL TABLES IN SCHEMA public TO {role}".encode())
            dsn = psycopg.conninfo.make_conninfo(outbox.settings.require_dsn(), user=role)
            refused = outbox.outbox("cdc", "setup", OUTBOX_DSN=dsn)
            connection.execute(f"ALTER ROLE {role} REPLICATION".encode())
            plan = outbox.outbox("cutover", "--to", "cdc", "--dry-run", OUTBOX_DSN=dsn)
            connection.execute(f"ALTER TABLE outbox OWNER TO {role}".encode())
            owner = outbox.outbox("cdc", "setup", OUTBOX_DSN=dsn)
            connection.execute("ALTER TABLE outbox OWNER TO CURRENT_USER")
            assert outbox.outbox("cdc", "setup").returncode == 0
            kept = _slots(outbox)
            dropped = outbox.outbox("cdc", "drop", OUTBOX_DSN=dsn)
            assert _slots(outbox) == kept
            assert outbox.outbox("cdc", "drop").returncode == 0
        finally:
            connection.execute("ALTER TABLE outbox OWNER TO CURRENT_USER")
            connection.execute(f"DROP OWNED BY {role}".encode())
            connection.execute(f"DROP ROLE {role}".encode())
    assert refused.returncode == 2
    assert f"run ALTER ROLE {role} REPLICATION as a superuser" in refused.stderr
    assert (plan.returncode, plan.stdout) == (2, "")
    assert f"the role {role} does not own the outbox" in plan.stderr
    assert (owner.returncode, owner.stdout) == (2, "")
    assert "run GRANT CREATE ON DATABASE" in owner.stderr
    assert (dropped.returncode, dropped.stdout) == (2, "")
    assert "only its owner may drop it: run the command as" in dropped.stderr
    assert _slots(outbox) == []


def test_several_shards_are_refused(outbox: Outbox) -> None:
    """Guards against shards of which only one is read."""
    with outbox.connect() as connection:
        connection.execute("SELECT outbox_change_shards(2, false, NULL)")
    for command in (["cdc", "setup"], ["cutover", "--to", "cdc", "--dry-run"]):
        refused = outbox.outbox(*command)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "run `outbox shards set 1` first" in refused.stderr


def test_another_slot_or_publication_of_that_name(outbox: Outbox, stack: Stack) -> None:
    """Guards against dropping what is not ours, and against a publication without the outbox's rows."""
    with outbox.connect() as connection:
        name = slot_name(outbox.settings, connection.info.dbname)
        with psycopg.connect(stack.dsn, autocommit=True) as other:
            other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
            refused = outbox.outbox("cdc", "setup")
            other.execute("SELECT pg_drop_replication_slot(%s)", [name])
        assert refused.returncode == 2
        assert "is not this outbox's (database postgres" in refused.stderr
        connection.execute(f"CREATE PUBLICATION {name} FOR TABLE outbox".encode())
    refused = outbox.outbox("cdc", "setup")
    assert refused.returncode == 2
    assert f"DROP PUBLICATION {name}" in refused.stderr.replace('"', "")
    assert _slots(outbox) == []


@pytest.mark.parametrize(
    ("foreign", "kind"),
    [
        ("SELECT pg_create_physical_replication_slot(%s)", "physical"),
        ("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", "database postgres, plugin pgoutput"),
    ],
    ids=["physical", "of another database"],
)
def test_another_slot_instead_of_the_outboxs(outbox: Outbox, stack: Stack, foreign: str, kind: str) -> None:
    """Guards against advice that is refused when it is followed, and against dropping what is not ours."""
    slot = make(outbox)
    with psycopg.connect(stack.dsn, autocommit=True) as other:
        with outbox.connect() as connection:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        other.execute(foreign.encode(), [slot])
        try:
            refusal = f"is not this outbox's ({kind}): find out what reads it, drop it"
            refused = outbox.outbox("cdc", "setup")
            assert refused.returncode == 2
            assert refusal in refused.stderr
            shown = outbox.outbox("cdc", "status").stdout
            assert f"! another slot has the name {slot}" in shown
            assert "drop it, then run `outbox cdc setup`; or run `outbox cutover --to polling`" in shown
            left = outbox.outbox("cutover", "--to", "polling")
            assert left.returncode == 0, left.stderr
            assert f"slot {slot}: left" in left.stdout
            assert outbox.outbox("cdc", "status").returncode == 0
            assert refusal in outbox.outbox("cutover", "--to", "cdc", "--dry-run").stderr
        finally:
            other.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    assert outbox.outbox("cdc", "setup").returncode == 0
    assert _slots(outbox) == [slot]


def test_a_restored_copy_makes_and_drops_no_slot(outbox: Outbox) -> None:
    """Guards against a slot that `outbox relay --rebase` forgets, and advice to drop another's."""
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET database = 1, slot = 'outbox_original_public'")
    for command in (["cdc", "setup"], ["cdc", "drop"], ["cutover", "--to", "polling"]):
        refused = outbox.outbox(*command)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "run `outbox relay --rebase`" in refused.stderr
    shown = outbox.outbox("cdc", "status")
    assert shown.returncode == 1
    assert "! position and slot are those of another database" in shown.stdout
    assert "cdc setup" not in shown.stdout
    assert _slots(outbox) == []


def test_an_existing_table_is_refused(outbox: Outbox) -> None:
    """Guards against a slot for a table whose rows are marked."""
    table = {"name": "orders_outbox", "columns": {"published_at": "sent"}}
    refused = outbox.outbox("cdc", "setup", OUTBOX_TABLE=json.dumps(table))
    assert refused.returncode == 2


def test_a_server_without_logical_decoding_is_told(tmp_path: Path, outbox: Outbox) -> None:
    """Guards against the most frequent obstacle."""
    server = Postgres(tmp_path / "postgres", {"wal_level": "replica"})
    server.start()
    try:
        assert outbox.outbox("migrate", OUTBOX_DSN=server.dsn).returncode == 0
        refused = outbox.outbox("cdc", "setup", OUTBOX_DSN=server.dsn)
    finally:
        server.stop()
    assert refused.returncode == 2
    assert "ALTER SYSTEM SET wal_level = 'logical', then restart PostgreSQL" in refused.stderr


@pytest.mark.extended
def test_a_slot_that_the_server_has_ended_is_replaced(tmp_path: Path, outbox: Outbox) -> None:
    """Guards against events that are lost with a slot, and against a slot that no command replaces."""
    limits = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    server = Postgres(tmp_path / "postgres", limits | {"shared_buffers": "16MB"})
    server.start()
    try:
        given = {"OUTBOX_DSN": server.dsn}
        assert outbox.outbox("migrate", **given).returncode == 0
        assert outbox.outbox("cdc", "setup", **given).returncode == 0
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            with connection.transaction():
                emit(connection, "order", 1, "order.placed", {"n": 0})
            for _ in range(3):
                connection.execute("SELECT pg_switch_wal()")
                connection.execute(
                    "CREATE TABLE noise AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)"
                )
                connection.execute("DROP TABLE noise")
            connection.execute("CHECKPOINT")
            with connection.transaction():
                emit(connection, "order", 1, "order.placed", {"n": 1})
        shown = outbox.outbox("cdc", "status", **given)
        assert "is lost (" in shown.stdout, shown.stdout
        assert outbox.outbox("relay", "--until-empty", **given).returncode == 0
        assert [json.loads(message.value or "")["n"] for message in outbox.messages()] == [0, 1]
        assert outbox.outbox("cdc", "setup", **given).stdout.splitlines()[-1] == "relays read from it"
        again = outbox.outbox("relay", "--until-empty", **given)
        assert again.returncode == 0
        assert len(outbox.messages()) == 2
        assert "is lost (" not in outbox.outbox("cdc", "status", **given).stdout
    finally:
        server.stop()


def test_a_database_that_was_renamed(outbox: Outbox, stack: Stack) -> None:
    """Guards against a second publication, and one that no command drops."""
    assert outbox.outbox("cdc", "setup").returncode == 0
    (slot,) = _slots(outbox)
    with outbox.connect() as connection:
        before = connection.info.dbname
    after = f"{before}_renamed"
    dsn = make_conninfo(stack.dsn, dbname=after)
    renamed = Outbox(outbox.settings.model_copy(update={"dsn": type(outbox.settings.require_dsn())(dsn)}))
    with psycopg.connect(stack.dsn, autocommit=True) as server:
        end_sessions(outbox.settings.dsn)
        server.execute(f"ALTER DATABASE {before} RENAME TO {after}".encode())
        try:
            assert "nothing to do" in renamed.outbox("cdc", "setup").stdout
            with renamed.connect() as connection:
                found = connection.execute("SELECT pubname FROM pg_publication").fetchall()
            assert found == [(slot,)]
            assert _slots(renamed) == [slot]
            dropped = renamed.outbox("cdc", "drop")
            assert dropped.returncode == 0, dropped.stderr
            with renamed.connect() as connection:
                assert connection.execute("SELECT pubname FROM pg_publication").fetchall() == []
            assert _slots(renamed) == []
        finally:
            server.execute(f"ALTER DATABASE {after} RENAME TO {before}".encode())


@pytest.mark.extended
def test_a_publication_from_before_a_renaming(outbox: Outbox, stack: Stack) -> None:
    """Guards against a publication that stays, and that nothing names, if the slot was dropped as well."""
    assert outbox.outbox("cdc", "setup").returncode == 0
    (slot,) = _slots(outbox)
    with outbox.connect() as connection:
        before = connection.info.dbname
        # Of others: another table too, other operations, another name.
        connection.execute("CREATE TABLE mine (id int PRIMARY KEY)")
        root = "publish_via_partition_root"
        connection.execute(
            f"CREATE PUBLICATION outbox_a_public FOR TABLE outbox, mine WITH ({root})".encode()
        )
        connection.execute(f"CREATE PUBLICATION outbox_b_public FOR TABLE outbox WITH ({root})".encode())
        connection.execute(
            f"CREATE PUBLICATION debezium FOR TABLE outbox WITH ({root}, publish = 'insert')".encode()
        )
    after = f"{before}_renamed"
    dsn = make_conninfo(stack.dsn, dbname=after)
    renamed = Outbox(outbox.settings.model_copy(update={"dsn": type(outbox.settings.require_dsn())(dsn)}))
    with psycopg.connect(stack.dsn, autocommit=True) as server:
        end_sessions(outbox.settings.dsn)
        server.execute(f"ALTER DATABASE {before} RENAME TO {after}".encode())
        try:
            server.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            made = renamed.outbox("cdc", "setup")
            assert made.returncode == 0, made.stderr
            assert _slots(renamed) not in ([], [slot])
            for shown in (made.stdout, renamed.outbox("cdc", "drop").stdout):
                assert [line for line in shown.splitlines() if ": left" in line] == [
                    f"publication {slot}: left, from a time when the database had another name; if nothing "
                    f'else reads it, run DROP PUBLICATION "{slot}"'
                ]
        finally:
            server.execute(f"ALTER DATABASE {after} RENAME TO {before}".encode())


def test_names_are_readable_and_unique(outbox: Outbox) -> None:
    """Guards against two outboxes that share a slot, and names that PostgreSQL refuses."""
    shop = outbox.settings.model_copy(update={"db_schema": "shop"})
    odd = outbox.settings.model_copy(update={"db_schema": "Größe " + "x" * 57})
    assert slot_name(shop, "orders") == "outbox_orders_shop"
    inner = outbox.settings.model_copy(update={"db_schema": "eu_shop"})
    assert slot_name(inner, "orders") != slot_name(shop, "orders_eu")
    names = {slot_name(odd, "orders"), slot_name(odd, "Orders"), slot_name(odd, "orders_" * 9)}
    assert len(names) == 3
    assert all(len(name) <= 63 and name.isascii() and name.islower() for name in names)


@pytest.mark.extended
@pytest.mark.slow
def test_a_standby_that_the_server_waits_for(tmp_path: Path) -> None:
    """Guards against events that wait for a standby that is down, while every command calls the slot well."""
    with Postgres(tmp_path / "postgres") as server:
        settings = load_settings(dsn=server.dsn)
        schema.migrate(settings)
        set_up(settings, seconds=30, say=print)

        def said() -> bool:
            return "slot standby of synchronized_standby_slots" in str(read(settings).problems)

        with psycopg.connect(server.dsn, autocommit=True) as admin:
            version = admin.info.server_version
            assert not said()
            admin.execute("SELECT pg_create_physical_replication_slot('standby')")
            if version >= 170000:
                admin.execute("ALTER SYSTEM SET synchronized_standby_slots = 'standby'")
                admin.execute("SELECT pg_reload_conf()")
                wait_until(said, what="the standby is named")
                admin.execute("ALTER SYSTEM RESET synchronized_standby_slots")
                admin.execute("SELECT pg_reload_conf()")
                wait_until(lambda: not said(), what="it is no longer named")


@pytest.mark.extended
@pytest.mark.slow
def test_commits_that_wait_for_a_standby(tmp_path: Path) -> None:
    """Guards against events that wait with their commits, while every command calls the slot well."""
    with Postgres(tmp_path / "postgres") as server, ThreadPoolExecutor() as threads:
        settings = load_settings(dsn=server.dsn)
        schema.migrate(settings)
        set_up(settings, seconds=30, say=print)
        with psycopg.connect(server.dsn, autocommit=True) as admin, ExitStack() as ends:
            ends.callback(admin.execute, "SELECT pg_reload_conf()")
            ends.callback(admin.execute, "ALTER SYSTEM RESET synchronous_standby_names")
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'missing'")
            admin.execute("SELECT pg_reload_conf()")
            threads.submit(Outbox(settings).write, "a")
            wait_until(
                lambda: "1 commits wait for a synchronous standby" in str(read(settings).problems),
                what="the commit that waits",
            )
