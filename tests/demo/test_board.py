"""The board equals the tables, or is found to differ."""

from __future__ import annotations

from typing import Any

import pytest

from examples.airline import board
from examples.airline.desks import Desks
from examples.airline.flights import operations
from examples.airline.place import topics
from examples.airline.projection import differences, handled
from outbox_pipelines.consumer import Counts, Event, migrate
from outbox_pipelines.database import connect
from outbox_pipelines.relay.service import relay
from outbox_pipelines.settings import Settings
from tests.conftest import wait_until
from tests.consumer.place import Place, running

DEPARTED = "SELECT count(departed_at) FROM flights"


@pytest.fixture
def published(airline: Settings) -> Settings:
    """An airline whose events are in Kafka, with the board's tables, empty."""
    with connect(airline, name="test") as connection:
        migrate(connection)
        connection.execute(board.TABLES)
    desks = Desks(airline, operations(100), seed=1)
    desks.start()
    wait_until(lambda: not desks.working(), seconds=60, what="the end of the stream")
    relay(airline, until_empty=True)
    return airline


def consume(settings: Settings, group: str = "board") -> Counts:
    """All there is, as a group that begins."""
    there = Place(settings.dsn, settings.kafka, topics(settings)[0])
    with running(board.consumer(settings, **{"group.id": f"{there.topic}-{group}"})) as run:
        wait_until(lambda: there.uncommitted(group) == 0, what="the end of the topic")
        return run.end()


def compared(settings: Settings) -> list[str]:
    with connect(settings, name="test") as connection:
        return differences(connection)


def test_it_equals_the_tables_though_all_comes_twice(published: Settings) -> None:
    with connect(published, name="test") as connection:
        [(departed,)] = connection.execute(DEPARTED)
        assert consume(published).handled == departed > 50
        assert differences(connection) == []
        assert consume(published, "again").duplicates == departed == handled(connection)
        assert differences(connection) == []


def test_events_handled_twice_are_found(published: Settings) -> None:
    """Guards against a comparison that a consumer passes whose records are lost."""
    consume(published)
    assert compared(published) == []
    with connect(published, name="test") as connection:
        connection.execute("TRUNCATE processed_events, inbox")
    consume(published, "again")
    found = compared(published)
    assert found[0].startswith(
        "carrier AA: the board says 34 departures, -20 minutes late, the tables say 17 "
    )
    assert {line.split()[0] for line in found} == {"carrier"}


def test_an_event_passed_over_is_found(published: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a comparison of what is on the board alone: it lacks this aircraft."""
    departed = board.departed

    def passes_over(events: list[Event], connection: Any) -> None:
        departed([event for event in events if event.payload["flight"] != 1], connection)

    monkeypatch.setattr(board, "departed", passes_over)
    consume(published)
    assert [line.partition(":")[0] for line in compared(published)] == ["carrier UA", "aircraft N14228"]
