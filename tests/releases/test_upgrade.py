"""The installation of each release is upgraded to this version while it is at work, and goes on."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from outbox_pipelines.consumer import Consumer, migrate
from outbox_pipelines.core import scripts
from outbox_pipelines.database import schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import Stack
from outbox_pipelines.reconciliation.day_events import bounds
from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings, make_settings
from outbox_pipelines.subject_keys import ERASED, SubjectKeys, erasures
from tests.conftest import Lasting, Outbox, fresh_database, session, wait_until
from tests.existing import textbook
from tests.reconciliation.place import Place
from tests.relay.threads import relays
from tests.relay.topic import create_topic
from tests.releases import dump
from tests.releases.conftest import restored
from tests.releases.installation import MASTER, SOURCE
from tests.schema.servers import running_server

pytestmark = pytest.mark.slow

# What an upgrade has to do even if there is only one version, by the strongest lock.
_LATER: Final = """\
-- Locks: outbox ACCESS EXCLUSIVE
ALTER TABLE outbox ADD COLUMN more int DEFAULT 1;
CREATE FUNCTION outbox_more() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
SELECT outbox_protect_functions();
INSERT INTO outbox_migrations (name) VALUES ('9999_more')"""
_AGAIN: Final = "if sql/ was edited before the version's release, run `make release-dump`"
_ASIDE: Final = r"^(SET |--(?! Name)|\\|GRANT .* TO role_).*\n"
_EMIT: Final = "SELECT id FROM outbox_emit('order', %s, 'order.placed', '{\"n\": 1}')"


@contextmanager
def _writing(outbox: Outbox) -> Iterator[list[str]]:
    """Two applications of that release, by SQL alone; the ids of what they have committed."""
    written: list[str] = []
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(name: int) -> None:
        try:
            with outbox.connect() as connection:
                while not stop.is_set():
                    [(made,)] = connection.execute(_EMIT, [str(name)]).fetchall()
                    written.append(str(made))
                    stop.wait(0.005)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
    for each in threads:
        each.start()
    try:
        yield written
    finally:
        stop.set()
        for each in threads:
            each.join(600)
    assert failures == []


def migrate_all(outbox: Outbox) -> list[str]:
    """The outbox, the tables of consumers, and the key store; what was applied to the outbox."""
    try:
        applied = schema.migrate(outbox.settings)
    except SetupError as error:
        pytest.fail(f"{error}; {_AGAIN}", pytrace=False)
    with outbox.connect() as connection:
        migrate(connection)
    erasures.migrate(make_settings(keys_dsn=outbox.settings.dsn, master_key=MASTER))
    return applied


def _objects(dsn: str) -> set[str]:
    """What `pg_dump` prints of each object of ours, with its rights; days and roles aside."""
    text = re.sub(_ASIDE, "", dump.dumped(dsn, "--schema-only"), flags=re.MULTILINE)
    # Of servers before 18, and those from then on.
    text = text.replace("public.outbox_uuidv7()", "uuidv7()")
    found = {re.sub(r"\s+", " ", each).strip() for each in text.split("-- Name: ")[1:]}
    # A day, what the textbook's table has, and what had rights of roles alone.
    other = re.compile(r"outbox_\d{8}|^events(_seq_\w+)?\b|Owner: -$")
    return {each for each in found if not other.search(each)}


def _require_same(upgraded: Outbox, server: str) -> None:
    """A new installation on the server has the same objects."""
    with fresh_database(server) as dsn:
        migrate_all(Outbox(load_settings(dsn=dsn).model_copy(update={"partitions_ahead": 2})))
        assert _objects(upgraded.settings.dsn) ^ _objects(dsn) == set(), _AGAIN


def test_an_upgrade_while_writers_write(
    installed: Outbox, stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against an upgrade that fails, loses events, stops an older relay, or makes another schema."""
    applied = {name for (name,) in installed.rows("SELECT name FROM outbox_migrations")}
    is_older = any(file.stem not in applied for file in scripts.files())
    (tmp_path / "9999_more.sql").write_text(_LATER)
    every = [*scripts.files(), tmp_path / "9999_more.sql"]
    monkeypatch.setattr(schema, "files", lambda: every)
    # This version's relay runs with its own schema or a later one only: as an older relay, it is the newest.
    with nullcontext() if is_older else relays(installed, 2), _writing(installed) as written:
        wait_until(lambda: len(written) > 20, what="events before the upgrade")
        assert migrate_all(installed)[-1] == "9999_more"
        before = len(written)
        wait_until(lambda: len(written) > before + 20, what="events after the upgrade")
    _require_same(installed, stack.dsn)
    for _ in range(2):
        service.relay(installed.settings, until_empty=True)
    arrived = [message.headers["id"] for message in installed.messages()]
    assert set(written) <= set(arrived)
    assert len(set(arrived)) == len(arrived)


@pytest.mark.extended
def test_another_server(
    release: str, stack: Stack, lasting: Lasting, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Guards against a dump, or an upgrade, that only the PostgreSQL which made it understands."""
    server = running_server("machine", lasting, tmp_path_factory)
    with restored(release, stack, tmp_path, server.dsn) as installed:
        migrate_all(installed)
        _require_same(installed, server.dsn)
        installed.write("7")
        service.relay(installed.settings, until_empty=True)
        assert {message.key for message in installed.messages()} >= {"unpublished", "7"}


@pytest.mark.extended
def test_an_installation_goes_on(installed: Outbox, tmp_path: Path) -> None:
    """Guards against something of an older version that a newer one cannot read, finish or prove."""
    # Messages of past days stay until they are compared.
    create_topic(installed, 1, **{"retention.ms": "-1"})
    migrate_all(installed)
    session(installed.settings.dsn).execute(
        "UPDATE outbox_parked SET next_attempt_at = NULL WHERE state = 'retrying'"
    )
    _outbox_goes_on(installed)
    _reconciliation_goes_on(installed, tmp_path)
    _archive_goes_on(installed)
    _consumer_goes_on(installed)
    keys = SubjectKeys(installed.settings.dsn, master_key=MASTER)
    moved = "SELECT payload FROM outbox WHERE event_type = 'customer.moved' ORDER BY seq"
    assert [keys.decrypted(payload)["email"] for (payload,) in installed.rows(moved)] == [
        "ann@example.com",
        ERASED,
    ]
    keys.close()
    table = textbook.Table(installed).with_(table=tomllib.loads(textbook.PUBLISHED_AT_MAPPING))
    assert len(table.pending()) == 1
    table.drain()
    assert table.pending() == []


def _outbox_goes_on(installed: Outbox) -> None:
    """What waited is published; a dead letter can be replayed; what was discarded stays."""
    done = installed.outbox("dead-letters", "replay", "--all", "--reason", "r", "--yes")
    assert done.returncode == 0, done.stderr
    for _ in range(2):
        service.relay(installed.settings, until_empty=True)
    arrived = {message.key for message in installed.messages()}
    assert arrived >= {"dead", "replayed", "waiting", "due", "unpublished"}
    assert "discarded" not in arrived
    left = "SELECT count(*) FILTER (WHERE state <> 'discarded'), count(*) FROM outbox_parked"
    assert installed.rows(left) == [(0, 1)]
    assert installed.rows("SELECT aggregate_id FROM outbox_delayed") == [("far",)] * 2


def _reconciliation_goes_on(installed: Outbox, tmp_path: Path) -> None:
    """Each past day, in the archive or the table, is what the topic and the consumer's records have of it.

    Reconciliation leaves nothing in a database: it reads what the outbox and consumers have recorded.
    """
    place = Place(installed, tmp_path)
    place.name()
    days = [
        day for (day,) in installed.rows("SELECT day FROM outbox_days WHERE state <> 'open' ORDER BY day")
    ]
    handled = installed.rows("SELECT event_id FROM processed_events WHERE content IS NULL")
    for day in days:
        start, end = bounds(day)
        # A version 7 uuid begins with its time.
        of_day = [str(event_id) for (event_id,) in handled if start <= event_id.int >> 80 < end]
        place.send(*of_day, at_ms=start + 5000)
    place.commit(*place.messages())
    for day in days:
        given = {
            "OUTBOX_ARCHIVE": installed.settings.archive,
            "OUTBOX_CONSUMERS": json.dumps(place.consumers),
        }
        done = installed.outbox("reconcile", str(day), **given)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[1:] == [
            "topics: 3 compared, all present",
            "billing: 3 compared, all present",
        ]


def _archive_goes_on(installed: Outbox) -> None:
    """Its days are proven, also the one whose rows are gone, and the next one is added."""
    environment = {"OUTBOX_ARCHIVE": installed.settings.archive}
    days = installed.rows("SELECT state, day::text FROM outbox_days WHERE state <> 'open' ORDER BY day")
    assert [state for state, _ in days] == ["dropped", "archived", "closed"]
    [(_, dropped), (_, archived), (_, closed)] = days
    for command in (("verify", dropped), ("verify", archived), ("day", closed), ("verify", closed)):
        done = installed.outbox("archive", *command, **environment)
        assert done.returncode == 0, done.stderr
    for day in (archived, closed):
        done = installed.outbox("partitions", "drop", day, **environment)
        assert done.returncode == 0, done.stderr
    asked = "SELECT count(*) AS n, count(DISTINCT id) AS ids, min(correlation_id) AS c FROM events"
    done = installed.outbox("archive", "query", "--json", asked, **environment)
    assert json.loads(done.stdout) == [{"n": 9, "ids": 9, "c": "c-1"}], done.stderr


def _consumer_goes_on(installed: Outbox) -> None:
    """Its inbox is handled, with the dead letter that is replayed; nothing is handled again."""
    consumer = Consumer(
        source=SOURCE,
        topics=["none"],
        kafka={"bootstrap.servers": installed.settings.kafka},
        dsn=installed.settings.dsn,
    )
    seen: list[str] = []

    @consumer.on_other
    def handle(event: Any, connection: psycopg.Connection[Any]) -> None:
        seen.append(event.type)

    given = {"OUTBOX_CONSUMER_DSN": installed.settings.dsn}
    done = installed.outbox("consumer", "dead-letters", "replay", "--all", "--reason", "r", "--yes", **given)
    assert done.returncode == 0, done.stderr
    session(installed.settings.dsn).execute("UPDATE inbox SET next_attempt_at = now()")
    consumer.drain(until_empty=True)
    assert sorted(seen) == ["order.failing", "order.failing", "order.paused"]
