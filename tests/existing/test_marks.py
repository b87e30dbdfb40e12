"""A table that does not let published rows be marked: said before anything is published, never repeated."""

from __future__ import annotations

import json
import uuid

import psycopg
import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import service
from tests.conftest import may_log_in
from tests.existing.textbook import Table

# Refuses to mark the row with this number.
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.published_at IS NOT NULL AND NEW.payload->>'n' = '{n}' THEN RAISE EXCEPTION 'not this one'; END IF;
    RETURN NEW;
END $$;
CREATE {kind} ON events {when} FOR EACH ROW EXECUTE FUNCTION refuse()"""


def test_a_constraint_against_marks_is_found_before_anything_is_published(table: Table) -> None:
    """Guards against a relay that publishes the whole table again at each start (G1, G5)."""
    with table.connect() as connection:
        connection.execute("ALTER TABLE events ADD CONSTRAINT never CHECK (published_at IS NULL) NOT VALID")
    table.fill(100)
    for _ in range(2):
        with pytest.raises(SetupError, match='violates check constraint "never": change constraint never of'):
            table.drain()
    assert table.messages() == []
    with table.connect() as connection:
        connection.execute("ALTER TABLE events DROP CONSTRAINT never")
    assert table.drain().events == 100


def test_a_mark_that_a_trigger_undoes_ends_publishing(table: Table) -> None:
    """Guards against a row that is published again and again, since its mark counted as written."""
    undo = REFUSE.replace("RAISE EXCEPTION 'not this one'", "NEW.published_at := NULL")
    for n, published in ((1, 0), (250, 300)):
        with table.connect() as connection:
            connection.execute(undo.format(n=n, kind="TRIGGER undo BEFORE UPDATE", when="").encode())
        table.fill(300)
        with pytest.raises(SetupError, match="a trigger, a rule or a policy that prevents or undoes the UPD"):
            service.relay(table.with_(batch_events=100).settings, until_empty=True)
        assert len(table.messages()) == published
        with table.connect() as connection:
            connection.execute("DROP FUNCTION refuse CASCADE; TRUNCATE events")


def test_a_missing_right_to_a_column_is_found_at_the_start(table: Table) -> None:
    """Guards against a right to another column that is taken for the right to mark."""
    role = f"relay_{uuid.uuid4().hex[:8]}"
    table.fill(10)
    with table.connect() as connection:
        connection.execute(
            f"CREATE ROLE {role} {may_log_in(table.settings.dsn)}; GRANT SELECT ON events TO {role}".encode()
        )
        connection.execute(f"GRANT UPDATE (retry_count, last_error) ON events TO {role}".encode())
        try:
            dsn = psycopg.conninfo.make_conninfo(table.settings.dsn, user=role)
            with pytest.raises(SetupError, match=r"may not mark the rows of .*: GRANT UPDATE \(.*_at"):
                table.drain(dsn=dsn)
            assert table.messages() == []
        finally:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("TRIGGER refuse BEFORE UPDATE", ""),
        ("CONSTRAINT TRIGGER refuse AFTER UPDATE", "DEFERRABLE INITIALLY DEFERRED"),
    ],
)
def test_a_row_that_cannot_be_marked_ends_publishing(table: Table, kind: str, when: str) -> None:
    """Guards against a failing row for which other rows are published again and again."""
    with table.connect() as connection:
        connection.execute(REFUSE.format(n=650, kind=kind, when=when).encode())
    table.fill(3000)
    settings = table.with_(batch_events=100).settings
    with pytest.raises(SetupError, match="not this one: change what rejects the UPDATE"):
        service.relay(settings, until_empty=True)
    published = [json.loads(message.value or "")["n"] for message in table.messages()]
    assert len(set(published)) == len(published)
    marked = {n for n, is_marked in table.rows("(payload->>'n')::int, published_at IS NOT NULL") if is_marked}
    assert set(published) - marked == {650}
    assert marked - set(published) == set()
    with pytest.raises(SetupError, match="not this one"):
        service.relay(settings, until_empty=True)
    assert len(table.messages()) == len(published), "published again by a restart"
