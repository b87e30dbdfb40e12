"""Creates the outbox's schema in a database, and reports differences.

Invariants:
- `sql/` is the only description of the schema. What it creates is compared with the existing schema, in
  pg_catalog of the same server: nothing is listed twice.
- Applying is one transaction, under a lock; applied again, it changes nothing.
- Writers wait 50 ms at a time for it at most: it gives up a lock that is not free, and tries again later.
  While it compares, it has no lock on a table of the outbox.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from outbox_pipelines.config import parsed
from outbox_pipelines.core import scripts, sequence
from outbox_pipelines.core.scripts import files
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.table_locks import LimitedSession, is_reading
from outbox_pipelines.database import Connection, connect, schema_sql
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.settings import DaySettings, OutboxSettings

_OLDEST_SERVER: Final = 140000
_BLOCK_WRITERS: Final = {"SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE", "ACCESS EXCLUSIVE"}
# Seconds between two tries to get the locks of a migration.
_PAUSE: Final = 1.0


def migrate(settings: DaySettings, to: str | None = None) -> list[str]:
    """Apply the files of `sql/` that are missing; return their names.

    Args:
        to: the name of the last file to apply.

    Raises:
        SetupError: the database is unavailable, too old, may not be changed, or differs from `sql/`; there is
            no such file, or later ones were applied.
        UnavailableError: another session kept a lock that is needed.
    """
    with _session(settings) as connection:
        name = {"schema": settings.db_schema}
        # IF NOT EXISTS would need the CREATE privilege even if the schema exists.
        if connection.execute(schema_sql.HAS_SCHEMA, name).fetchone() is None:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(settings.db_schema)))
        if dangers := _dangers(connection, settings.db_schema):
            raise SetupError(f"{'; '.join(dangers)}; nothing was changed")
        known, missing = _require_known(_applied(connection), to)
        if known:
            # Before, because comparing takes seconds, in which no writer may wait for the locks of a file.
            _require_equal(connection, settings.db_schema, known, "nothing was changed: ")
            connection.commit()
            _apply_briefly(connection, missing)
        else:
            _apply(connection, missing)
        if missing:
            done = "the files were applied: " if known else "nothing was changed: "
            applied = [file for file in files() if file in known or file in missing]
            _require_equal(connection, settings.db_schema, applied, done)
        if to is None:
            connection.execute(schema_sql.ENSURE_PARTITIONS, {"days": settings.partitions_ahead})
        connection.execute(schema_sql.RECORD, {"lines": _describe(connection, settings.db_schema)})
    return [file.stem for file in missing]


def pending(settings: OutboxSettings, to: str | None = None) -> list[str]:
    """Return what `migrate` would apply, as statements for psql; change nothing. Raises as `migrate` does."""
    with _session(settings) as connection:
        try:
            known, missing = _require_known(_applied(connection), to)
        finally:
            connection.rollback()
    statements = scripts.creating(settings.db_schema, missing)
    if not known:
        return statements
    return [f"-- {_with_locks(file)}\n{each}" for file, each in zip(missing, statements, strict=True)]


def _with_locks(file: Path) -> str:
    """Return a file's name, with its locks and who waits for them."""
    taken = scripts.locks(file)
    modes = set(taken.values())
    waiting = "writers wait while it runs" if modes & _BLOCK_WRITERS else "no writer waits"
    if "ACCESS EXCLUSIVE" in modes:
        waiting = "readers and writers wait while it runs"
    listed = ", ".join(f"{table} {mode}" for table, mode in taken.items())
    return f"{file.stem} (locks: {listed or 'none'}; {waiting})"


def _divided(applied: Collection[str], to: str | None = None) -> tuple[list[Path], list[Path]]:
    """Return the files that are applied, and those that are missing, up to one."""
    known = [file for file in files() if file.stem in applied]
    return known, [file for file in files() if file.stem not in applied and (to is None or file.stem <= to)]


def _require_known(applied: Collection[str], to: str | None) -> tuple[list[Path], list[Path]]:
    """Return the same; raise `SetupError` if the schema is newer, or it cannot come to that file."""
    if newer := _newer(applied):
        raise SetupError(f"{newer}; nothing was changed")
    names = [file.stem for file in files()]
    if to is not None and to not in names:
        raise SetupError(f"--to {to} is no migration of this version: name one of {', '.join(names)}")
    if to is not None and (later := max(applied, default="")) > to:
        raise SetupError(f"--to {to}: {later} was applied, and no migration is undone; nothing was changed")
    return _divided(applied, to)


def _newer(applied: Iterable[str]) -> str | None:
    """Return that the schema is of a newer version, if it is."""
    unknown = sorted(set(applied) - {file.stem for file in files()})
    if not unknown:
        return None
    return (
        f"the schema was made by a newer version of outbox-pipelines ({', '.join(unknown)}): install that "
        "version, or a later one"
    )


def _apply(connection: Connection, missing: Iterable[Path]) -> None:
    for file in missing:
        connection.execute(file.read_bytes())


def _apply_briefly(connection: Connection, missing: list[Path]) -> None:
    """Apply these in one transaction, as soon as no lock has to be waited for."""
    until = time.monotonic() + schema_sql.PATIENCE
    while missing:
        try:
            connection.execute(schema_sql.BRIEFLY)
            _apply(connection, missing)
            connection.commit()
        except psycopg.errors.LockNotAvailable as error:
            connection.rollback()
            if time.monotonic() >= until:
                raise UnavailableError(
                    f"{first_line(error)}: a transaction has kept a lock on the outbox for "
                    f"{schema_sql.PATIENCE:g} s; nothing was changed. End it (SELECT * FROM pg_stat_activity "
                    "ORDER BY xact_start LIMIT 3 finds it), and run `outbox migrate` again"
                ) from None
            time.sleep(_PAUSE)
        else:
            return


def _require_equal(connection: Connection, schema: str, applied: list[Path], consequence: str) -> None:
    if drift := _differences(connection, schema, applied):
        raise SetupError(
            f"the schema differs from what `outbox migrate` creates: {'; '.join(drift[:5])}"
            f"{' and more' if drift[5:] else ''}; {consequence}undo the difference manually "
            "(docs/troubleshooting.md)"
        )


def drift(settings: OutboxSettings) -> list[str]:
    """Return how the database differs from `sql/` and whether its sequence is behind; change nothing."""
    with _session(settings) as connection:
        try:
            applied = _applied(connection)
            if newer := _newer(applied):
                return [newer]
            known, missing = _divided(applied)
            if missing:
                return [f"not applied: {_with_locks(file) if known else file.stem}" for file in missing]
            found = _dangers(connection, settings.db_schema)
            found += _differences(connection, settings.db_schema, known)
            found += [
                f"role {role} has rights on the outbox and none on its schema: the owner of the schema runs "
                f"GRANT USAGE ON SCHEMA {settings.db_schema} TO {role}"
                for (role,) in connection.execute(schema_sql.WITHOUT_SCHEMA, {"schema": settings.db_schema})
            ]
            return found or sequence_problems(connection)
        finally:
            connection.rollback()


def no_position(schema: str) -> SetupError:
    """Return the error of an outbox that lacks rows of `outbox_shards`: nothing says what is published."""
    return SetupError(
        f"the outbox in schema {schema!r} (OUTBOX_SCHEMA) lacks rows of outbox_shards, so its tables were "
        "restored without their rows: restore the dump as a whole"
    )


def connect_to_outbox(settings: OutboxSettings, *, name: str) -> LimitedSession:
    """Open a connection, as `connect` does, to an outbox whose schema is complete.

    Objects that were added manually (such as an index) are allowed; `outbox migrate --check` reports them.
    Settings of an existing table are refused: its database may have the append-only outbox of another one.

    Raises:
        SetupError: the schema or a part of it is missing.
        UnavailableError: the database does not answer.
        LockedError: the session only reads, and another one has locked a table for too long.
    """
    parsed.refuse_existing_table(settings)
    # The connection's own end closes it, and names the session whose lock the check has waited for.
    with ExitStack() as at_failure:
        connection = at_failure.enter_context(connect(settings, name=name))
        _require(connection, settings)
        at_failure.pop_all()
    return connection


def require_schema(settings: OutboxSettings) -> None:
    """Raise `SetupError` if the schema or a part of it is missing; cheap enough for each start of a relay."""
    with connect_to_outbox(settings, name="outbox: schema"):
        pass


def _require(connection: Connection, settings: OutboxSettings) -> None:
    _require_utf8(connection)
    applied = _applied(connection)
    where = f"schema {settings.db_schema!r} (OUTBOX_SCHEMA)"
    if not applied:
        raise SetupError(f"no outbox in {where}: run `outbox migrate`")
    scripts.require("", applied, where, "run `outbox migrate`")
    # A role that may not read the positions relays nothing, and closes no day.
    with suppress(psycopg.errors.InsufficientPrivilege):
        if connection.execute(schema_sql.SHARDS).fetchone() != (True,):
            raise no_position(settings.db_schema)
    hidden = connection.execute(schema_sql.HIDDEN, {"schema": settings.db_schema}).fetchone()
    if hidden is not None and hidden[0]:
        tables, role = hidden
        raise SetupError(
            f"row security of {tables} hides rows from role {role}, so their events would be lost: relay "
            f"as the owner of the tables, or ALTER ROLE {role} BYPASSRLS, or ALTER TABLE … DISABLE ROW "
            "LEVEL SECURITY"
        )
    row = connection.execute(schema_sql.RECORDED).fetchone()
    recorded = set(row[0] or ()) if row else set()
    # Another major version of the server, or another version of ours, prints some definitions
    # differently; the next `outbox migrate` records them.
    is_comparable = f"server {connection.info.server_version // 10000} form {schema_sql.FORM}" in recorded
    described = _describe(connection, settings.db_schema)
    if is_comparable and (lost := recorded - set(described)):
        first = min(lost)
        what, colon, _ = first.partition(": ")
        there = [line.removeprefix(what + colon) for line in described if line.startswith(what + ": ")]
        found = f", but found: {there[0]}" if colon and there else ""
        raise SetupError(
            f"the schema has drifted; missing or changed: {first}{found}; run `outbox migrate --check`"
        )


def sequence_problems(connection: Connection) -> list[str]:
    """Return what is wrong with the sequence of an outbox whose schema is complete."""
    (state,) = connection.execute(sequence.STATE)
    return [problem] if (problem := sequence.behind(*state)) else []


@contextmanager
def _session(settings: OutboxSettings) -> Iterator[Connection]:
    """Open a transaction that has the migration lock."""
    connection = connect(settings, name="outbox migrate")
    with connection:
        if connection.info.server_version < _OLDEST_SERVER:
            version = connection.info.server_version // 10000
            raise SetupError(f"PostgreSQL {version} is not supported: use 14 to 18")
        _require_utf8(connection)
        connection.autocommit = False
        try:
            if not is_reading():
                connection.execute(schema_sql.PATIENTLY)
            connection.execute(schema_sql.LOCK)
            yield connection
        except psycopg.errors.LockNotAvailable as error:
            if is_reading():
                raise
            raise UnavailableError(
                f"{first_line(error)}: waited {schema_sql.PATIENCE:g} s for another session, such as another "
                "`outbox migrate`; nothing was changed: run it again"
            ) from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise SetupError(
                f"{first_line(error)}: `outbox migrate` needs a role that may CREATE in the schema and in "
                "the database, where it compares the tables with a copy (docs/deploy.md)"
            ) from None
        except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateFunction) as error:
            raise SetupError(
                f"{first_line(error)}, and the outbox did not create it; nothing was changed: name another "
                "schema in OUTBOX_SCHEMA"
            ) from None


def _require_utf8(connection: Connection) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise SetupError(
            f"the encoding of the database is {encoding}, which cannot store every event: use a database "
            "with ENCODING 'UTF8'"
        )


def _applied(connection: Connection) -> dict[str, str | None]:
    """Return the version that each applied file needs, by its name."""
    row = connection.execute(schema_sql.IS_THERE).fetchone()
    if row is None or not row[0]:
        return {}
    return dict(connection.execute(schema_sql.APPLIED).fetchall())


def _dangers(connection: Connection, schema: str) -> list[str]:
    """Return how other roles could have their code run with the rights of the outbox's users."""
    found = [
        f"every role may create objects in the schema {name}, and so have its code run with your rights: "
        f"run REVOKE CREATE ON SCHEMA {name} FROM PUBLIC"
        for (name,) in connection.execute(schema_sql.OPEN_TO_ALL, {"schema": schema})
    ]
    return found + [
        f"{what} of another role has the name of a built-in one: drop it, or name another schema in "
        "OUTBOX_SCHEMA"
        for (what,) in connection.execute(schema_sql.SHADOWS, {"schema": schema})
    ]


def _differences(connection: Connection, schema: str, applied: list[Path]) -> list[str]:
    """Compare the schema with a new one, which is made by these files and rolled back."""
    present = set(_describe(connection, schema))
    scratch = f"outbox_check_{uuid.uuid4().hex[:12]}"
    with connection.transaction(force_rollback=True):
        name = sql.Identifier(scratch)
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(name))
        connection.execute(sql.SQL("SET LOCAL search_path = {}, pg_temp").format(name))
        connection.execute(schema_sql.NO_DAYS)
        _apply(connection, applied)
        wanted = set(_describe(connection, scratch))
    return [f"missing: {line}" for line in sorted(wanted - present)] + [
        f"unknown: {line}" for line in sorted(present - wanted)
    ]


def _describe(connection: Connection, schema: str) -> list[str]:
    return [
        line
        for (line,) in connection.execute(schema_sql.DESCRIBE, {"schema": schema, "form": schema_sql.FORM})
    ]
