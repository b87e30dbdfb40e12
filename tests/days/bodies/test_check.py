"""Each reference of an event leads to the body that was written, or is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from psycopg.types.json import Jsonb

from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.bodies import check as checking
from outbox_pipelines.days.bodies.check import Checked, check
from tests.days.archive.days import at, manifest_path, writing
from tests.days.bodies.stored import DAY, NEXT, Stored


def checked(stored: Stored, **given: bool) -> Checked:
    (found,) = check(stored.settings, DAY, DAY, **given)
    return found


def what_is_wrong(found: Checked) -> dict[str | None, str]:
    return {each.key: each.what for each in found.problems}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stored", "in_bucket"])
def test_bodies_that_are_there(request: pytest.FixtureRequest, kind: str) -> None:
    """Guards against an alarm without a cause, also about a body of a transaction of another day, and about
    a payload that has the member's name only as a text."""
    stored = request.getfixturevalue(kind)
    with writing(stored.database) as connection:
        for other in ('"outbox-body"', '["outbox-body"]', '{"text": ["\\"outbox-body\\""]}'):
            stored.insert(connection, other)
    stored.write(stored.put(content=b"12345"))
    stored.write(stored.put(NEXT))
    found = checked(stored, digest=True)
    assert (found.problems, found.references, found.size) == ([], 2, 12)
    stored.close()
    archive.archive(stored.settings, DAY)
    drop.drop(stored.settings, DAY)
    assert checked(stored) == found
    stored.bodies.remove([*stored.keys()])
    assert [each.what for each in checked(stored).problems] == ["the body is missing"]


def test_a_day_without_references(stored: Stored) -> None:
    """Guards against a day that is shown as checked although nothing is there to check."""
    assert [*check(stored.settings, DAY, DAY)] == []
    assert "no event of these days refers to a body" in stored.outbox("bodies", "check").output


def test_bodies_that_are_missing_or_differ(stored: Stored) -> None:
    """Guards against a dead letter in each consumer that is the first sign of a lost body."""
    root = Path(stored.settings.bodies)
    missing, shorter, other = (stored.write() for _ in range(3))
    (root / missing).unlink()
    (root / shorter).write_bytes(b"")
    (root / other).write_bytes(b"CONTENT")
    stored.write(json.dumps({"outbox-body": {"key": "../x"}}))
    stored.write(json.dumps({"outbox-body": {"key": "2026-13-01/x", "size": 1, "sha256": "0" * 64}}))
    expected = {
        missing: "the body is missing",
        shorter: "the body has 0 bytes in place of 7",
        "2026-13-01/x": "the body is missing",
    }
    found = what_is_wrong(checked(stored))
    assert "is not a reference" in found.pop("../x")
    assert found == expected
    found = what_is_wrong(checked(stored, digest=True))
    assert "another sha256" in found[other]
    assert len(found) == 5


def test_references_within_a_payload(stored: Stored) -> None:
    """Guards against a lost body that only a sweep knew, and an alarm about a part that is no reference."""
    there, lost = (json.loads(stored.put()) for _ in range(2))
    (Path(stored.settings.bodies) / lost["outbox-body"]["key"]).unlink()
    deep = "[" * 1_500 + "]" * 1_500
    with writing(stored.database) as connection:
        for payload in ([{"invoice": there}], {"a": [1, {"b": lost}]}, {"text": {"outbox-body": {"key": 1}}}):
            stored.insert(connection, json.dumps(payload))
        for member in (deep, "9" * 5_000):
            connection.execute(
                "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, created_at) "
                "VALUES ('order', '1', 'e', %s::text::jsonb, %s)",
                [f'{{"outbox-body": {member}}}', at(DAY, 1)],
            )
    found = checked(stored)
    assert found.references == 4
    [part, *unreadable] = sorted(found.problems, key=lambda each: each.key is None)
    assert part.key == lost["outbox-body"]["key"]
    assert part.what.startswith("the body is missing (a part of the payload")
    assert sorted(each.what[:12] for each in unreadable) == ["Exceeds the ", "its JSON is "]


def test_delayed_events(stored: Stored) -> None:
    """Guards against a lost body that is found when its event is due."""
    payload = json.loads(stored.put())
    emit = "SELECT outbox_emit('order', '1', 'e', %s, deliver_after => now() + interval '1 hour')"
    stored.database.rows(emit, Jsonb(payload))
    shown = stored.outbox("bodies", "check")
    assert (shown.exit_code, shown.output) == (0, "delayed  1 body (7 bytes), all there\n")
    (Path(stored.settings.bodies) / payload["outbox-body"]["key"]).unlink()
    (found,) = check(stored.settings, DAY, DAY)
    assert (found.day, what_is_wrong(found)) == (None, {payload["outbox-body"]["key"]: "the body is missing"})


def test_a_body_that_is_newer_than_the_list(stored: Stored) -> None:
    """Guards against an alarm about an event that is written while its day is checked."""
    sizes = checking._Sizes(stored.bodies)
    assert sizes.of(stored.write()) == 7
    assert sizes.of(stored.write()) == 7
    assert sizes.of(f"{DAY}/none") is None


@pytest.mark.extended
def test_dropped_days(stored: Stored) -> None:
    """Guards against a check that passes because a day's events are no longer in the table."""
    key = stored.write()
    stored.close()
    archive.archive(stored.settings, DAY)
    drop.drop(stored.settings, DAY)
    assert checked(stored).references == 1
    (Path(stored.settings.bodies) / key).unlink()
    assert what_is_wrong(checked(stored)) == {key: "the body is missing"}
    manifest_path(stored.settings, DAY).unlink()
    found = checked(stored)
    assert "has no manifest in" in found.why_not
    assert not found.is_expected


def test_the_command(stored: Stored) -> None:
    """Guards against a missing body that a job's log hides, and an event that cannot be found."""
    key = stored.write()
    command = ("bodies", "check", "--since", str(DAY))
    shown = stored.outbox(*command, "--digest")
    assert (shown.exit_code, f"{DAY}  1 body (7 bytes), all there" in shown.output) == (0, True), shown.output
    (Path(stored.settings.bodies) / key).unlink()
    shown = stored.outbox(*command)
    event = stored.database.value("SELECT id::text FROM outbox")
    assert shown.exit_code == 1
    assert f"event {event}: {key}: the body is missing" in shown.output
    (found,) = json.loads(stored.outbox(*command, "--json").stdout)
    assert found["problems"] == [{"event_id": event, "key": key, "what": "the body is missing"}]
    stored.close()
    stored.database.rows(f"ALTER TABLE outbox DETACH PARTITION outbox_{DAY:%Y%m%d}")
    stored.database.rows(f"ALTER TABLE outbox_{DAY:%Y%m%d} RENAME TO lost")
    shown = stored.outbox(*command)
    assert (shown.exit_code, "not checked: the partition of" in shown.output) == (1, True)
