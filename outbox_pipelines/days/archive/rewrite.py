"""Write the file of a dropped day again, with some of its rows changed or removed.

Invariants:
- The former file is proven before it is read. The new one is compared with it, row by row: nothing but what
  was asked for has changed.
- The former file is deleted in the end. Until then the day is as it was or as it becomes, whenever the
  process is killed: the database records both manifests before one replaces the other. `finish`, and the next
  change of the day, complete a change whose manifest is written, and remove what is left of another one.
- The manifest has the chain of changes: what was changed, and the digests of what was replaced. The database
  has the same: who can write into the archive alone cannot make up a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import Connection
from outbox_pipelines.days.archive import archive_sql, identity, proof
from outbox_pipelines.days.archive.export import Exported, described, new_file
from outbox_pipelines.days.archive.manifest import Change, Manifest, digest, in_duckdb, now, read_manifest
from outbox_pipelines.days.archive.store import Store, Stored, key, manifest_key, open_store
from outbox_pipelines.days.partitions.calendar import require_day, working_at
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import DaySettings

Tables = Iterator[pa.Table]
Edit = Callable[[Path, Tables], Tables]
"""Yields the rows of the new file, from the former file and its rows, in their order."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The result of `rewrite`."""

    events: int
    """Events that were changed or removed; with 0, nothing was written."""
    rows: int
    """Rows of the former file."""


def rewrite(
    settings: DaySettings,
    day: date,
    edit: Edit,
    *,
    kind: Literal["redacted", "expired"],
    names: tuple[str, ...],
    reason: str,
    actor: str,
    dry_run: bool = False,
) -> Rewritten:
    """Replace the file of a dropped day.

    Args:
        edit: changes rows if `kind` is "redacted", and removes some if it is "expired".
        names: of what is redacted, or of the aggregate types that expire.
        actor: on whose behalf.
        dry_run: write nothing into the archive or the database.

    Raises:
        NotReadyError: the day is not dropped, or it has no archive file; another session works on it.
        SetupError: the outbox has no such day; its file is not proven; this role does not own the outbox.
        UnavailableError: the database or the archive does not answer.
    """
    store = open_store(settings)
    with working_at(settings, day) as connection, _as_owner():
        manifest, former = _proven(store, connection, day)
        if not dry_run:
            _complete(store, connection, manifest, former.content)
        with store.workplace(day) as directory, store.local(key(day, manifest.file)) as source:
            file = directory / "events.parquet"
            of_file = _write(source, file, edit, manifest)
            events = _compare(source, file, manifest, kind, of_file["rows"])
            if dry_run or not events:
                return Rewritten(events, manifest.rows)
            ((role,),) = connection.execute("SELECT session_user::text")
            change = Change(
                at=now(),
                by=f"{role} ({actor})",
                reason=reason,
                kind=kind,
                names=names,
                events=events,
                rows_before=manifest.rows,
                rows_after=of_file["rows"],
                sha256=manifest.sha256,
                manifest_sha256=digest(former.content),
            )
            changed = manifest.model_copy(update={**of_file, "changes": (*manifest.changes, change)})
            content = changed.to_bytes()
            parameters = {"day": day, "former": change.manifest_sha256, "digest": digest(content)}
            if not connection.execute(archive_sql.CHANGING, parameters).fetchall():
                raise NotReadyError(f"{day} was changed at the same time: run the command again")
            store.adopt(file, key(day, changed.file))
        store.write(manifest_key(day), content, former)
        _complete(store, connection, changed, content)
        return Rewritten(events, manifest.rows)


def finish(settings: DaySettings, day: date) -> None:
    """Complete a change that was interrupted, or undo it.

    Raises:
        NotReadyError, SetupError, UnavailableError: as `rewrite`.
    """
    store = open_store(settings)
    with working_at(settings, day) as connection, _as_owner():
        manifest, stored = _proven(store, connection, day)
        _complete(store, connection, manifest, stored.content)


def _proven(store: Store, connection: Connection, day: date) -> tuple[Manifest, Stored]:
    """Return the manifest of a dropped day whose file has just been proven."""
    row = require_day(connection, day)
    if row.state != "dropped":
        archive = f"`outbox archive day {day}`, which closes a day that is over, and then "
        raise NotReadyError(
            f"{day} is {row.state}, and its rows are in the table: run "
            f"{'' if row.state == 'archived' else archive}`outbox partitions drop {day}` first"
        )
    if row.manifest_sha256 is None:
        raise NotReadyError(f"{day} was dropped without an archive: it has no file to change")
    identity.require(store, connection)
    result, stored = proof.verify(store, day, row.manifest_sha256), store.read(manifest_key(day))
    if not result.equal or stored is None:
        raise SetupError(
            f"{day} is not changed: {'; '.join(result.differences)}: restore the archive (OUTBOX_ARCHIVE), "
            f"and run `outbox archive verify {day}`"
        )
    return read_manifest(stored.content, day), stored


def _complete(store: Store, connection: Connection, manifest: Manifest, content: bytes) -> None:
    """Record the day's manifest, and delete all other files of the day."""
    day, actual = manifest.day, digest(content)
    recorded = require_day(connection, day).manifest_sha256 or ""
    if recorded != actual and recorded.endswith(actual):
        identity.record_changes(connection, manifest, content)
    elif recorded != actual:
        # The new manifest was not written.
        connection.execute(archive_sql.CHANGED, {"day": day, "events": manifest.rows, "digest": actual})
    for name in store.others(day, manifest.file):
        store.remove(name)
    store.clear(day)
    connection.execute(archive_sql.FORMER_DELETED, {"day": day})


def _write(source: Path, file: Path, edit: Edit, manifest: Manifest) -> dict[str, Any]:
    """Write the new file; return what it determines of the manifest."""
    exported = Exported()
    with (
        pq.ParquetFile(source, page_checksum_verification=True) as parquet,
        new_file(file, parquet.schema_arrow) as writer,
    ):
        tables = (parquet.read_row_group(number) for number in range(parquet.num_row_groups))
        for table in edit(source, tables):
            if table.num_rows:
                writer.write_table(table)
                for batch in table.combine_chunks().to_batches():
                    exported.add(batch)
    return described(file, exported, manifest.columns)


def _compare(source: Path, file: Path, manifest: Manifest, kind: str, rows: int) -> int:
    """Return how many events were changed or removed; raise `SetupError` if the other happened to any."""
    query = in_duckdb(archive_sql.FILES_DIFFER, manifest.columns)
    # The former file's row groups are the larger ones, and determine the memory.
    ((changed, removed, added),) = proof.read_file(query, source, {"new": str(file)})
    events, others = (changed, removed) if kind == "redacted" else (removed, changed)
    # An event that is there twice is neither of the three.
    if others or added or rows != manifest.rows - removed:
        raise SetupError(
            f"{manifest.day} is not changed: the new file would differ from the former one in more than was "
            f"asked for ({changed:,} events changed, {removed:,} removed, {rows:,} of {manifest.rows:,} left)"
        )
    return int(events)


@contextmanager
def _as_owner() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise SetupError(
            f"{first_line(error)}: only the role that owns the outbox can change archived days"
        ) from None
