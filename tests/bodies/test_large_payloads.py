"""A large payload is an object in a store before its event is written, and the event has its reference."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.writer import BodyStoreError, InvalidEventError, NewEvent, OutboxError, validate_with
from outbox_pipelines.writer.references import Reference, reference_of
from outbox_pipelines.writer.sqlalchemy import OutboxEvent
from outbox_pipelines.writer.testing import captured
from tests.days.archive import buckets
from tests.schema.servers import Database
from tests.writer import targets
from tests.writer.targets import Target, Through

LARGE = {"text": "é" * 100, "n": [1, 2.5, None]}
FIND = "SELECT payload, created_at::date::text FROM outbox WHERE aggregate_id = %s ORDER BY seq"
# One of each kind of driver, synchronous and not; `tests/writer` shows that they are alike.
KINDS: list[Target] = [
    targets.psycopg_connection,
    targets.pipeline,
    targets.psycopg2_connection,
    targets.async_connection,
    targets.session,
    targets.async_session_asyncpg,
    targets.asyncpg_codecs,
    targets.django_connection,
]


@pytest.fixture
def order() -> str:
    """An aggregate that no other test writes about."""
    return uuid.uuid4().hex


@pytest.fixture
def directory(tmp_path: Path) -> Bodies:
    return Bodies(str(tmp_path), above_bytes=100)


def referred(payload: Any) -> Reference:
    reference = reference_of(payload)
    assert reference is not None
    return reference


@pytest.mark.parametrize("target", KINDS, ids=lambda target: target.__name__)
def test_the_body_is_stored_and_the_event_refers_to_it(
    kept: Database, directory: Bodies, target: Target, order: str
) -> None:
    """Guards against a way to write that stores nothing, and a key of another day than the event's, which
    the sweep would remove."""
    with target(kept) as through:
        through.emit("order", order, "e", directory.large(LARGE), headers={"h": 1})
        through.emit("order", order, "e", directory.large({"n": 1}))
        many = [directory.large(LARGE), {"n": 2}, directory.large(b"%PDF", "application/pdf")]
        through.emit_many([NewEvent("order", order, "e", each) for each in many])
    (first, day), (small, _), (second, _), (plain, _), (pdf, _) = kept.rows(FIND, order)
    assert (small, plain) == ({"n": 1}, {"n": 2})
    assert json.loads(directory.get(referred(first))) == json.loads(directory.get(referred(second))) == LARGE
    assert directory.get(referred(pdf)) == b"%PDF"
    assert referred(pdf).content_type == "application/pdf"
    assert len({referred(each).key for each in (first, second, pdf)}) == 3
    assert {referred(each).key.partition("/")[0] for each in (first, second, pdf)} == {day}


def test_a_bucket(kept: Database, bucket: dict[str, str], order: str) -> None:
    """Guards against a store that only ever worked in a directory."""
    bodies = Bodies(f"s3://{buckets.BUCKET}/{order}")
    with targets.psycopg_connection(kept) as through:
        through.emit("order", order, "e", bodies.large("x" * 2_000_000))
    [(payload, _)] = kept.rows(FIND, order)
    assert bodies.get(referred(payload)) == b'"' + b"x" * 2_000_000 + b'"'
    found = buckets.client(bucket).head_object(Bucket=buckets.BUCKET, Key=f"{order}/{referred(payload).key}")
    assert found["ContentType"] == "application/json"


def test_objects_of_a_session(kept: Database, directory: Bodies, order: str) -> None:
    """Guards against a flush that writes a large payload into the row."""
    with targets.session(kept) as through:
        through.target.add(OutboxEvent("order", order, "e", directory.large(LARGE)))
    [(payload, _)] = kept.rows(FIND, order)
    assert json.loads(directory.get(referred(payload))) == LARGE


def test_what_is_refused_stores_nothing(kept: Database, directory: Bodies, tmp_path: Path) -> None:
    """Guards against an object for an event that could never be written, and an aborted transaction."""
    with targets.psycopg_connection(kept) as through:
        for wrong in ("", None):
            with pytest.raises(OutboxError, match="aggregate_id is"):
                through.emit("order", wrong, "e", directory.large(LARGE))
        with pytest.raises(OutboxError, match=r"event 0: payload\.n\[1\] does not serialize"):
            through.emit_many([NewEvent("order", 1, "e", directory.large({"n": {1: b""}}))])
    with targets.psycopg_autocommit(kept) as through, pytest.raises(OutboxError, match="autocommit"):
        through.emit("order", 1, "e", directory.large(LARGE))
    assert [*tmp_path.iterdir()] == []


def test_the_body_is_validated(directory: Bodies, tmp_path: Path) -> None:
    """Guards against a schema that a large payload need not match, or that judges a file as JSON."""
    seen: list[object] = []

    def check(event_type: str, payload: object, version: int | None) -> None:
        seen.append(payload)
        if payload == LARGE:
            raise ValueError("n is no number")

    validate_with(check)
    try:
        with captured() as events:
            with pytest.raises(InvalidEventError, match="n is no number"):
                Through(None).emit("order", 1, "e", directory.large(LARGE))
            Through(None).emit("order", 1, "e", directory.large(b"%PDF", "application/pdf"))
            Through(None).emit("order", 1, "e", directory.large(["x" * 100]))
    finally:
        validate_with(None)
    assert seen == [LARGE, b"%PDF", ["x" * 100]]
    # A test without a database sees the payload, and stores nothing.
    assert [each.payload for each in events] == [None, ["x" * 100]]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("target", [targets.psycopg_connection, targets.async_connection])
def test_an_unavailable_store_fails_the_event(
    kept: Database, bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch, target: Target, order: str
) -> None:
    """Guards against an event whose body is nowhere, a transaction that waits without end, and a secret in
    the message."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    bodies = Bodies(f"s3://{buckets.BUCKET}/x?sig=hidden", above_bytes=100, timeout=1)
    with target(kept) as through:
        with pytest.raises(BodyStoreError) as refused:
            through.emit("order", order, "e", bodies.large(LARGE))
        through.emit("order", order, "e", {"n": 1})
    assert str(refused.value).startswith(
        f"the store of large payloads s3://{buckets.BUCKET}/x is unavailable (store): "
    )
    assert not {"hidden", "secret", bucket["AWS_SECRET_ACCESS_KEY"]} & {*str(refused.value).split()}
    assert [payload for payload, _ in kept.rows(FIND, order)] == [{"n": 1}]


def test_instead_the_payload_can_be_in_the_event(kept: Database, tmp_path: Path, order: str) -> None:
    """Guards against a fallback that is taken for bytes, or for more than a row may have."""
    place = tmp_path / "mounted"
    place.mkdir()
    bodies = Bodies(str(place), above_bytes=100, on_unavailable="inline")
    place.rmdir()
    with targets.psycopg_connection(kept) as through:
        through.emit("order", order, "e", bodies.large(LARGE))
        for large in (bodies.large("x" * 1_000_000), bodies.large(b"%PDF", "application/pdf")):
            with pytest.raises(BodyStoreError, match="is its disk mounted"):
                through.emit("order", order, "e", large)
    assert [payload for payload, _ in kept.rows(FIND, order)] == [LARGE]


def test_a_rolled_back_transaction_leaves_an_object(
    kept: Database, directory: Bodies, tmp_path: Path, order: str
) -> None:
    """Guards against a store that is written after the commit: a crash would lose the body."""
    with targets.psycopg_connection(kept) as through:
        through.emit("order", order, "e", directory.large(LARGE))
        through.target.rollback()
    assert kept.rows(FIND, order) == []
    assert len([*tmp_path.glob("*/*")]) == 1
