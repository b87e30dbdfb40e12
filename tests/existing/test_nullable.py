"""Tables whose columns allow NULL, as in many guides: such a row is a dead letter, and holds nothing up."""

from __future__ import annotations

import json
import uuid
from typing import Final

import pytest

from outbox_pipelines.existing import table_measurements
from tests.conftest import read_topic, wait_until
from tests.existing import guides, textbook
from tests.existing.conftest import FEW_GUIDES, Make
from tests.existing.guides import Guide
from tests.existing.textbook import Table
from tests.relay.parked import numbers_by_key
from tests.relay.topic import create_topic

_NAMES: Final = ("aggregate_type", "aggregate_id", "event_type")
_LOOSE: Final = (
    "ALTER TABLE events ALTER id DROP NOT NULL, ALTER aggregate_type DROP NOT NULL, "
    "ALTER aggregate_id DROP NOT NULL, ALTER event_type DROP NOT NULL"
)


@pytest.fixture
def loose(table: Table) -> Table:
    with table.connect() as connection:
        connection.execute(_LOOSE)
    return table


def _insert(table: Table, **values: object) -> None:
    """One row, whose other names are those of a good one."""
    given = {"aggregate_type": "order", "aggregate_id": "a", "event_type": "e", "payload": "{}"} | values
    columns = ", ".join(given)
    with table.connect() as connection:
        connection.execute(
            f"INSERT INTO events ({columns}) VALUES ({', '.join(['%s'] * len(given))})".encode(),
            list(given.values()),
        )


def _errors(table: Table) -> dict[int, str]:
    rows = table.rows("seq, last_error")
    return {seq: error.removeprefix("outbox: dead letter: ") for seq, error in rows if error}


def test_a_row_without_a_name_becomes_a_dead_letter(loose: Table) -> None:
    """Guards against a table that is refused, a relay that crashes, and an event under another key."""
    loose.write(("a", {"n": 1}))
    for name in ("id", *_NAMES):
        _insert(loose, **{name: None})
    _insert(loose, aggregate_type=None, event_type=None)
    loose.write(("a", {"n": 2}), ("", {"n": 3}))
    totals = loose.drain()
    assert (totals.events, totals.unpublished) == (3, 5)
    assert _errors(loose) == {
        2: "column 'id' is NULL",
        3: "column 'aggregate_type' is NULL",
        4: "column 'aggregate_id' is NULL",
        5: "column 'event_type' is NULL",
        6: "column 'aggregate_type' or 'event_type' is NULL",
    }
    assert loose.numbers("a") == [1, 2]
    assert loose.numbers("") == [3]
    warnings = table_measurements.read(loose.settings).warnings
    assert [warning.partition(";")[0] for warning in warnings] == [
        f"column {name!r} of public.events allows NULL" for name in ("id", *_NAMES)
    ]
    assert loose.drain().events == 0


def test_a_corrected_row_is_published(loose: Table) -> None:
    """Guards against a dead letter that no UPDATE brings back."""
    _insert(loose, aggregate_id=None)
    loose.drain()
    with loose.connect() as connection:
        connection.execute("UPDATE events SET aggregate_id = 'b', retry_count = 0")
    assert loose.drain().events == 1
    assert loose.keys() == ["b"]


@pytest.mark.extended
def test_many_of_them_among_others(loose: Table) -> None:
    """Guards against events that are lost or reordered beside such rows, and against a claim without end."""
    with loose.connect() as connection:
        connection.execute(
            "INSERT INTO events (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT 'order', CASE WHEN i % 7 > 0 THEN (i % 5)::text END, 'e', jsonb_build_object('n', i) "
            "FROM generate_series(1, 2000) i"
        )
    with loose.relayed(batch_events=100):
        wait_until(lambda: len(_errors(loose)) == 285 and len(loose.pending()) == 285, what="the end")
        loose.write(("later", {"n": 1}))
        wait_until(lambda: len(loose.pending()) == 285, what="a later event")
    numbers = numbers_by_key(loose.messages())
    for key in range(5):
        assert numbers[str(key)] == [i for i in range(1, 2001) if i % 5 == key and i % 7 > 0]


@pytest.mark.parametrize("guide", FEW_GUIDES, ids=lambda guide: guide.name)
def test_the_guides_tables_without_not_null(guide: Guide, make_table: Make) -> None:
    """Guards against types of which an empty text is no value, such as a UUID."""
    ddl = guide.ddl.replace("aggregate_id uuid NOT NULL", "aggregate_id uuid")
    for name in _NAMES:
        ddl = ddl.replace(f"{name} varchar(100) NOT NULL", f"{name} varchar(100)")
        ddl = ddl.replace(f"{name} varchar(255) NOT NULL", f"{name} varchar(255)")
    table = make_table(ddl, guide.mapping).with_(**guide.settings)
    key = str(uuid.uuid4())
    name = "outbox_events" if guide is guides.C else "outbox"
    with table.connect() as connection:
        ids = [guide.writers[0](connection, key, "order.created", {"n": n}) for n in range(10)]
        for n, column in ((1, "aggregate_id"), (2, "aggregate_id"), (4, "event_type")):
            connection.execute(f"UPDATE {name} SET {column} = NULL WHERE id::text = %s".encode(), [ids[n]])
    totals = table.drain()
    assert (totals.events, totals.unpublished) == (7, 3)
    kind = "order" if guide is guides.C else "Order"
    messages = read_topic(table.settings.kafka, table.outbox.topic(kind))
    values = [json.loads(message.value or "") for message in messages]
    assert [value.get("payload", value)["n"] for value in values] == [0, 3, 5, 6, 7, 8, 9]
    # Recorded in the table, or found again.
    assert table.drain().unpublished == 3


def test_a_type_that_is_made_of_the_event_type(make_table: Make) -> None:
    """Guards against a topic of an event whose type is NULL."""
    ddl = guides.C.ddl.replace("event_type varchar(255) NOT NULL", "event_type varchar(255)")
    table = make_table(ddl, guides.C.mapping.replace("{event_type:first}", "x{event_type:first}"))
    with table.connect() as connection:
        connection.execute("INSERT INTO outbox_events (aggregate_id, event_data) VALUES ('1', '{}')")
        assert table.drain().unpublished == 1
        assert connection.execute("SELECT status FROM outbox_events").fetchall() == [("FAILED",)]


@pytest.mark.extended
def test_a_locked_row_without_a_name_holds_up_no_others(loose: Table) -> None:
    """Guards against a claim that fails at the lock each time, since NULL equals nothing."""
    _insert(loose, aggregate_id=None)
    _insert(loose, aggregate_type=None)
    loose.write(("b", {"n": 1}))
    with loose.relayed():
        wait_until(lambda: len(_errors(loose)) == 2 and loose.keys() == ["b"])
    with loose.connect(autocommit=False) as other:
        other.execute("UPDATE events SET retry_count = 0")
        other.commit()
        other.execute("SELECT FROM events WHERE published_at IS NULL FOR UPDATE")
        loose.write(("c", {"n": 2}))
        with loose.relayed():
            wait_until(lambda: loose.keys() == ["b", "c"], what="an event of another aggregate")
            other.rollback()
            wait_until(lambda: (False,) not in loose.rows("published_at IS NOT NULL OR retry_count > 0"))


@pytest.mark.extended
def test_they_are_found_while_another_aggregate_is_blocked(loose: Table) -> None:
    """Guards against NOT IN, which is neither true nor false of a NULL: the row would wait."""
    create_topic(loose.outbox, **{"max.message.bytes": "3000"})
    loose.write(("big", {"text": "".join(uuid.uuid4().hex for _ in range(400))}))
    with loose.relayed(retry_seconds=600):
        wait_until(lambda: len(_errors(loose)) == 1, what="the refusal")
        _insert(loose, aggregate_id=None)
        _insert(loose, event_type=None)
        loose.write(("b", {"n": 1}))
        wait_until(lambda: len(_errors(loose)) == 3, what="the dead letters")
        wait_until(lambda: loose.keys() == ["b"])


def test_a_dead_letter_that_blocks(make_table: Make) -> None:
    """Guards against an aggregate that is blocked and that no statement can name."""
    ddl = textbook.STATUS.replace("entity uuid NOT NULL", "entity uuid").replace(
        "kind varchar(40) NOT NULL", "kind varchar(40)"
    )
    table = make_table(ddl, textbook.STATUS_MAPPING)
    keys = [str(uuid.UUID(int=n)) for n in range(3)]
    with table.connect() as connection:

        def states() -> list[str]:
            return [state for (state,) in connection.execute("SELECT state::text FROM events ORDER BY id")]

        insert = "INSERT INTO events (kind, entity, name, body) VALUES ('order', %s, 'e', '1')"
        for key in (keys[0], None, keys[1]):
            connection.execute(insert, [key])
        with table.relayed(on_dead_letter="block"):
            wait_until(lambda: states() == ["sent", "broken", "sent"], what="one dead letter")
            for key in (None, keys[2]):
                connection.execute(insert, [key])
            wait_until(lambda: states() == ["sent", "broken", "sent", "new", "sent"], what="another key")
        with table.relayed(on_dead_letter="block"):
            connection.execute(insert, [keys[0]])
            wait_until(lambda: states() == ["sent", "broken", "sent", "new", "sent", "sent"], what="another")
            connection.execute("UPDATE events SET entity = %s, state = 'new' WHERE entity IS NULL", [keys[1]])
            wait_until(lambda: states() == ["sent"] * 6, what="the corrected rows")
