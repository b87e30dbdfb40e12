"""The files of `sql/`, and the same as statements for other migration tools.

Invariants:
- What is missing is found by the statement itself: it can be run again, and written down to be run elsewhere.
- A file is one statement without placeholders, so that every driver runs it, in the tool's own transaction.
- The search_path afterwards is the one before.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final


def files(part: str = "") -> list[Path]:
    """The files of `sql/`, or of a part that has its own folder there, in order."""
    package = Path(__file__).parent
    # In a checkout the files stand beside the package, in an installed one inside it.
    folder = package / "sql" if (package / "sql").is_dir() else package.parent / "sql"
    return sorted((folder / part).glob("*.sql"))


def is_ours(table: str) -> bool:
    """Whether a table or view of this name belongs to the outbox."""
    return table in _made("TABLE") + _made("VIEW") or _DAY.fullmatch(table) is not None


def creating(schema: str | None = None) -> list[str]:
    """Statements that bring what is missing of `sql/` into a schema, which is made if it is not there.

    Without a schema it is the first of the search_path that exists.
    """
    return [_in_schema(schema, _APPLY % (file.stem, _text(file))) for file in files()]


def dropping(schema: str | None = None, *, even_if_unpublished: bool = False) -> str:
    """A statement that drops all of it; where there is nothing, it does nothing.

    It fails while there are events that are neither published nor discarded, unless told otherwise. No writer
    gets between that look and the drop.
    """
    # What depends on another thing goes before it.
    drops = [
        f"DROP {kind} IF EXISTS {', '.join(names)};"
        for kind in ("VIEW", "TABLE", "SEQUENCE", "FUNCTION")
        if (names := _made(kind))
    ]
    guard = "" if even_if_unpublished else _GUARD
    return _in_schema(schema, _DROP % (guard, "\n        ".join(drops)))


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
    IF NOT applied THEN
        EXECUTE $outbox_file$
%s
$outbox_file$;
    END IF;"""

_DROP: Final = """\
    IF to_regclass('outbox_migrations') IS NOT NULL THEN
        LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE;
%s
        %s
    END IF;"""

# A parked event is kept when its day is gone, and then not in the view.
_GUARD: Final = """\
        IF EXISTS (SELECT FROM outbox_events WHERE status = 'PENDING')
           OR EXISTS (SELECT FROM outbox_parked WHERE state <> 'discarded') THEN
            RAISE EXCEPTION 'outbox: there are events that are not published, nothing was dropped'
                USING HINT = 'Publish them with `outbox relay --until-empty`, see `outbox status`, or say '
                             'that they may be lost.';
        END IF;"""
