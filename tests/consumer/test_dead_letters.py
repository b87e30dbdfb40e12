"""`outbox consumer dead-letters` and `status`: what an operator types when events were not handled."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.consumer import Event
from outbox_pipelines.consumer import consumer_sql as queries
from tests.conftest import either, wait_until
from tests.consumer.place import Place, at_work, effect, running, uuid7
from tests.schema.servers import Database

Connection = psycopg.Connection[Any]


@pytest.fixture
def operator(place: Place) -> Database:
    """Where commands are typed."""
    return Database(place.dsn, Path())


class Healed:
    """A handler that refuses all, until it is healed."""

    def __init__(self) -> None:
        self.healed = False

    def __call__(self, event: Event, connection: Connection) -> None:
        if not self.healed:
            raise ValueError(f"customer {event.aggregate_id} is unknown")
        effect(event, connection)


@pytest.fixture
def handler(place: Place) -> Iterator[Healed]:
    """Six events of three keys are dead letters."""
    place.load(6, keys=3)
    handler = Healed()
    # That all of them fail is no outage here.
    consumer = place.bare(max_attempts=1, retry_seconds=0, outage_after=0)
    consumer.on("order.placed")(handler)
    with running(consumer) as run:
        wait_until(lambda: place.inbox() == {"failed": 6}, what="dead letters")
        handler.healed = True
        yield handler
        run.end()


def test_they_are_listed_by_reason(operator: Database, handler: Healed) -> None:
    told = operator.outbox("consumer", "dead-letters", "list")
    assert told.exit_code == 0
    assert told.output.count("order.placed") == 6
    assert told.output.endswith(
        "       2 × ValueError: customer 0 is unknown\n       2 × ValueError: customer 1 is unknown\n"
        "       2 × ValueError: customer 2 is unknown\n"
    )
    found = json.loads(
        operator.outbox("consumer", "dead-letters", "list", "--aggregate-id", "1", "--json").output
    )
    assert (found["total"], {row["key"] for row in found["rows"]}) == (2, {"1"})


@pytest.mark.extended
def test_filters(operator: Database, handler: Healed) -> None:
    for options, expected in (
        (("--source", "billing"), 6),
        (("--source", "shipping"), 0),
        (("--event-type", "order.placed"), 6),
        (("--error", "customer 2"), 2),
        (("--since", "1h"), 6),
        (("--until", "1h"), 0),
        (("--aggregate-id", "1", "--error", "customer 2"), 0),
    ):
        told = operator.outbox("consumer", "dead-letters", "list", *options, "--json")
        assert json.loads(told.output)["total"] == expected, options


def test_replayed_ones_are_handled_by_the_consumer_at_work(
    place: Place, operator: Database, handler: Healed
) -> None:
    """Guards against a replay that waits for a restart, or leaves no trace of who did it."""
    command = ("consumer", "dead-letters", "replay", "--aggregate-id", "1", "--reason", "customer added")
    # On stderr is what the consumer at work may log.
    told = operator.outbox(*command, "--dry-run")
    assert (told.exit_code, told.stdout) == (0, "2 dead letters would be replayed\n")
    assert place.inbox() == {"failed": 6}
    told = operator.outbox(*command, "--yes")
    assert (told.exit_code, told.stdout) == (0, "2 dead letters replayed\n")
    wait_until(lambda: place.inbox() == {"failed": 4, "processed": 2}, what="their effects")
    assert place.rows("SELECT key, array_agg(n ORDER BY seq) FROM effects GROUP BY key") == [("1", [1, 4])]
    assert place.rows("SELECT action, reason, count(*) FROM inbox_audit GROUP BY 1, 2") == [
        ("replay", "customer added", 2)
    ]


def test_discarded_ones_are_not_handled_and_can_be_seen(
    place: Place, operator: Database, handler: Healed
) -> None:
    [message_id, *others] = [each for (each,) in place.rows("SELECT message_id::text FROM inbox")]
    command = ("consumer", "dead-letters", "discard", message_id, "--reason", "a test order", "--yes")
    assert operator.outbox(*command).stdout == "1 dead letter discarded\n"
    assert operator.outbox(*command).exit_code == 1
    assert place.inbox() == {"failed": 5, "discarded": 1}
    told = operator.outbox("consumer", "dead-letters", "list", "--discarded", "--json")
    assert [row["id"] for row in json.loads(told.stdout)["rows"]] == [message_id]
    shown = json.loads(operator.outbox("consumer", "dead-letters", "show", message_id).stdout)
    assert (shown["state"], shown["source"], shown["attempts"]) == ("discarded", "billing", 1)
    assert (shown["headers"]["id"], shown["actions"][0]["reason"]) == (message_id, "a test order")
    assert isinstance(shown["payload"]["n"], int)
    told = operator.outbox(
        "consumer", "dead-letters", "replay", "--all", "--reason", "customers added", "--json", "--yes"
    )
    assert json.loads(told.stdout) == {"action": "replay", "dry_run": False, "found": 5, "done": 5}
    wait_until(lambda: place.inbox() == {"discarded": 1, "processed": 5}, what="their effects")
    assert len(others) == place.effects() == 5


@pytest.mark.parametrize("action", either("replay", "discard"))
def test_ids_of_several_sources_need_a_source(place: Place, operator: Database, action: str) -> None:
    """Guards against a dead letter of another service that is replayed or discarded with the one meant."""
    place.send(event_id := str(uuid7()))
    for source in ("billing", "shipping"):
        consumer = place.bare(source, max_attempts=1)
        consumer.on("order.placed")(Healed())
        with running(consumer):
            wait_until(partial(lambda each: place.inbox(each) == {"failed": 1}, source), what="dead letters")
    command = ("consumer", "dead-letters", action, event_id, "--reason", "a test order")
    for option in ("--yes", "--dry-run"):
        done = operator.outbox(*command, option)
        assert done.exit_code == 2
        assert "dead letters of several sources have these ids (billing, shipping)" in done.output
        assert "--source" in done.output
    assert place.rows("SELECT count(*) FROM inbox WHERE state = 'failed'") == [(2,)]
    both = ("--all", "--source", "billing", "--reason", "x", "--dry-run")
    done = operator.outbox("consumer", "dead-letters", action, *both)
    assert (done.exit_code, done.output) == (0, f"1 dead letter would be {action}ed\n")
    done = operator.outbox(*command, "--source", "billing", "--yes")
    assert (done.exit_code, done.output) == (0, f"1 dead letter {action}ed\n")
    assert place.inbox("shipping") == {"failed": 1}
    # The other one is the only dead letter that is left with this id.
    assert operator.outbox(*command, "--yes").exit_code == 0
    assert "failed" not in place.inbox("shipping")


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (("list", "--source", "nobody"), 0, "none\n"),
        (("show", str(uuid.UUID(int=1))), 1, "is not in any inbox"),
        (("show", "x"), 2, "is not a valid UUID"),
        (("replay", "--reason", "x"), 2, "name ids, give a filter, or use --all"),
        (("discard", "--all", str(uuid.UUID(int=1)), "--reason", "x"), 2, "name ids or use --all, not both"),
        (("discard", "--all", "--source", "nobody", "--reason", "x"), 1, "0 dead letters discarded"),
        (("discard", "--all", "--reason", " ", "--yes"), 2, "the text is empty"),
        (("replay", "--all", "--reason", "x"), 1, "0 dead letters replayed"),
    ],
)
def test_wrong_input(operator: Database, command: tuple[str, ...], code: int, says: str) -> None:
    told = operator.outbox("consumer", "dead-letters", *command)
    assert told.exit_code == code, told.output
    assert says in told.output


def test_status_tells_the_backlog(place: Place, operator: Database) -> None:
    """Guards against an inbox that is not drained, without a report."""
    empty = operator.outbox("consumer", "status")
    assert empty.output == "all inboxes are empty; no dead letters\n"
    place.load(4)
    with at_work(place.consumer(), "receive"):
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
    place.rows("UPDATE inbox SET received_at = now() - interval '90 seconds' WHERE seq = 1")
    place.rows("UPDATE inbox SET state = 'failed' WHERE seq = 2")
    told = operator.outbox("consumer", "status")
    assert re.fullmatch(r"billing: 3 waiting, oldest (9|1\d)\d s; 1 dead letter\n", told.output)
    [inbox] = json.loads(operator.outbox("consumer", "status", "--json").output)["inboxes"]
    assert (inbox["source"], inbox["waiting"], inbox["dead_letters"]) == ("billing", 3, 1)
    assert inbox["paused"] == []
    paused = (
        "UPDATE inbox SET paused_since = now() - interval '300 s', last_error = %s, "
        "next_attempt_at = now() + make_interval(secs => %s) WHERE seq = %s"
    )
    place.rows(paused, "OutageError: tax", 20, 1)
    # What is being tried: its row says what would have to be said if the process ended.
    place.rows(paused, queries.CUT_OFF, 300, 3)
    shown = operator.outbox("consumer", "status").output
    says = r"\n  the handler of order.placed is paused for 3\d\d s, next try in (20|1\d) s: OutageError: tax"
    assert re.search(says, shown), shown


def test_without_tables_it_says_how_to_make_them(place: Place, operator: Database) -> None:
    place.rows("DROP TABLE inbox")
    told = operator.outbox("consumer", "status")
    assert (told.exit_code, "outbox consumer migrate" in told.output) == (2, True)
