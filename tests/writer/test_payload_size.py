"""A payload of more than 1,000,000 bytes is refused, before it is sent where that can be known."""

from __future__ import annotations

import json

import psycopg
import pytest

from outbox_pipelines.writer import NewEvent, PayloadTooLargeError
from tests.schema.events import one
from tests.schema.servers import Connection, Database
from tests.writer.targets import TARGETS, Target, Through

LIMIT = 1_000_000
FITS = {
    "letters": "x" * (LIMIT - 2),
    "accents": "é" * (LIMIT // 2 - 1),
    "escapes": "\n" * (LIMIT // 2 - 1),
    "control characters": "\x01" * ((LIMIT - 2) // 6),
    "list": [1] * (LIMIT // 3),
    "object": {f"{n:06}": 0 for n in range(LIMIT // 13)},
}


def twice(payload: object) -> object:
    """Something whose JSON has a member of one name twice: PostgreSQL keeps the last."""
    return {"1": payload, 1: 0}


@pytest.mark.parametrize("case", FITS)
def test_what_fits_is_taken(connection: Connection, case: str) -> None:
    """Guards against a measure that counts characters, escapes or spaces differently from the database."""
    Through(connection).emit("order", 1, "e", FITS[case])
    [size] = one(connection, "SELECT octet_length(payload::text) FROM outbox")
    assert LIMIT - 13 < size <= LIMIT


@pytest.mark.parametrize("case", FITS)
def test_what_does_not_fit_is_refused_before_it_is_sent(connection: Connection, case: str) -> None:
    """Guards against a refusal by the database, which aborts the transaction."""
    payload = ["x" * 20, FITS[case]]
    for write in (
        lambda: Through(connection).emit("order", 1, "e", payload),
        lambda: Through(connection).emit_many([NewEvent("order", 1, "e", payload)]),
    ):
        with pytest.raises(PayloadTooLargeError, match=r"1,000,0\d\d bytes .*send the reference"):
            write()
    assert one(connection, "SELECT count(*) FROM outbox") == (0,)


@pytest.mark.parametrize("payload", [twice("x" * LIMIT), [-0.0] * (LIMIT // 5)], ids=["name twice", "-0.0"])
def test_what_the_database_shortens_is_taken(connection: Connection, payload: object) -> None:
    """Guards against a measure of what is sent, not of what is stored: payloads refused that would fit."""
    assert len(json.dumps(payload)) > LIMIT
    Through(connection).emit("order", 1, "e", payload)
    [size] = one(connection, "SELECT octet_length(payload::text) FROM outbox")
    assert size <= LIMIT


# Longer there than here, where each is five characters.
LONG = NewEvent("order", 1, "e", [1e300] * 9000)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
@pytest.mark.parametrize("many", [False, True])
def test_the_databases_refusal_is_the_same(shared: Database, target: Target, many: bool) -> None:
    """Guards against a different error for each driver, wrapped or not, which each application must catch."""
    why = r"^the payload of e has \d+ bytes.*send the reference"
    with pytest.raises(PayloadTooLargeError, match=why), target(shared) as through:
        through.emit_many([LONG]) if many else through.emit(*LONG[:4])


def test_other_errors_stay_the_drivers_own(connection: Connection) -> None:
    """Guards against every error with that state taken for one about the size."""
    connection.execute(
        "CREATE FUNCTION pg_temp.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE 'other' USING ERRCODE = 'program_limit_exceeded'; END $$"
    )
    connection.execute("CREATE TRIGGER no BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION pg_temp.no()")
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        Through(connection).emit("order", 1, "e", {})
