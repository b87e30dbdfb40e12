"""The files of `sql/`, which versions run with what they have made, and statements for other migration tools.

Invariants:
- Each statement finds out itself what is missing: it can be run again, or saved and run elsewhere.
- A file is one statement without placeholders, so that every driver runs it, in the tool's own transaction.
- A version runs with its own tables and with newer ones of which no file needs a later version.
- A statement does not change the session's search_path.
- The first line of a file states its locks. A file takes nothing away that an earlier one has made.
- Writers wait 50 ms at a time for it at most: it gives up a lock that is not free, and tries for a minute.
  What a tool's transaction has changed stays locked until that transaction ends.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from outbox_pipelines import __version__
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)


def files(part: str = "") -> list[Path]:
    """Return the files of `sql/`, or of one of its folders, in order."""
    package = Path(__file__).parents[1]
    # In a checkout the files are next to the package, in an installation inside it.
    folder = package / "sql" if (package / "sql").is_dir() else package.parent / "sql"
    return sorted((folder / part).glob("*.sql"))


def locks(file: Path) -> dict[str, str]:
    """Return which locks, stronger than a writer's, a file takes on existing tables: the mode by table."""
    stated = _text(file).partition("\n")[0].removeprefix(_LOCKS)
    parts = [] if stated == "none" else [each.partition(" ") for each in stated.split(", ")]
    return {table: mode for table, _, mode in parts}


def require(part: str, applied: Mapping[str, str | None], what: str, remedy: str) -> None:
    """Raise `SetupError` if this version does not run with what these files have made; warn if it is newer.

    Args:
        part: the folder of `sql/`.
        applied: the version that each applied file needs, by its name.
        what: what they have made.
        remedy: what to do if files are missing.
    """
    names = [file.stem for file in files(part)]
    if missing := [name for name in names if name not in applied]:
        older = f"is older than outbox-pipelines {__version__}: it " if applied else ""
        raise SetupError(f"{what} {older}lacks {', '.join(missing)}: {remedy}")
    if unknown := sorted(set(applied) - set(names)):
        newer = f"{what} is newer than outbox-pipelines {__version__} ({', '.join(unknown)})"
        if needs := [version for name in unknown if (version := applied[name])]:
            raise SetupError(f"{newer} and needs {needs[-1]}: install that version, or a later one")
        _LOG.warning("%s, which runs with it: install the version that made it", newer)


def is_ours(table: str) -> bool:
    """Return whether a table or view of this name belongs to the outbox."""
    return table in _made("TABLE") + _made("VIEW") or _DAY.fullmatch(table) is not None


def creating(schema: str | None = None, these: Iterable[Path] | None = None) -> list[str]:
    """Return statements that apply the missing files of `sql/` to a schema, and create it if necessary.

    Args:
        schema: None for the first existing one of the search_path.
        these: the files; None for all.
    """
    applied = files() if these is None else these
    return [_in_schema(schema, _APPLY % (file.stem, _text(file))) for file in applied]


def dropping(schema: str | None = None, *, even_if_unpublished: bool = False) -> str:
    """Return a statement that drops the outbox, if it exists.

    Unless `even_if_unpublished`, it fails if some events are neither published nor discarded. Writers are
    locked out between that check and the drop.
    """
    # Dependent objects first.
    drops = [
        f"DROP {kind} IF EXISTS {', '.join(names)};"
        for kind in ("VIEW", "TABLE", "SEQUENCE", "FUNCTION")
        if (names := _made(kind))
    ]
    guard = "" if even_if_unpublished else _GUARD
    return _in_schema(schema, _DROP % (guard, "\n        ".join(drops)))


_LOCKS: Final = "-- Locks: "
_DAY: Final = re.compile(r"outbox_\d{8}")
_MADE: Final = re.compile(r"^CREATE (TABLE|VIEW|SEQUENCE|FUNCTION) (\w+)", re.MULTILINE)


@functools.cache
def _made(kind: str) -> tuple[str, ...]:
    return tuple(name for file in files() for what, name in _MADE.findall(_text(file)) if what == kind)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _in_schema(schema: str | None, body: str) -> str:
    wanted = "NULL" if schema is None else "'" + schema.replace("'", "''") + "'"
    return _BLOCK % (wanted, body)


# The lock is that of `outbox migrate`.
_BLOCK: Final = """\
DO $outbox$
DECLARE
    wanted text := coalesce(%s, current_schema());
    path text := current_setting('search_path');
    patience text := current_setting('lock_timeout');
    until timestamptz := clock_timestamp() + interval '1 minute';
    applied boolean := false;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('outbox migrate'));
    PERFORM set_config('search_path', quote_ident(wanted), true);
%s
    PERFORM set_config('search_path', path, true);
END $outbox$"""

_APPLY: Final = """\
    IF to_regnamespace(quote_ident(wanted)) IS NULL THEN
        EXECUTE format('CREATE SCHEMA %%I', wanted);
    END IF;
    IF to_regclass('outbox_migrations') IS NOT NULL THEN
        applied := EXISTS (SELECT FROM outbox_migrations WHERE name = '%s');
    END IF;
    WHILE NOT applied LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '50ms', true);
            EXECUTE $outbox_file$
%s
$outbox_file$;
            applied := true;
        EXCEPTION WHEN lock_not_available THEN
            IF clock_timestamp() > until THEN
                RAISE;
            END IF;
            PERFORM pg_sleep(1);
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', patience, true);"""

_DROP: Final = """\
    IF to_regclass('outbox_migrations') IS NOT NULL THEN
        LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE;
%s
        %s
    END IF;"""

# A parked event is kept when its day is dropped; it is not in the view then.
_GUARD: Final = """\
        IF EXISTS (SELECT FROM outbox_events WHERE status = 'PENDING')
           OR EXISTS (SELECT FROM outbox_parked WHERE state <> 'discarded')
           OR EXISTS (SELECT FROM outbox_delayed) THEN
            RAISE EXCEPTION 'outbox: there are events that are not published, nothing was dropped'
                USING HINT = 'See `outbox status`. Publish them with `outbox relay --until-empty`; discard '
                             'dead letters; cancel delayed events; or say that they may be lost.';
        END IF;"""
