"""What a fleet relays besides an outbox in a database of its own, and a server that is frozen."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.database import schema
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import Stack, postgres
from outbox_pipelines.local.server import Server
from outbox_pipelines.relay import service
from outbox_pipelines.relay.fleet.standby import Standby
from outbox_pipelines.relay.fleet.watch import FleetWatch
from outbox_pipelines.relay.fleet.watcher import DatabaseWatch
from outbox_pipelines.relay.lease import resharding
from outbox_pipelines.relay.lease.owner_session import beating
from outbox_pipelines.relay.lease.shard import Shard
from outbox_pipelines.relay.run import Totals
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, fresh_database, topic_prefix, wait_until
from tests.existing import textbook
from tests.fleet.conftest import fleet
from tests.relay.threads import owners


def _wait_for(outbox: Outbox, keys: set[str]) -> None:
    wait_until(lambda: {message.key for message in outbox.messages()} == keys, what=f"{keys} in Kafka")


def test_existing_tables(outboxes: list[Outbox], stack: Stack, tmp_path: Path) -> None:
    """Guards against a marked table that a fleet does not relay, or that no other process takes over."""
    topic = f"{topic_prefix()}-{{aggregate_type}}-events"
    shape = textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING
    with fresh_database(stack.dsn) as dsn:
        table = textbook.make(dsn, stack.kafka, topic, *shape).with_(name="legacy")
        both = [outboxes[0], table.outbox]
        with fleet(both, "two") as later:
            with fleet(both, "one") as first:
                outboxes[0].write("a")
                table.write(("a", {"n": 1}))
                for outbox in both:
                    _wait_for(outbox, {"a"})
            outboxes[0].write("b")
            table.write(("b", {"n": 2}))
            for outbox in both:
                _wait_for(outbox, {"a", "b"})
        assert first.events + later.events == 4
        assert table.pending() == []


def test_a_missing_table_is_named(outboxes: list[Outbox], tmp_path: Path) -> None:
    """Guards against a process that stands by for the outbox beside a table that is not there."""
    given = outboxes[0].settings
    shape = textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING
    table = textbook.make(given.dsn.reveal(), given.kafka, given.topic, *shape)
    with table.connect() as connection:
        connection.execute("ALTER TABLE events RENAME TO elsewhere")
    with pytest.raises(SetupError, match=r"table public.events does not exist \(OUTBOX_TABLE\)"):
        Standby(table.outbox.settings)


def test_a_table_that_was_renamed_has_its_lock(outboxes: list[Outbox], tmp_path: Path) -> None:
    """Guards against a fleet that looks at the view which `outbox adopt` puts in the place of the table."""
    given = outboxes[0].settings
    shape = textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING
    table = textbook.make(given.dsn.reveal(), given.kafka, given.topic, *shape)
    with closing(Standby(table.outbox.settings)) as standby:
        before = standby.tables
    with table.connect() as connection:
        connection.execute("ALTER TABLE events RENAME TO events_kept")
        connection.execute("CREATE VIEW events AS SELECT * FROM events_kept")
        connection.execute(
            "CREATE FUNCTION insert_event() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
            "CREATE TRIGGER adopted_insert INSTEAD OF INSERT ON events "
            "FOR EACH ROW EXECUTE FUNCTION insert_event()"
        )
        connection.execute(
            "INSERT INTO outbox_adopted (relation, schema, name, kept_as, state) "
            "VALUES ('events_kept'::regclass, 'public', 'events', 'events_kept', 'draining')"
        )
    with closing(Standby(table.outbox.settings)) as standby:
        assert standby.tables == before


def test_a_relay_that_ends_again_and_again_pauses_longer(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a restart each second for ever, each with connections and lines in the log."""
    times: list[tuple[float, float]] = []
    relay, looks = service.relay, Standby.looks

    def late(self: Standby, shards: set[int]) -> Any:
        # Between the moment at which a relay is known to be at work, and the look, it fails.
        relays = [one for one in threading.enumerate() if one.name == "outbox-legacy"]
        wait_until(lambda: len(times) >= 4 or not any(one.is_alive() for one in relays))
        return looks(self, shards)

    monkeypatch.setattr(Standby, "looks", late)

    def timed(*given: Any, **more: Any) -> Totals:
        began = time.monotonic()
        try:
            return relay(*given, **more)
        # Not of a relay that finds the shard owned: its predecessor's session may be there for a moment.
        except SetupError:
            times.append((began, time.monotonic()))
            raise

    monkeypatch.setattr(service, "relay", timed)
    topic = f"{topic_prefix()}-{{aggregate_type}}-events"
    shape = textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING
    with fresh_database(stack.dsn) as dsn:
        table = textbook.make(dsn, stack.kafka, topic, *shape).with_(name="legacy")
        with table.connect() as connection:
            connection.execute("ALTER TABLE events ADD CHECK (published_at IS NULL)")
        table.write(("a", {"n": 1}))
        with fleet([table.outbox]):
            wait_until(lambda: len(times) >= 4, what="four tries")
            with table.connect() as connection:
                connection.execute("ALTER TABLE events DROP CONSTRAINT events_published_at_check")
            _wait_for(table.outbox, {"a"})
    # At least half of 4 s, and of 1 s, plus what a start takes.
    assert times[3][0] - times[2][1] >= 2.0
    assert len(table.messages()) == 1


def test_a_shard_that_fails_beside_one_that_is_relayed_elsewhere(
    outboxes: list[Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a process that never relays again: it looked at the other shard at that moment."""
    outbox = outboxes[0]
    with fleet([outbox]):
        wait_until(lambda: len(owners(outbox)) == 1, what="the shard to be relayed")
        assert resharding.change(outbox.settings, 2)
    failed: list[int] = []
    relay = service.relay

    def failing(settings: Any, **more: Any) -> Totals:
        if not failed:
            failed.append(more["shard"])
            # A process none of whose outboxes was ever relayed ends.
            more["on_take"](more["shard"])
            raise SetupError("for a while")
        return relay(settings, **more)

    monkeypatch.setattr(service, "relay", failing)
    elsewhere = Shard(outbox.settings, 1, "elsewhere")
    assert elsewhere.try_take()
    with ExitStack() as owning:
        owning.callback(elsewhere.close)
        owning.enter_context(beating(elsewhere.beat, outbox.settings.lease_seconds / 5))
        with fleet([outbox], "one"):
            wait_until(lambda: "one" in owners(outbox), what="the shard to be relayed again")
            assert failed == [0]


def test_an_outbox_with_several_shards(outboxes: list[Outbox]) -> None:
    """Guards against shards that a fleet does not notice, or does not divide among processes."""
    outbox, keys = outboxes[0], {str(n) for n in range(12)}
    with fleet([outbox], "one"):
        wait_until(lambda: owners(outbox) == ["one"], what="the shard to be relayed")
        assert resharding.change(outbox.settings, 3)
        wait_until(lambda: owners(outbox) == ["one"] * 3, what="three shards to be relayed")
        with fleet([outbox], "two"):
            wait_until(lambda: {*owners(outbox)} == {"one", "two"}, what="a division")
            outbox.write(*keys)
            _wait_for(outbox, keys)
    assert len(outbox.messages()) == len(keys)


def test_schemas_of_one_database_share_a_question(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a question of its own for each of a hundred tenants."""
    asked: list[list[FleetWatch]] = []
    ask = DatabaseWatch._ask

    def asking(self: DatabaseWatch, watches: list[FleetWatch]) -> None:
        asked.append(list(watches))
        ask(self, watches)

    monkeypatch.setattr(DatabaseWatch, "_ask", asking)
    with fresh_database(stack.dsn) as dsn:
        tenants = []
        for name in ("one", "two", "three"):
            topic = f"{topic_prefix()}-{{aggregate_type}}-events"
            tenants.append(
                Outbox(load_settings(dsn=dsn, kafka=stack.kafka, topic=topic, name=name, db_schema=name))
            )
            schema.migrate(tenants[-1].settings)
        with fleet(tenants):
            wait_until(lambda: len(asked[-1:] and asked[-1]) == 3, what="one question about all")
            for tenant in tenants:
                with tenant.connect() as connection:
                    connection.execute(f"SET search_path = {tenant.settings.name}".encode())
                    connection.execute(
                        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
                        "VALUES ('order', %s, 'order.placed', '{}')",
                        [tenant.settings.name],
                    )
            for tenant in tenants:
                _wait_for(tenant, {tenant.settings.name})
    assert len({watch.database for watches in asked for watch in watches}) == 1


def test_a_frozen_server_delays_its_own_outbox_only(
    outboxes: list[Outbox], stack: Stack, tmp_path: Path
) -> None:
    """Guards against a fleet that waits for a server that neither answers nor refuses."""
    sound = outboxes[1:]
    with postgres.Postgres(tmp_path / "postgres", {"fsync": "off"}) as server:
        topic = f"{topic_prefix()}-{{aggregate_type}}-events"
        frozen = Outbox(load_settings(dsn=server.dsn, kafka=stack.kafka, topic=topic, name="frozen"))
        schema.migrate(frozen.settings)
        with ExitStack() as process:
            with _frozen(server):
                process.enter_context(fleet([frozen, *sound], lease_seconds=2.0))
                for outbox in sound:
                    outbox.write("a")
                    _wait_for(outbox, {"a"})
            frozen.write("a")
            _wait_for(frozen, {"a"})
            with _frozen(server):
                for outbox in sound:
                    outbox.write("b")
                    _wait_for(outbox, {"a", "b"})
            frozen.write("b")
            _wait_for(frozen, {"a", "b"})


@contextmanager
def _frozen(server: Server) -> Iterator[None]:
    """With all of its processes: the first one alone keeps only new sessions waiting."""
    main = server._process
    assert main is not None
    server.freeze()
    children = Path(f"/proc/{main.pid}/task/{main.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            os.kill(int(child), signal.SIGCONT)
        server.thaw()


def test_two_names_of_one_outbox(outboxes: list[Outbox], caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a mistake in the file that is not reported, or that fills the log."""
    one = outboxes[0]
    other = Outbox(one.settings.model_copy(update={"name": "again"}))

    def said() -> int:
        return sum("are the same tables" in message for message in caplog.messages)

    with fleet([one, other]):
        one.write("a")
        _wait_for(one, {"a"})
        wait_until(said, what="a line in the log")
        with one.connect() as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM outbox_shards")
        one.write("b")
        _wait_for(one, {"a", "b"})
    assert said() == 1
