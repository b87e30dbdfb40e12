"""A body to which an event refers is never removed; one of a rolled-back transaction is."""

from __future__ import annotations

import json
import signal
import sys
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.days.archive import day as archive
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.archive.expire import expire
from outbox_pipelines.days.bodies import sweep as sweeping
from outbox_pipelines.days.bodies.check import check
from outbox_pipelines.days.bodies.sweep import sweep
from outbox_pipelines.days.partitions import calendar, partitions_sql
from outbox_pipelines.errors import SetupError, UnavailableError
from tests import forks
from tests.conftest import clean_environment
from tests.days.archive import buckets
from tests.days.archive.days import at, days_ago, make_days, manifest_path, publish, writing
from tests.days.bodies.stored import DAY, NEXT, Stored, key_of
from tests.existing import textbook
from tests.schema.events import insert
from tests.schema.servers import Database


def test_only_what_no_event_refers_to_is_removed(stored: Stored) -> None:
    """Guards against bodies of rolled-back transactions that stay, and against the loss of others."""
    kept = {stored.write(), stored.write(), stored.write(day=NEXT)}
    orphan = key_of(stored.put(content=b"12345"))
    stored.close()
    dry = stored.sweep(dry_run=True)
    assert (dry.objects, dry.unreferenced, dry.size, dry.why_not) == (3, 1, 5, "")
    assert {*kept, orphan} == stored.keys() | stored.keys(NEXT)
    assert stored.sweep() == dry
    assert stored.keys() | stored.keys(NEXT) == kept
    again = stored.sweep()
    assert (again.objects, again.unreferenced) == (2, 0)


def test_an_object_whose_name_is_refused(stored: Stored) -> None:
    """Guards against one object that stops all days, and makes a missing body an outage."""
    key, root = stored.write(), Path(stored.settings.bodies)
    stored.put()
    for name in (f"{key[:-1]}\x01", "\x01", f"{NEXT}\x01"):
        (root / name).write_bytes(b"")
    assert stored.outbox("bodies", "check", "--since", str(DAY), "--digest").exit_code == 0
    stored.close()
    assert stored.sweep().unreferenced == 1
    assert stored.keys() == {key}
    (root / key).unlink()
    (found,) = check(stored.settings, DAY, DAY, digest=True)
    assert [each.what for each in found.problems] == ["the body is missing"]


def test_an_object_whose_name_is_refused_in_a_bucket(in_bucket: Stored, served: dict[str, str]) -> None:
    """Guards against one object that stops all days: its own day cannot be listed."""
    key = in_bucket.write()
    in_bucket.put(NEXT)
    root = in_bucket.settings.bodies.partition(buckets.BUCKET + "/")[2]
    odd = f"{root}/{DAY}//x"
    for each in (odd, f"{root}//x"):
        buckets.client(served).put_object(Bucket=buckets.BUCKET, Key=each, Body=b"")
    in_bucket.close(DAY, NEXT, days_ago(1))
    assert in_bucket.outbox("bodies", "check", "--since", str(DAY)).exit_code == 0
    done = in_bucket.outbox("bodies", "sweep", "--since", str(DAY))
    assert done.exit_code == 1
    assert f"{DAY}  bodies, stay: " in done.output
    assert f"because of the name of '{odd}': rename or remove it" in done.output
    assert f"{NEXT}  1 body, 1 removed" in done.output
    assert in_bucket.bodies.size_of(key) == 7


def test_a_bucket(in_bucket: Stored) -> None:
    """Guards against a sweep that only ever worked in a directory, and one that takes a path for a key."""
    kept = in_bucket.write()
    for _ in range(3):
        in_bucket.put()
    in_bucket.close()
    assert in_bucket.sweep().unreferenced == 3
    assert in_bucket.keys() == {kept}


def test_other_objects_are_not_touched(stored: Stored) -> None:
    """Guards against the removal of what others keep beside the bodies."""
    root = Path(stored.settings.bodies)
    others = [root / str(DAY) / "below" / "x", root / str(DAY) / "with space", root / "2026" / "x"]
    for each in others:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.touch()
    stored.put()
    stored.close()
    assert stored.sweep().objects == 1
    assert stored.keys() == set()
    assert all(each.exists() for each in others)


def test_bodies_of_expired_events_go(stored: Stored) -> None:
    """Guards against bodies that outlive the events of the archive, and against the loss of another's."""
    kept, gone = stored.write(), stored.put()
    with writing(stored.database) as connection:
        payload = Jsonb(json.loads(gone))
        insert(connection, created_at=at(DAY, 1), payload=payload, aggregate_type="invoice")
    stored.close()
    archive.archive(stored.settings, DAY)
    drop.drop(stored.settings, DAY)
    assert stored.sweep().unreferenced == 0
    update = {"retention_days": 1, "archive_retention_days": {"invoice": 1}}
    settings = stored.settings.model_copy(update=update)
    assert [each.events for each in expire(settings, actor="a")] == [1]
    assert stored.sweep().unreferenced == 1
    assert stored.keys() == {kept}
    update["archive_retention_days"] = {"*": 1}
    [_] = expire(stored.settings.model_copy(update=update), actor="a")
    assert stored.sweep().unreferenced == 1
    assert stored.outbox("bodies", "check", "--since", str(DAY)).exit_code == 0


# --- when a reference could still come ------------------------------------------------------------------


def test_an_open_day_stays(stored: Stored) -> None:
    """Guards against the removal of the body of a transaction that is running, and of one of the day before
    whose writer took the day from its own clock."""
    stored.put()
    publish(stored.database)
    assert f"{DAY} is not closed" in stored.sweep().why_not
    stored.close(DAY)
    swept = stored.sweep()
    assert f"{NEXT} is not closed" in swept.why_not
    assert (swept.is_expected, swept.unreferenced, len(stored.keys())) == (True, 0, 1)
    late = stored.write(stored.put(), day=NEXT)
    stored.close(NEXT)
    assert stored.sweep().unreferenced == 1
    assert stored.keys() == {late}


def test_today_and_yesterday_stay(stored: Stored) -> None:
    """Guards against a sweep of a day whose next one has no row yet."""
    for ago in (0, 1):
        stored.put(days_ago(ago))
        stored.database.rows("DELETE FROM outbox_days WHERE day = %s", days_ago(ago - 1))
        stored.database.rows("UPDATE outbox_days SET state = 'closed' WHERE day = %s", days_ago(ago))
        assert "the next day is not over" in stored.sweep(day=days_ago(ago)).why_not


def test_a_transaction_from_before_the_end(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a late commit of a row in another day, which the lock that closes a day cannot find."""
    payload = stored.put()
    stored.close()
    # The one below then began before the end of the next day.
    monkeypatch.setattr(partitions_sql, "RUNNING", partitions_sql.RUNNING.replace("::date + 1", "::date + 9"))
    with writing(stored.database) as late:
        stored.insert(late, payload, days_ago(1))
        swept = stored.sweep()
        assert "runs since" in swept.why_not
        assert swept.is_expected
    assert stored.sweep().unreferenced == 0
    assert stored.keys() == {key_of(payload)}


def test_a_prepared_transaction(stored: Stored) -> None:
    """Guards against a reference that is committed after a sweep by a transaction without a session."""
    payload = stored.put()
    stored.close()
    with stored.database.connect(autocommit=False) as late:
        late.execute("SET LOCAL outbox.backfill = on")
        stored.insert(late, payload, days_ago(1))
        late.execute("PREPARE TRANSACTION 'late'")
    swept = stored.sweep()
    stored.database.rows("COMMIT PREPARED 'late'")
    assert swept.why_not.endswith("COMMIT or ROLLBACK PREPARED 'late'")
    assert swept.is_expected
    assert stored.sweep().unreferenced == 0
    assert stored.keys() == {key_of(payload)}


def test_a_body_that_is_stored_after_the_list(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the removal of a body that was stored after the references were read."""
    stored.put()
    stored.close()
    late = set()
    first = sweeping._require_over

    def require_over(*given: Any) -> None:
        late.add(key_of(stored.put()))
        first(*given)

    monkeypatch.setattr(sweeping, "_require_over", require_over)
    assert stored.sweep().unreferenced == 1
    assert stored.keys() == late


@pytest.mark.extended
def test_a_day_that_another_session_works_on(stored: Stored) -> None:
    """Guards against a day that is reopened or dropped while it is swept."""
    stored.put()
    stored.close()
    with calendar.working_at(stored.settings, DAY):
        swept = stored.sweep()
    assert "swept by session" in swept.why_not
    assert swept.is_expected
    assert len(stored.keys()) == 1


# --- where references are -------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_dropped_day(stored: Stored, tmp_path: Path) -> None:
    """Guards against the loss of the bodies of archived events, and of those whose archive is unproven."""
    kept = stored.write()
    stored.put()
    stored.close()
    archive.archive(stored.settings, DAY)
    drop.drop(stored.settings, DAY)
    manifest = manifest_path(stored.settings, DAY)
    content = manifest.read_bytes()
    manifest.write_bytes(content + b" ")
    unproven = stored.sweep()
    assert "is not proven: the manifest" in unproven.why_not
    assert not unproven.is_expected
    manifest.unlink()
    assert "has no manifest in" in stored.sweep().why_not
    stored.settings = stored.settings.model_copy(update={"archive": ""})
    assert "no archive configured" in stored.sweep().why_not
    stored.settings = stored.settings.model_copy(update={"archive": str(tmp_path / "archive")})
    manifest.write_bytes(content)
    (file,) = manifest.parents[2].glob("events/*/*.parquet")
    damaged = file.read_bytes()
    file.write_bytes(damaged[:-1] + b"X")
    assert "is not proven" in stored.sweep().why_not
    assert len(stored.keys()) == 2
    file.write_bytes(damaged)
    assert stored.sweep().unreferenced == 1
    assert stored.keys() == {kept}


def test_a_day_without_rows_and_archive(stored: Stored) -> None:
    """Guards against the loss of bodies whose events Kafka still has, after a drop without an archive, and of
    all of a day whose partition is lost."""
    stored.write()
    stored.close()
    stored.settings = stored.settings.model_copy(update={"archive": "none"})
    leaf = calendar.leaf_of(DAY)
    stored.database.rows(f"ALTER TABLE {leaf} RENAME TO lost")
    stored.database.rows("ALTER TABLE outbox DETACH PARTITION lost")
    lost = stored.sweep()
    assert f"the partition of {DAY} does not exist" in lost.why_not
    assert not lost.is_expected
    stored.database.rows(f"ALTER TABLE lost RENAME TO {leaf}")
    drop.drop(stored.settings, DAY)
    dropped = stored.sweep()
    assert f"{DAY} was dropped without an archive" in dropped.why_not
    assert dropped.is_expected
    assert len(stored.keys()) == 1


def test_a_detached_day(stored: Stored) -> None:
    """Guards against an interrupted drop, whose rows are not visible through the outbox."""
    kept = stored.write()
    stored.close()
    stored.database.rows(f"ALTER TABLE outbox DETACH PARTITION {calendar.leaf_of(DAY)}")
    assert stored.sweep().unreferenced == 0
    assert stored.keys() == {kept}


@pytest.mark.parametrize("leaf", ["", "outbox_odd"])
def test_an_event_of_another_day(stored: Stored, leaf: str) -> None:
    """Guards against the loss of the body of a backfilled event, whose day is that of its transaction, also
    in a partition that the outbox does not know."""
    earlier = DAY - timedelta(2)
    make_days(stored.database, earlier)
    kept = stored.write(stored.put(), day=earlier)
    stored.close(earlier, earlier + timedelta(1), DAY, NEXT)
    if leaf:
        stored.database.rows(f"ALTER TABLE {calendar.leaf_of(earlier)} RENAME TO {leaf}")
        stored.database.rows("DELETE FROM outbox_days WHERE day = %s", earlier)
    assert stored.sweep().unreferenced == 0
    assert stored.keys() == {kept}


def test_an_archived_event_of_another_day(stored: Stored) -> None:
    """Guards against the loss of the body of a backfilled event that is in the archive alone."""
    earlier = DAY - timedelta(1)
    make_days(stored.database, earlier)
    kept = stored.write(stored.put(), day=earlier)
    stored.put()
    stored.close(earlier, DAY, NEXT)
    archive.archive(stored.settings, earlier)
    drop.drop(stored.settings, earlier)
    assert stored.sweep().unreferenced == 1
    assert stored.keys() == {kept}


def test_days_closed_before_are_not_read(stored: Stored) -> None:
    """Guards against a sweep that reads the whole archive, and fails for a file that cannot matter."""
    earlier = DAY - timedelta(1)
    make_days(stored.database, earlier)
    stored.put()
    stored.close(earlier, DAY, NEXT)
    stored.database.rows(f"DROP TABLE {calendar.leaf_of(earlier)}")
    stored.database.rows(
        "UPDATE outbox_days SET state = 'dropped', sealed_at = day - 1, closed_at = day - 1 WHERE day = %s",
        earlier,
    )
    assert stored.sweep().unreferenced == 1


def test_a_dead_letter_outlives_its_day(stored: Stored) -> None:
    """Guards against the loss of the body of a dead letter, which can be replayed."""
    payload = stored.put()
    stored.close()
    stored.database.rows(
        "INSERT INTO outbox_parked (id, seq, tx, aggregate_type, aggregate_id, event_type, payload, "
        "created_at, state) VALUES (gen_random_uuid(), 1, '3', 'order', '1', 'e', %s::jsonb, %s, 'failed')",
        payload,
        DAY,
    )
    assert stored.sweep().unreferenced == 0
    assert stored.keys() == {key_of(payload)}


def test_a_delayed_event_is_in_no_day_yet(stored: Stored) -> None:
    """Guards against a body that is removed before its event is due."""
    payload = stored.put()
    emit = "SELECT outbox_emit('order', '1', 'e', %s::jsonb, deliver_after => now() + interval '40 days')"
    stored.database.rows(emit, payload)
    stored.put()
    stored.close()
    assert stored.sweep().unreferenced == 1
    assert stored.keys() == {key_of(payload)}


def test_what_a_consumer_would_refuse_protects_too(stored: Stored) -> None:
    """Guards against the loss of a body because another writer made a mistake in its reference."""
    payload = stored.put()
    member = json.loads(payload)["outbox-body"]
    kept = stored.write(json.dumps({"outbox-body": {"key": member["key"]}, "more": 1}))
    for odd in ('{"outbox-body": 1}', '{"outbox-body": null}', '["outbox-body"]', '"outbox-body"'):
        with writing(stored.database) as connection:
            stored.insert(connection, odd)
    stored.close()
    assert stored.sweep().unreferenced == 0
    archive.archive(stored.settings, DAY)
    drop.drop(stored.settings, DAY)
    assert stored.sweep().unreferenced == 0
    assert stored.keys() == {kept}


@pytest.mark.parametrize(
    "odd",
    [
        '{"outbox-body": {"key": "DAY//NAME"}}',
        '{"outbox-body": {"key": "./DAY/NAME"}}',
        '{"outbox-body": {"key": "s3://bucket/shop/DAY%2FNAME?v=1"}}',
        '{"outbox-body": "DAY/NAME"}',
        '{"invoice": [{"outbox-body": {"key": "DAY/NAME"}}]}',
        '"{\\"outbox-body\\": {\\"key\\": \\"DAY/NAME\\"}}"',
    ],
)
def test_a_reference_of_another_spelling_protects_too(stored: Stored, odd: str) -> None:
    """Guards against the loss of a body whose name a writer has joined to a path in its own way, or has put
    into a larger payload."""
    kept = key_of(stored.put())
    day, _, name = kept.partition("/")
    stored.put()
    with writing(stored.database) as connection:
        stored.insert(connection, odd.replace("DAY", day).replace("NAME", name.upper()))
    stored.close()
    assert stored.sweep(dry_run=True).unreferenced == 1
    archive.archive(stored.settings, DAY)
    drop.drop(stored.settings, DAY)
    assert stored.sweep().unreferenced == 1
    assert stored.keys() == {kept}


def test_a_role_without_rights(stored: Stored) -> None:
    """Guards against a role that sees no references, and removes everything."""
    stored.put()
    stored.close()
    stored.database.rows("CREATE ROLE reader LOGIN")
    stored.database.rows("GRANT SELECT ON outbox_days, outbox_parked, outbox_shards TO reader")
    settings = stored.settings.model_copy(
        update={"dsn": psycopg.conninfo.make_conninfo(stored.database.dsn, user="reader")}
    )
    try:
        found = [*sweep(settings, DAY, DAY)]
    except (SetupError, psycopg.Error):
        found = []
    assert [each for each in found if not each.why_not] == []
    assert len(stored.keys()) == 1


def test_a_day_that_is_not_the_outboxs(stored: Stored) -> None:
    """Guards against the removal of what was stored before the outbox was, or for another one."""
    stored.put(days_ago(30))
    swept = stored.sweep(day=days_ago(30))
    assert "is not a day of this outbox" in swept.why_not
    assert not swept.is_expected


@pytest.mark.parametrize(
    ("state", "switched", "why"),
    [
        ("prepared", None, "writers may write into public.old"),
        ("returning", DAY - timedelta(1), "writers may write into public.old"),
        ("adopted", DAY, f"until {DAY}"),
        ("adopted", DAY - timedelta(1), ""),
    ],
)
def test_an_adopted_table(stored: Stored, state: str, switched: object, why: str) -> None:
    """Guards against the loss of bodies to which rows of the table refer that the outbox replaces."""
    stored.put()
    stored.close()
    stored.database.rows(
        "INSERT INTO outbox_adopted (relation, schema, name, kept_as, state, switched_at) "
        "VALUES (1, 'public', 'old', 'old_kept', %s, %s)",
        state,
        switched,
    )
    swept = stored.sweep()
    assert why in swept.why_not
    assert bool(swept.why_not) == bool(why)


# --- which days, and which store ------------------------------------------------------------------------


def test_a_store_must_be_this_outboxs(stored: Stored, tmp_path: Path) -> None:
    """Guards against a copy of the database, or a second outbox, that removes the bodies of the other."""
    stored.put()
    stored.close()
    owner = tmp_path / "bodies" / "_outbox" / "bodies.json"
    content = owner.read_text()
    for other, why in (
        (None, "is not declared to be this outbox's: if only its writers"),
        (content.replace('"public"', '"other"'), "has the bodies of another outbox, schema other of"),
        ("{", "cannot be read"),
    ):
        owner.unlink(missing_ok=True)
        if other is not None:
            owner.write_text(other)
        with pytest.raises(SetupError, match=why):
            stored.sweep()
        shown = stored.outbox("bodies", "adopt")
        assert shown.exit_code == (2 if other else 0), shown.output
        assert stored.outbox("bodies", "adopt", "--force").exit_code == 0
        assert owner.read_text() == content
    assert len(stored.keys()) == 1


def test_a_store_that_is_not_mounted(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an outage that a report shows as an empty store."""
    stored.put()
    stored.close()
    Path(stored.settings.bodies).rename(Path(stored.settings.bodies).with_name("disk"))
    with pytest.raises(SetupError, match="is no directory: create it"):
        stored.sweep()
    monkeypatch.setattr(sweeping, "open_bodies", lambda _: stored.bodies)
    with pytest.raises(UnavailableError, match="is its disk mounted"):
        stored.sweep()


@pytest.mark.parametrize("step", ["days", "objects", "owner", "remove"])
def test_an_interruption(stored: Stored, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Guards against a sweep that cannot be repeated after it was interrupted, at each request."""
    kept = stored.write()
    for _ in range(4):
        stored.put()
    stored.close()
    monkeypatch.setattr(sweeping, "_AT_ONCE", 2)
    first: Callable[..., object] = getattr(Bodies, step)
    calls = []

    def fails(*given: object) -> object:
        calls.append(given)
        if len(calls) == (2 if step == "remove" else 1):
            raise KeyboardInterrupt
        return first(*given)

    with monkeypatch.context() as patched:
        patched.setattr(Bodies, step, fails)
        with pytest.raises(KeyboardInterrupt):
            stored.sweep()
    assert len(stored.keys()) == (3 if step == "remove" else 5)
    assert stored.sweep().unreferenced == (2 if step == "remove" else 4)
    assert stored.keys() == {kept}


_DYING = """
import os, signal, sys
from outbox_pipelines.days.bodies import sweep
sweep._AT_ONCE = 1
remove = sweep.Bodies.remove
sweep.Bodies.remove = lambda *given: (remove(*given), os.kill(os.getpid(), signal.SIGKILL))
from outbox_pipelines.settings import load_settings
print([*sweep.sweep(load_settings())])
"""


def test_a_kill(stored: Stored) -> None:
    """Guards against a lock or a state that a killed sweep leaves behind."""
    kept = stored.write()
    for _ in range(3):
        stored.put()
    stored.close()
    environment = clean_environment() | {
        "OUTBOX_DSN": stored.database.dsn,
        "OUTBOX_BODIES": stored.settings.bodies,
    }
    killed = forks.run([sys.executable, "-c", _DYING], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert len(stored.keys()) == 3
    assert stored.sweep().unreferenced == 2
    assert stored.keys() == {kept}


def test_the_command(stored: Stored) -> None:
    """Guards against a figure that a person misreads, and an exit code that hides days that stay."""
    stored.write()
    stored.put(content=b"12345")
    stored.put(days_ago(1))
    stored.close()
    command = ("bodies", "sweep", "--since", str(DAY))
    shown = stored.outbox(*command, "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert f"{DAY}  2 bodies, 1 to remove (5" in shown.output
    assert f"{days_ago(1)}  1 body, stay: the next day is not over" in shown.output
    found = json.loads(stored.outbox(*command, "--json").stdout)
    assert [(each["objects"], each["unreferenced"], each["size"]) for each in found] == [(2, 1, 5), (1, 0, 0)]
    assert "no bodies" in stored.outbox("bodies", "sweep", "--until", "2026-01-01").output
    for verb in ("sweep", "check"):
        refused = stored.outbox("bodies", verb, "--since", "2026-01-02", "--until", "2026-01-01")
        assert (refused.exit_code, "2026-01-02 is after 2026-01-01: " in refused.stderr) == (2, True)
    stored.put(days_ago(30))
    assert stored.outbox("bodies", "sweep", "--since", str(days_ago(30))).exit_code == 1
    assert f"{days_ago(30)}" not in stored.outbox("bodies", "sweep").output


def test_settings_that_are_refused(database: Database) -> None:
    """Guards against a sweep of another outbox than the settings name, and of no store."""
    nowhere = database.outbox("bodies", "sweep")
    assert (nowhere.exit_code, "set OUTBOX_BODIES" in nowhere.output) == (2, True)
    table = json.dumps(tomllib.loads(textbook.PUBLISHED_AT_MAPPING))
    existing = database.outbox("bodies", "sweep", OUTBOX_BODIES="/tmp", OUTBOX_TABLE=table)
    assert existing.exit_code == 2
    assert "this is for the append-only outbox" in existing.output
