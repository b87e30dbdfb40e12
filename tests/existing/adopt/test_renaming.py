"""G7: the locks of a change of names, as writers notice them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing.adopt import adopted_table, renaming, steps
from outbox_pipelines.existing.adopt.ddl import TableChange
from tests.existing import guides
from tests.existing.adopt.conftest import Make

KEY = "00000000-0000-0000-0000-000000000001"
_HELD = """
SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.mode IN ('AccessExclusiveLock', 'ExclusiveLock', 'ShareRowExclusiveLock')
  AND c.relname = ANY (%s) AND c.relnamespace = 'public'::regnamespace"""


@pytest.mark.extended
def test_no_lock_is_held_while_the_server_waits_for_the_command(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a slow network or a slow command that makes writers wait."""
    adopted = make(guides.A, archive=str(tmp_path / "archive"))
    adopted.run("adopt", "prepare")
    execute: Any = psycopg.Connection.execute
    seen: list[int] = []
    used = ["outbox", "outbox_adopted"]

    with adopted.connect() as other:

        def watched(connection: Any, *given: Any, **named: Any) -> Any:
            seen.extend(count for (count,) in execute(other, _HELD, [used]))
            return execute(connection, *given, **named)

        monkeypatch.setattr(psycopg.Connection, "execute", watched)
        for step in (adopted.switch, adopted.back, adopted.switch, adopted.drain):
            step()
        # No writer uses the table while it is dropped.
        used.remove("outbox_adopted")
        steps.finish(adopted.settings, drop=True, seconds=30, say=print)
    assert set(seen) == {0}
    assert len(seen) > 50


@pytest.mark.extended
def test_a_change_that_takes_too_long(make: Make) -> None:
    """Guards against writers that wait for a busy server."""
    adopted = make(guides.A)
    adopted.run("adopt", "prepare")
    short = ("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE", "SELECT pg_sleep(0.3)", "DROP TABLE outbox")
    with adopted_table.session(adopted.settings) as connection:
        connection.execute("SET search_path = public, box")
        given: dict[str, Any] = {"seconds": 0.3, "what": "outbox", "held": [], "say": print}
        with pytest.raises(NotReadyError, match="too busy to change it in 100 ms; nothing was changed"):
            renaming.change_names(
                connection, lambda: True, TableChange((), short), sql.SQL("SELECT 1"), **given
            )
    adopted.write((KEY, 0))


@pytest.mark.extended
def test_who_holds_the_table(make: Make) -> None:
    """Guards against a command that waits, and does not say for whom."""
    adopted = make(guides.A)
    adopted.run("adopt", "prepare")
    with adopted.connect_to_write() as connection:
        connection.execute("LOCK TABLE outbox IN ROW EXCLUSIVE MODE")
        _, said = adopted.refuse("adopt", "switch", "--wait-seconds", "0.3")
        process = connection.info.backend_pid
        assert f"End the longest one (process {process} of role " in said
        assert ", idle in transaction, open for " in said
