"""A relay that takes over from a program that reads a slot, such as Debezium."""

from __future__ import annotations

import math

import pytest

from outbox_pipelines.database import connect, slot_reader
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import service
from outbox_pipelines.relay.read.slot import pgoutput
from outbox_pipelines.relay.read.slot.stream import Stream
from outbox_pipelines.relay.start import start_at
from outbox_pipelines.writer import emit
from tests.conftest import Outbox, wait_until

_SLOT = "debezium"
# It stands in quotes, and has some itself.
_PUBLICATION = 'dbz "all"'


def _make(outbox: Outbox) -> str:
    """A slot and a publication as Debezium makes them: of all tables, under the names of the partitions."""
    with outbox.connect() as connection:
        slot = f"{_SLOT}_{connection.info.dbname}"
        connection.execute('CREATE PUBLICATION "dbz ""all""" FOR ALL TABLES')
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    return slot


def _confirm(outbox: Outbox, slot: str, transactions: int) -> None:
    """Reads so many transactions, and confirms them."""
    stream = Stream(connect(outbox.settings, name="debezium", replication=True), slot, _PUBLICATION)
    ends: list[int] = []

    def has_read() -> bool:
        while len(ends) < transactions and (message := stream.receive()) is not None:
            if message[0] == pgoutput.COMMIT:
                ends.append(pgoutput.end_of_commit(message))
        return len(ends) == transactions

    wait_until(has_read, what="what Debezium reads")
    # At once.
    stream._said_at = -math.inf
    stream.confirm(ends[-1])
    stream.close()
    wait_until(lambda: not _is_read(outbox, slot), what="the end of Debezium")


def _is_read(outbox: Outbox, slot: str) -> bool:
    with outbox.connect() as connection:
        query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        return connection.execute(query, [slot]).fetchone() == (True,)


def test_what_was_confirmed_is_not_published_again(outbox: Outbox) -> None:
    """Guards against a takeover that repeats or skips events: also of transactions that overlap with it."""
    outbox.write("older")
    slot = _make(outbox)
    with outbox.connect(autocommit=False) as slow, outbox.connect(autocommit=False) as open_still:
        emit(slow, "order", "slow", "order.placed", {})
        emit(open_still, "order", "open", "order.placed", {})
        outbox.write("confirmed-1")
        with outbox.connect() as connection:
            connection.execute("CREATE TABLE noise AS SELECT 1 AS n")
            connection.execute("INSERT INTO noise VALUES (2)")
        outbox.write("confirmed-2")
        # The transactions of `noise` are read as well, since the publication is of all tables.
        _confirm(outbox, slot, 4)
        slow.commit()
        outbox.write("new-1", "new-2")
        start = start_at(outbox.settings, f"slot:{slot}")
        assert start is not None
        assert start.skipped == 3
        outbox.write("after")
        open_still.commit()
    service.relay(outbox.settings, until_empty=True)
    keys = [message.key for message in outbox.messages()]
    assert sorted(keys) == ["after", "new-1", "new-2", "open", "slow"]


def test_what_is_in_the_topics_is_not_published_again(outbox: Outbox) -> None:
    """Guards against the last events of Debezium, which it published and did not confirm, published twice."""
    outbox.write("confirmed")
    slot = _make(outbox)
    outbox.write("published-1")
    outbox.write("published-2", "published-3")
    # As Debezium has left them in the topic.
    service.relay(outbox.settings, until_empty=True)
    outbox.write("new")
    with outbox.connect() as connection:
        connection.execute("UPDATE outbox_shards SET epoch = 0")
    start = start_at(outbox.settings, f"slot:{slot}")
    assert start is not None
    assert start.skipped == 4
    service.relay(outbox.settings, until_empty=True)
    keys = [message.key for message in outbox.messages()]
    assert sorted(keys) == ["confirmed", "new", "published-1", "published-2", "published-3"]


def test_what_stands_in_its_way(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a start that is taken from the wrong slot, or while Debezium still publishes."""
    monkeypatch.setattr(slot_reader, "LEAVE_SECONDS", 0.1)
    with pytest.raises(SetupError, match="has no slot 'other'"):
        start_at(outbox.settings, "slot:other")
    slot = _make(outbox)
    reader = connect(outbox.settings, name="debezium", replication=True)
    stream = Stream(reader, slot, _PUBLICATION)
    with pytest.raises(SetupError, match="stop the program that reads it first"):
        start_at(outbox.settings, f"slot:{slot}")
    stream.close()
    wait_until(lambda: not _is_read(outbox, slot), what="the end of Debezium")
    with outbox.connect() as connection:
        connection.execute('DROP PUBLICATION "dbz ""all"""')
    with pytest.raises(SetupError, match="no publication has the table outbox"):
        start_at(outbox.settings, f"slot:{slot}")
