"""Roles and databases may set almost everything: nothing of ours depends on it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from outbox_pipelines.cli.main import cli
from outbox_pipelines.consumer import Event
from outbox_pipelines.consumer import migrate as migrate_consumer
from outbox_pipelines.core import session
from outbox_pipelines.database import connect, reading_dsn
from outbox_pipelines.local import Stack
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import EITHER_DELIVERY, Outbox, fresh_database, topic_prefix, wait_until
from tests.consumer.place import Place, running
from tests.days.archive import days
from tests.existing import textbook
from tests.relay.topic import NOISE, create_topic

# A connection is made, and its first statement ends, within each of these times: on a busy machine, too.
HOSTILE: Final = {
    "array_nulls": "off",
    "bytea_output": "escape",
    "client_encoding": "LATIN1",
    "DateStyle": "German, DMY",
    "default_transaction_deferrable": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "extra_float_digits": "-15",
    "idle_in_transaction_session_timeout": "20ms",
    "idle_session_timeout": "300ms",
    "IntervalStyle": "iso_8601",
    "jit": "on",
    "jit_above_cost": "0",
    "lock_timeout": "1ms",
    "plan_cache_mode": "force_generic_plan",
    "quote_all_identifiers": "on",
    "search_path": "pg_catalog",
    "standard_conforming_strings": "off",
    "statement_timeout": "100ms",
    "synchronous_commit": "off",
    "TimeZone": "Pacific/Kiritimati",
    "transaction_timeout": "500ms",
}
# What an application, whose settings they may well be, would have to change in order to work at all.
_APPLICATION: Final = {
    "client_encoding": "UTF8",
    "default_transaction_read_only": "off",
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "0",
    "search_path": "public",
    "statement_timeout": "0",
}


class Hostile:
    """An outbox in a database of such settings, and its commands."""

    def __init__(self, outbox: Outbox, directory: Path, version: int) -> None:
        self.outbox = outbox
        self.version = version
        self.environment = outbox.environment | {
            "OUTBOX_ARCHIVE": str(directory / "archive"),
            "OUTBOX_RETENTION_DAYS": "0",
            "OUTBOX_MAX_ATTEMPTS": "1",
        }

    def run(self, *arguments: str, code: int = 0, **environment: str) -> Result:
        done = CliRunner().invoke(cli, arguments, env=self.environment | environment)
        assert done.exit_code == code, (arguments, done.output, done.exc_info)
        return done

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """As an application."""
        return psycopg.connect(self.application, autocommit=autocommit)

    @property
    def application(self) -> str:
        """An application's connection string."""
        given = _APPLICATION | ({"transaction_timeout": "0"} if self.version >= 170000 else {})
        options = " ".join(f"-c {name}={value}" for name, value in given.items())
        return psycopg.conninfo.make_conninfo(self.outbox.settings.dsn, options=options)


@pytest.fixture
def hostile(stack: Stack, tmp_path: Path) -> Iterator[Hostile]:
    with fresh_database(stack.dsn) as dsn:
        with psycopg.connect(dsn, autocommit=True) as admin:
            ((version,),) = admin.execute("SELECT current_setting('server_version_num')::int")
            database = sql.Identifier(admin.info.dbname)
            for number, (name, value) in enumerate(HOSTILE.items()):
                if name == "transaction_timeout" and version < 170000:
                    continue
                # Both ways; those of a role in a database win over all others.
                how = (
                    "ALTER ROLE postgres IN DATABASE {} SET {} = {}"
                    if number % 2
                    else "ALTER DATABASE {} SET {} = {}"
                )
                admin.execute(sql.SQL(how).format(database, sql.Identifier(name.lower()), sql.Literal(value)))
        topic = f"{topic_prefix()}-{{aggregate_type}}-events"
        settings = load_settings(dsn=dsn, kafka=stack.kafka, topic=topic, lease_seconds=10.0)
        yield Hostile(Outbox(settings), tmp_path, version)


def test_the_arrow_driver_connects_without_timeouts(hostile: Hostile) -> None:
    """Guards against an export that a short timeout ends while the driver connects, and reads the types."""
    given = psycopg.conninfo.conninfo_to_dict(reading_dsn(hostile.outbox.settings.require_dsn()))
    options = str(given["options"]).split("-c ")[1:]
    timeouts = {
        "idle_session_timeout=0",
        "statement_timeout=0",
        *({"transaction_timeout=0"} if hostile.version >= 170000 else ()),
    }
    assert {option.strip() for option in options} >= {"quote_all_identifiers=off", *timeouts}


# As SHOW prints them. Of every session, also one that runs a handler's statements; and of our own.
_SHARED: Final = {
    "array_nulls": "on",
    "bytea_output": "hex",
    "DateStyle": "ISO, YMD",
    "default_transaction_deferrable": "off",
    "default_transaction_read_only": "off",
    "extra_float_digits": "1",
    "idle_session_timeout": "0",
    "IntervalStyle": "postgres",
    "quote_all_identifiers": "off",
    "standard_conforming_strings": "on",
}
_OWN: Final = _SHARED | {
    "client_connection_check_interval": "2s",
    "client_encoding": "UTF8",
    "default_transaction_isolation": "read committed",
    "idle_in_transaction_session_timeout": "0",
    "jit": "off",
    "lock_timeout": "0",
    "plan_cache_mode": "auto",
    "row_security": "off",
    "search_path": "public, pg_temp",
    "statement_timeout": "0",
    "synchronous_commit": "on",
    "TimeZone": "UTC",
}
# Of the connection, as the driver knows them.
_CONNECTION: Final = {
    "application_name": "x" * 63,
    "connect_timeout": "10",
    "keepalives_count": "3",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "target_session_attrs": "primary",
    # Of the lease.
    "tcp_user_timeout": "10000",
}


def _shown(connection: psycopg.Connection[Any], expected: dict[str, str]) -> dict[str, str]:
    query = "SELECT name, current_setting(name) FROM unnest(%s::text[]) name"
    return dict(connection.execute(query, [list(expected)]).fetchall())


def test_a_session_has_them(hostile: Hostile) -> None:
    """Guards against a setting that is lost, and that no statement shows for a long time."""
    settings = hostile.outbox.settings
    newer = {"transaction_timeout": "0"} if hostile.version >= 170000 else {}
    with connect(settings, name="x" * 99) as connection:
        expected = _OWN | newer
        assert _shown(connection, expected) == expected
        given = connection.info.get_parameters()
        assert {name: given.get(name) for name in _CONNECTION} == _CONNECTION
        assert connection.autocommit
    own = psycopg.conninfo.conninfo_to_dict(reading_dsn(settings.require_dsn()))
    reading = _CONNECTION | {"tcp_user_timeout": "30000"}
    names = _CONNECTION.keys() - {"application_name", "connect_timeout"}
    assert {name: str(own.get(name)) for name in names} == {name: reading[name] for name in names}
    with psycopg.connect(settings.require_dsn(), autocommit=True) as connection:
        connection.execute(session.pin(session.SHARED))
        assert _shown(connection, _SHARED) == _SHARED


def test_a_standby_that_is_waited_for_is_waited_for(hostile: Hostile) -> None:
    """Guards against events that are published and that a reader of a standby does not see."""
    with psycopg.connect(hostile.outbox.settings.require_dsn(), autocommit=True) as admin:
        name = sql.Identifier(admin.info.dbname)
        admin.execute("SET default_transaction_read_only = off")
        for how in ("ALTER DATABASE {}", "ALTER ROLE postgres IN DATABASE {}"):
            admin.execute(sql.SQL(how + " SET synchronous_commit = remote_apply").format(name))
    with connect(hostile.outbox.settings, name="a test") as connection:
        assert _shown(connection, {"synchronous_commit": ""}) == {"synchronous_commit": "remote_apply"}


@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_the_relay_and_its_commands(hostile: Hostile, delivery: str) -> None:
    """Guards against statements that fail, or change their meaning, by a setting of a role or a database."""
    hostile.run("migrate")
    hostile.run("migrate", "--check")
    day = days.days_ago(3)
    hostile.run("partitions", "ensure", "--since", str(day))
    with hostile.connect(autocommit=False) as connection:
        for key in ("a", "b"):
            emit(connection, "order", key, "order.placed", {"text": "€ 漢 \\ ' \x01"}, correlation_id="\\x41")
        emit(connection, "order", "a", "order.placed", {"n": 0.1}, idempotency_key="once")
    with hostile.connect(autocommit=False) as connection:
        connection.execute("SET LOCAL outbox.backfill = on")
        for n in range(3):
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
                "VALUES ('order', %s, 'order.placed', '{\"n\": 1.10}', %s)",
                [str(n), days.at(day, n)],
            )
    create_topic(hostile.outbox, **{"max.message.bytes": "2000"})
    with hostile.connect(autocommit=False) as connection:
        emit(connection, "order", "large", "order.placed", NOISE)
    hostile.run("relay", "--until-empty", code=1, OUTBOX_DELIVERY=delivery)
    messages = hostile.outbox.messages()
    assert len(messages) == 6
    assert json.loads(messages[0].value or "") is not None
    assert {json.loads(m.value or "").get("text") for m in messages} >= {"€ 漢 \\ ' \x01"}
    status = json.loads(hostile.run("status", "--json").output)
    assert status["dead_letters"] == 1
    assert status["shards"][0]["backlog"] == 0
    (letter,) = json.loads(hostile.run("dead-letters", "list", "--json").output)["rows"]
    hostile.run("dead-letters", "replay", "--all", "--reason", "because", "--yes")
    hostile.run("relay", "--until-empty", code=1, OUTBOX_DELIVERY=delivery)
    hostile.run("dead-letters", "discard", letter["id"], "--reason", "because", "--yes")
    hostile.run("partitions", "list")
    hostile.run("partitions", "close", str(day))
    hostile.run("archive", "day", str(day))
    hostile.run("archive", "verify", str(day))
    hostile.run("reconcile", str(day))
    hostile.run("partitions", "drop", str(day))


def test_a_marked_table(hostile: Hostile) -> None:
    """Guards against the same in the relay of an existing table."""
    with hostile.connect() as connection:
        connection.execute(textbook.PUBLISHED_AT)
        for n in range(3):
            textbook.insert(connection, "a", {"n": n, "text": "€"})
    table = json.dumps(tomllib.loads(textbook.PUBLISHED_AT_MAPPING))
    hostile.run("relay", "--until-empty", OUTBOX_TABLE=table)
    hostile.run("status", OUTBOX_TABLE=table)
    assert [json.loads(m.value or "")["n"] for m in hostile.outbox.messages()] == [0, 1, 2]


def test_a_consumer(hostile: Hostile) -> None:
    """Guards against an inbox that cannot be written or read."""
    hostile.run("migrate")
    with hostile.connect(autocommit=False) as connection:
        emit(connection, "order", "a", "order.placed", {"text": "€"})
        emit(connection, "order", "b", "order.placed", {"text": "漢"})
    hostile.run("relay", "--until-empty")
    with hostile.connect() as connection:
        migrate_consumer(connection)
    # Names and timeouts are left to the role, since it is the handler's transaction as well.
    place = Place(hostile.application, hostile.outbox.settings.kafka, hostile.outbox.topic())
    consumer, texts = place.bare(), []

    def handle(event: Event, connection: psycopg.Connection[Any]) -> None:
        if event.payload["text"] == "漢" and not place.inbox().get("waiting"):
            raise ValueError("漢")
        texts.append(event.payload["text"])

    consumer.on("order.placed")(handle)
    with running(consumer):
        wait_until(
            lambda: place.inbox() == {"processed": 1} and place.processed() == 2,
            seconds=60,
            what="both events, one of them through the inbox",
        )
        # An idle connection is not ended.
        with hostile.connect(autocommit=False) as connection:
            emit(connection, "order", "c", "order.placed", {"text": "third"})
        hostile.run("relay", "--until-empty")
        wait_until(lambda: place.processed() == 3, seconds=60, what="the third")
    assert set(texts) == {"€", "漢", "third"}
