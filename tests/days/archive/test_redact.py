"""Redacting a dropped day: what is to go is gone, all else is as it was, and the proof holds."""

from __future__ import annotations

import json
import random
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import drop, open_archive, restore
from outbox_pipelines.days.archive.redact import _steps, erased
from outbox_pipelines.days.partitions import calendar
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings
from tests.days.archive import buckets
from tests.days.archive.days import (
    NUMBERS,
    days_ago,
    edit_manifest,
    file,
    make_days,
    manifest,
    names,
    publish,
    rows,
    write,
    write_shapes,
)
from tests.schema.servers import Database

DAY = days_ago(3)
PERSON = {"customer": {"email": "a@example.com", "since": 1.10}, "lines": [{"name": "A"}, {"name": "B"}, {}]}
OTHER = {"customer": {"email": "b@example.com"}}


def outbox(database: Database, settings: Settings, *arguments: str, **environment: str) -> Result:
    return database.outbox("archive", *arguments, OUTBOX_ARCHIVE=settings.archive, **environment)


def redact(database: Database, settings: Settings, *arguments: str, day: date = DAY) -> Result:
    return outbox(database, settings, "redact", str(day), "--reason", "request 17", *arguments)


@pytest.fixture
def dropped(database: Database, settings: Settings) -> Settings:
    """A dropped day with events of all shapes, and those of two persons."""
    make_days(database, DAY)
    write_shapes(database, DAY)
    write(
        database,
        DAY,
        [
            {"payload": Jsonb(PERSON), "headers": Jsonb({"user": "a", "tenant": "7"}), "aggregate_id": "p"},
            {"payload": Jsonb(OTHER), "headers": Jsonb({"user": "b"}), "aggregate_id": "o"},
        ],
    )
    publish(database)
    days.archive(settings, DAY)
    drop.drop(settings, DAY)
    return settings


def at(path: str, text: str) -> str:
    return erased(text, [_steps(path)])[0]


def test_only_the_value_at_a_path_is_replaced() -> None:
    """Guards against a number that is rounded, a member of the same name elsewhere, and escapes."""
    text = (
        '{"a": {"b": ' + "1" * 5000 + '.50, "c": [1e400, {"b": "x"}]}, "b": "}\\"b\\": 1", "\\u00e9": null}'
    )
    assert at("a.b", text) == text.replace("1" * 5000 + ".50", '"outbox-erased"')
    assert at("a.c[].b", text) == text.replace('"x"', '"outbox-erased"')
    assert at("a.c[]", text) == text.replace('1e400, {"b": "x"}', '"outbox-erased", "outbox-erased"')
    assert at("é", text) == text.replace("null", '"outbox-erased"')
    assert at("a", text)[:30] == '{"a": "outbox-erased", "b": "}'
    assert at("b", text).endswith('"b": "outbox-erased", "\\u00e9": null}')
    assert at("[][].n", '[[{"n": []}], {"n": 1}]') == '[[{"n": "outbox-erased"}], {"n": 1}]'
    for nowhere in ("c", "a.b.c", "b[]", "[]", "a[].b", "A", "a.c.b"):
        assert erased(text, [_steps(nowhere)]) == (text, set())
    deep = "[" * 100_000 + "]" * 100_000
    assert at("a", deep) == deep


@pytest.mark.parametrize("path", ["", ".", "a..b", "a.", "a[", "a[0]", "a]", "a.[]", "[]a", "a[]b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    """Guards against a path that is understood in another way than it was meant."""
    with pytest.raises(SetupError, match="is not the path of a member: write customer"):
        _steps(path)


def test_any_json_stays_valid() -> None:
    """Guards against a text that is cut at the wrong place: against Python's own parser."""
    chance = random.Random(1)

    def value(depth: int) -> Any:
        kind = chance.randrange(3 if depth else 2, 6 if depth < 4 else 4)
        if kind == 5:
            return {
                chance.choice(["a", "b", 'q"', "\\"]): value(depth + 1) for _ in range(chance.randrange(4))
            }
        if kind == 4:
            return [value(depth + 1) for _ in range(chance.randrange(3))]
        return chance.choice([1, -2.5, True, None, "", "a", '"]}', "\\", "\n", "é", ":"])

    def expected(found: Any, steps: list[str | None]) -> Any:
        if not steps:
            return "outbox-erased"
        step, *rest = steps
        if isinstance(found, dict):
            return {name: expected(each, rest) if name == step else each for name, each in found.items()}
        return [expected(each, rest) for each in found] if step is None and isinstance(found, list) else found

    for _ in range(3000):
        steps = [chance.choice(["a", "b", 'q"', "\\", None]) for _ in range(chance.randrange(1, 4))]
        given = {"a": value(1), "b": value(1)}
        assert json.loads(erased(json.dumps(given), [tuple(steps)])[0]) == expected(given, steps)


def test_a_redacted_day(database: Database, dropped: Settings) -> None:
    """Guards against a value that stays, another that changes, and a proof that no longer holds."""
    before, former = rows(dropped, DAY), manifest(dropped, DAY)
    where = ("--where", "payload->>'$.customer.email' = 'a@example.com'")
    paths = ("--path", "customer.email", "--path", "lines[].name", "--header", "user")
    dry = outbox(database, dropped, "redact", str(DAY), *where, *paths, "--dry-run")
    assert (dry.exit_code, dry.stdout) == (
        0,
        f"{DAY}: 1 of {len(before)} events selected, 1 would be changed\n",
    )
    assert manifest(dropped, DAY) == former
    done = redact(database, dropped, *where, *paths)
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("1 changed; the former file is deleted\n")
    now = manifest(dropped, DAY)
    assert names(dropped, DAY) == [now.file]
    assert b"a@example.com" not in file(dropped, DAY).read_bytes()
    after = rows(dropped, DAY)
    changed = [n for n, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    [(one, other)] = [(before[n], after[n]) for n in changed]
    assert {name for name in one if one[name] != other[name]} == {"payload", "headers"}
    gone = '"outbox-erased"'
    assert other["payload"] == one["payload"].replace('"a@example.com"', gone).replace('"A"', gone).replace(
        '"B"', gone
    )
    assert json.loads(other["headers"]) == {"user": "outbox-erased", "tenant": "7"}
    # By PostgreSQL's own equality, with all digits.
    numbers = next(row["payload"] for row in after if row["aggregate_type"] == "number")
    assert database.value("SELECT %s::jsonb = %s::jsonb", numbers, NUMBERS)
    # The chain, in the manifest and in the database; not the condition, which names the person.
    [change] = now.changes
    assert (change.sha256, change.rows_before, change.rows_after) == (former.sha256, len(before), len(before))
    assert change.names == ("customer.email", "lines[].name", "header user")
    assert "a@example.com" not in now.model_dump_json()
    verified = outbox(database, dropped, "verify", str(DAY))
    assert verified.exit_code == 0
    said = f"customer.email, lines[].name, header user redacted in 1 event on {change.at:%Y-%m-%d} by "
    assert verified.stdout.splitlines()[1].startswith(f"changed: {said}")
    listed = outbox(database, dropped, "changes")
    assert listed.stdout == f"{DAY}: {change}\n"
    [shown] = json.loads(outbox(database, dropped, "changes", "--json").stdout)
    assert shown["change"] == change.model_dump(mode="json")
    # Once more: nothing is left to do.
    again = redact(database, dropped, *where, *paths)
    assert (again.exit_code, again.output.count("no event of")) == (1, 1)
    all_again = redact(
        database, dropped, "--where", "payload->>'customer' IS NOT NULL", "--path", "lines[].name"
    )
    assert all_again.stdout.endswith("2 of 25 events selected, 0 changed; nothing was left to change\n")
    assert manifest(dropped, DAY) == now


def test_it_is_restored_as_it_was_redacted(database: Database, dropped: Settings) -> None:
    """Guards against a restore that fails at the new proof, or hides that rows differ from those written."""
    assert redact(database, dropped, "--where", "true", "--path", "customer.email").exit_code == 0
    shown = outbox(database, dropped, "restore", str(DAY), "--attach")
    assert shown.exit_code == 0, shown.output
    assert "changed: customer.email redacted in 2 events" in shown.stdout
    assert (
        database.value("SELECT count(*) FROM outbox WHERE payload #>> '{customer,email}' = 'outbox-erased'")
        == 2
    )
    refused = redact(database, dropped, "--where", "true", "--path", "lines[].name")
    assert refused.exit_code == 1
    assert (
        f"{DAY} is archived, and its rows are in the table: run `outbox partitions drop {DAY}`"
        in refused.stderr
    )
    drop.drop(dropped, DAY)
    assert redact(database, dropped, "--where", "true", "--path", "lines[].name").exit_code == 0
    assert [each.names for each in manifest(dropped, DAY).changes] == [("customer.email",), ("lines[].name",)]
    assert [each["day"] for each in json.loads(outbox(database, dropped, "changes", "--json").stdout)] == [
        str(DAY)
    ] * 2
    again = outbox(database, dropped, "day", str(DAY), "--again")
    assert (again.exit_code, "cannot be written again without rows" in again.stderr) == (1, True)


def test_what_is_refused_changes_nothing(database: Database, dropped: Settings) -> None:
    """Guards against a slip that leaves a value in silence, and against SQL that reads other files."""
    before = manifest(dropped, DAY), names(dropped, DAY)
    for where, paths, code, says in (
        ("aggregate_id = 'x'", ("--path", "customer.email"), 1, f"no event of {DAY} meets --where"),
        ("true", ("--path", "customer.emial"), 2, f"no selected event of {DAY} has customer.emial"),
        ("true", ("--path", "customer.email", "--header", "usr"), 2, "has header usr"),
        ("aggregate_id = 'o'", ("--path", "lines[].name"), 2, "has lines[].name"),
        ("true", ("--path", "a..b"), 2, "'a..b' is not the path of a member"),
        ("true", ("--path", "outbox-body.key"), 2, "is in the reference to a body"),
        ("true", ("--path", "lines[].name", "--path", "lines"), 2, "lines and --path lines[].name overlap"),
        ("true", ("--path", "customer", "--path", "customer"), 2, "--path customer and --path customer over"),
        ("true", (), 2, "give --path or --header"),
        ("colour = 'x'", ("--path", "a"), 2, "--where cannot be evaluated"),
        ("random() < 2", ("--path", "a"), 2, "--where has random, whose value changes"),
        ("id IN (SELECT content FROM read_text('/etc/passwd'))", ("--path", "a"), 2, "--where cannot be"),
        ("true) OR (true", ("--path", "a"), 2, "--where is not a condition in SQL"),
        (" ", ("--path", "a"), 2, "the text is empty"),
    ):
        done = redact(database, dropped, "--where", where, *paths)
        assert (done.exit_code, done.stdout) == (code, ""), where
        assert says in done.stderr
    assert (manifest(dropped, DAY), names(dropped, DAY)) == before
    assert database.value("SELECT count(*) FROM outbox_archive_changes") == 0


@pytest.mark.extended
def test_days_that_cannot_be_redacted(database: Database, dropped: Settings) -> None:
    """Guards against a new file that is made of an unproven one, and against two changes at the same time."""
    asked = ("--where", "true", "--path", "customer.email")
    unknown = redact(database, dropped, *asked, day=date(2020, 1, 1))
    assert (unknown.exit_code, "is not a day of the outbox" in unknown.stderr) == (2, True)
    later = calendar.read(dropped)[-1].day
    not_yet = redact(database, dropped, *asked, day=later)
    assert (not_yet.exit_code, f"{later} is open" in not_yet.stderr) == (1, True)
    assert f"run `outbox archive day {later}`, which closes" in not_yet.stderr
    assert f"and then `outbox partitions drop {later}` first" in not_yet.stderr
    no_reason = outbox(database, dropped, "redact", str(DAY), *asked)
    assert (no_reason.exit_code, "say why" in no_reason.stderr) == (2, True)
    with calendar.working_at(dropped, DAY):
        busy = redact(database, dropped, *asked)
        assert (busy.exit_code, "wait until it ends" in busy.stderr) == (1, True)
    content = bytearray(file(dropped, DAY).read_bytes())
    content[len(content) // 2] ^= 1
    file(dropped, DAY).write_bytes(content)
    damaged = redact(database, dropped, *asked)
    assert (damaged.exit_code, f"{DAY} is not changed: " in damaged.stderr) == (2, True)
    assert "has changed since it was written" in damaged.stderr


def test_a_made_up_change_is_found(database: Database, dropped: Settings) -> None:
    """Guards against a proof that believes the archive's own chain, and an adoption that forgets it."""
    former = file(dropped, DAY).name
    assert redact(database, dropped, "--where", "true", "--path", "customer.email").exit_code == 0
    recorded = database.value("SELECT manifest_sha256 FROM outbox_days WHERE day = %s", DAY)
    change = json.loads(manifest(dropped, DAY).changes[0].model_dump_json())
    edit_manifest(dropped, DAY, changes=[change, change | {"manifest_sha256": recorded, "reason": "forged"}])
    forged = outbox(database, dropped, "verify", str(DAY))
    assert forged.exit_code == 1
    assert (
        "is not the one that was written: it was changed since. If the database was restored" in forged.stderr
    )
    # What an operator says after a restore of the database.
    adopted = outbox(database, dropped, "adopt")
    assert (adopted.exit_code, f"{DAY}: this database did not know of its changes" in adopted.stderr) == (
        0,
        True,
    )
    assert outbox(database, dropped, "verify", str(DAY)).exit_code == 0
    # The database has the chain again, and knows whether a former file is left.
    changes = outbox(database, dropped, "changes").stdout
    assert sorted(each.rpartition(": ")[2] for each in changes.splitlines()) == ["forged", "request 17"]
    recorded = database.value("SELECT manifest_sha256 FROM outbox_days WHERE day = %s", DAY)
    chain = [json.loads(each.model_dump_json()) for each in manifest(dropped, DAY).changes]
    edit_manifest(dropped, DAY, changes=[*chain, change | {"manifest_sha256": recorded, "reason": "third"}])
    file(dropped, DAY).with_name(former).write_bytes(b"")
    assert outbox(database, dropped, "adopt").exit_code == 0
    assert "third (interrupted: run `outbox archive expire`)" in outbox(database, dropped, "changes").stdout


def test_a_former_file_that_a_backup_brought_back(database: Database, dropped: Settings) -> None:
    """Guards against redacted values that other readers see again, while the proof says nothing."""
    former = file(dropped, DAY)
    content = former.read_bytes()
    assert redact(database, dropped, "--where", "true", "--path", "customer.email").exit_code == 0
    former.write_bytes(content)
    foreign = former.with_name("copy.parquet")
    foreign.write_bytes(content)
    found = outbox(database, dropped, "verify", str(DAY))
    lines = [line for line in found.stderr.splitlines() if line.endswith("delete it")]
    assert (found.exit_code, found.stdout) == (1, "")
    assert [line.partition(" is not the file of this day")[0] for line in lines] == [
        f"outbox: {DAY}: {each}" for each in (foreign, former)
    ]
    # The manifest of the backup, too: the file that the database knows is not to be deleted.
    edit_manifest(dropped, DAY, file=former.name)
    assert "delete it" not in outbox(database, dropped, "verify", str(DAY)).stderr


@pytest.mark.extended
def test_in_a_bucket(database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a former file that stays in a bucket, and a manifest that cannot be replaced there."""
    make_days(database, DAY)
    write(database, DAY, [{"payload": Jsonb(PERSON)}])
    publish(database)
    with buckets.serving() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        within = settings.model_copy(update={"archive": f"{buckets.URL}/redact"})
        days.archive(within, DAY)
        drop.drop(within, DAY)
        before = {name for name in buckets.names(environment) if "/redact/" in name}
        done = redact(database, within, "--where", "true", "--path", "customer.email")
        assert done.exit_code == 0, done.output
        after = {name for name in buckets.names(environment) if "/redact/" in name}
        [gone], [new] = before - after, after - before
        assert gone.rpartition("/")[0] == new.rpartition("/")[0]
        assert outbox(database, within, "verify", str(DAY)).exit_code == 0
        relation = open_archive(within.archive).relation(columns=["payload"])
        assert "outbox-erased" in str(relation.fetchall())


@pytest.mark.extended
def test_where_the_values_may_still_be(database: Database, dropped: Settings) -> None:
    """Guards against copies in the same database and archive that an operator forgets."""
    restore.restore(dropped, DAY)
    kept = Path(dropped.archive) / "_outbox" / "kept" / str(DAY) / "events-0.parquet.kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    done = redact(database, dropped, "--where", "true", "--path", "customer.email")
    assert done.exit_code == 0
    places = [line.rpartition("may still have the values: ")[2] for line in done.stderr.splitlines()]
    assert places == [f"the table outbox_restored_{DAY:%Y%m%d}", str(kept)]


def test_others_may_not(database: Database, dropped: Settings) -> None:
    """Guards against a role that destroys what it may only read."""
    role = database.role()
    database.rows(f"SELECT outbox_grant_operator('{role}')")
    before = names(dropped, DAY)
    asked = (str(DAY), "--where", "true", "--path", "customer.email", "--reason", "r")
    dsn = make_conninfo(dropped.require_dsn(), user=role)
    done = outbox(database, dropped, "redact", *asked, OUTBOX_DSN=dsn)
    assert (done.exit_code, "only the role that owns the outbox can change" in done.stderr) == (2, True)
    assert names(dropped, DAY) == before
    assert outbox(database, dropped, "changes", OUTBOX_DSN=dsn).exit_code == 0
    assert outbox(database, dropped, "verify", str(DAY), OUTBOX_DSN=dsn).exit_code == 0
