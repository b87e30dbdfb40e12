"""Rewriting a day, interrupted before each of its steps, and with an edit that does more than it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive import drop, identity, rewrite, store
from outbox_pipelines.days.archive.redact import Redacted, redact
from outbox_pipelines.days.archive.rewrite import Tables
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings
from tests.days.archive.days import days_ago, make_days, manifest, names, publish, rows, write
from tests.schema.servers import Database

DAY = days_ago(3)
STEPS = 20
_INTERRUPTED = "a change of its file was interrupted: run `outbox archive expire`, which completes it"


class _KilledError(BaseException):
    """What no code expects, as a kill."""


@pytest.fixture
def dropped(database: Database, settings: Settings) -> Settings:
    """A dropped day with an event that has a member for each step."""
    make_days(database, DAY)
    write(database, DAY, [{"payload": Jsonb({f"m{n}": n for n in range(STEPS)})}, {"aggregate_id": "other"}])
    publish(database)
    days.archive(settings, DAY)
    drop.drop(settings, DAY)
    return settings


def _killed_before(number: int, act: Callable[[], object]) -> bool:
    """Whether there was such a step, before which the act has ended."""
    left = number

    def counted(step: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            nonlocal left
            # A kill before a statement that only reads is one before the next that writes.
            is_reading = step.__name__ == "execute" and not str(given[1]).lstrip().startswith(("UPD", "INS"))
            left -= not is_reading
            # Those that follow, of cleaning up, do not happen either.
            if left <= 0:
                raise _KilledError
            return step(*given, **named)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (psycopg.Connection, "execute"),
            (psycopg.Cursor, "executemany"),
            (store.Store, "write"),
            (store.Store, "adopt"),
            (store.Store, "remove"),
            (store.Store, "clear"),
        ):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            act()
        except _KilledError:
            return True
    return False


def test_a_day_is_the_former_or_the_new_one_after_a_kill(database: Database, dropped: Settings) -> None:
    """Guards against a day that is neither, a former file that stays, and a change that is recorded twice."""

    def act(number: int) -> Redacted:
        return redact(dropped, DAY, "true", [f"m{number}"], reason="r", actor="a")

    for number in range(STEPS):
        before = rows(dropped, DAY)
        was_killed = _killed_before(number + 1, lambda: act(number))  # noqa: B023
        proof = days.verify(dropped, DAY)
        is_unfinished = bool(proof.differences)
        assert proof.differences in ((), (_INTERRUPTED,)), number
        now = rows(dropped, DAY)
        is_new = now != before
        assert is_unfinished or len(names(dropped, DAY)) == 1
        if number % 2:
            # Without the command being repeated.
            assert identity.unfinished_changes(dropped) == [DAY] * is_unfinished
            rewrite.finish(dropped, DAY)
            assert identity.unfinished_changes(dropped) == []
            assert rows(dropped, DAY) == now
        assert act(number).events == (not is_new)
        assert days.verify(dropped, DAY).equal
        assert names(dropped, DAY) == [manifest(dropped, DAY).file]
        assert [each.names for each in manifest(dropped, DAY).changes] == [
            (f"m{n}",) for n in range(number + 1)
        ]
        assert [each.change for each in identity.recorded_changes(dropped)] == [
            *manifest(dropped, DAY).changes
        ]
        if not was_killed:
            break
    # The number of steps: fewer would mean that they are not counted.
    assert 8 < number < STEPS - 1


def test_an_edit_that_does_more_than_it_may(dropped: Settings) -> None:
    """Guards against a rewrite that loses or changes events without having been asked to."""

    def removing(_: object, tables: Tables) -> Tables:
        yield from (table.slice(1) for table in tables)

    def doubling(_: object, tables: Tables) -> Tables:
        for table in tables:
            yield from (table, table)

    before = manifest(dropped, DAY)
    for edit, says in ((removing, "1 removed, 1 of 2 left"), (doubling, "0 removed, 4 of 2 left")):
        with pytest.raises(
            SetupError, match=r"differ from the former one in more than was asked for .*" + says
        ):
            rewrite.rewrite(
                dropped, DAY, edit, kind="redacted", names=("m1",), reason="r", actor="a", dry_run=False
            )
    assert (manifest(dropped, DAY), len(names(dropped, DAY))) == (before, 1)
