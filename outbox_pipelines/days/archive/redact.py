"""Replace values in events of a dropped day by `outbox-erased`.

Invariants:
- All other text of a payload stays as it is: what is not selected is not parsed to values and written again.
- A path that no selected event has is an error: a misspelled one must not leave a value in silence.
- The condition is not recorded, since it may name whom the values are about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from outbox_pipelines.core.erased import ERASED
from outbox_pipelines.core.text import counted
from outbox_pipelines.database import connect
from outbox_pipelines.days.archive import archive_sql, question
from outbox_pipelines.days.archive.rendering import literal
from outbox_pipelines.days.archive.rewrite import Tables, rewrite
from outbox_pipelines.days.archive.store import open_store
from outbox_pipelines.days.partitions.calendar import bounds_of
from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.settings import DaySettings
from outbox_pipelines.writer.references import MEMBER

_ERASED: Final = json.dumps(ERASED)
_STEP: Final = re.compile(r"([^\[\]]*)((?:\[\])*)")
# A text, with the colon if it is the name of a member; a bracket; another value.
_TOKEN: Final = re.compile(r'("(?:[^"\\]++|\\.)*+")(\s*+:)?|[\[{]|[\]}]|[^\s,:"\[\]{}]++')
Steps = tuple[str | None, ...]
"""A path: names of members, and None for each item of a list."""


@dataclass(frozen=True, slots=True)
class Redacted:
    """The result of `redact`."""

    selected: int
    """Events that meet the condition."""
    events: int
    """Of these, events with a value that had not been redacted before; with 0, nothing was written."""
    rows: int
    """Events of the day."""
    copies: tuple[str, ...]
    """Where else this database and archive may have the former values."""


def redact(
    settings: DaySettings,
    day: date,
    where: str,
    paths: Sequence[str],
    headers: Sequence[str] = (),
    *,
    reason: str,
    actor: str,
    dry_run: bool = False,
) -> Redacted:
    """Replace values in the selected events of a dropped day.

    Args:
        where: a condition in DuckDB's SQL on the columns of the archive.
        paths: of members of payloads, such as `customer.email`, or `lines[].name` for each item of a list.
        headers: names of headers.
        actor: on whose behalf.
        dry_run: write nothing.

    Raises:
        NotReadyError: no event is selected; or as `rewrite`.
        SetupError: a path is not valid, is within another one, or no selected event has it; the condition
            cannot be evaluated; or as `rewrite`.
        UnavailableError: as `rewrite`.
    """
    question.require_condition(where)
    redaction = _Redaction(day, where, {"payload": {}, "headers": {}})
    _refuse_overlap(paths)
    for path in paths:
        redaction.asked["payload"][_steps(path)] = path
    for header in headers:
        redaction.asked["headers"][(header,)] = f"header {header}"
    names = tuple(name for column in redaction.asked.values() for name in column.values())
    if not names:
        raise SetupError("nothing is to be redacted: give --path or --header")
    done = rewrite(
        settings,
        day,
        redaction.edit,
        kind="redacted",
        names=names,
        reason=reason,
        actor=actor,
        dry_run=dry_run,
    )
    return Redacted(redaction.selected, done.events, done.rows, _copies(settings, day))


@dataclass
class _Redaction:
    day: date
    where: str
    asked: dict[str, dict[Steps, str]]
    """What the paths are called, by column and path."""
    selected: int = 0
    found: set[str] = field(default_factory=set)

    def edit(self, file: Path, tables: Tables) -> Tables:
        """Yield the rows with the values replaced."""
        is_selected = _selected(file, self.where)
        self.selected = int(is_selected.sum())
        if not self.selected:
            raise NotReadyError(
                f"no event of {self.day} meets --where, nothing was changed: check the condition with "
                "`outbox archive query`"
            )
        start = 0
        for table in tables:
            rows = np.flatnonzero(is_selected[start : start + table.num_rows])
            start += table.num_rows
            for column in self.asked if len(rows) else ():
                place = table.schema.get_field_index(column)
                texts = table.column(place).to_pylist()
                for row in rows:
                    texts[row] = self._erased(column, texts[row])
                kind = table.schema.field(place)
                table = table.set_column(place, kind, pa.array(texts, kind.type))
            yield table
        names = (name for column in self.asked.values() for name in column.values())
        if missing := [name for name in names if name not in self.found]:
            raise SetupError(
                f"no selected event of {self.day} has {missing[0]}: correct it, or leave it out; nothing was "
                "changed"
            )

    def _erased(self, column: str, text: str | None) -> str | None:
        if text is None:
            return None
        asked = self.asked[column]
        text, found = erased(text, asked)
        self.found.update(asked[steps] for steps in found)
        return text


def erased(text: str, paths: Iterable[Steps]) -> tuple[str, set[Steps]]:
    """Return a JSON text with `outbox-erased` for the values at these paths, and the paths that it has."""
    parts: list[str] = []
    found: set[Steps] = set()
    # Paths to or through the next value, each with the number of steps that lead to it.
    here = [(path, 0) for path in paths]
    # The same of each open list and object, and whether it is a list.
    within: list[tuple[bool, list[tuple[Steps, int]]]] = []
    # Where the last erased value ended, and how deep the one is that is being erased.
    end, depth = 0, -1
    for token in _TOKEN.finditer(text):
        if token[2]:
            here = _through(within[-1][1], json.loads(token[1]))
            continue
        if token[0] in "]}":
            within.pop()
        else:
            if within and within[-1][0]:
                here = within[-1][1]
            ended = [path for path, steps in here if steps == len(path)]
            found.update(ended)
            if ended and depth < 0:
                parts += text[end : token.start()], _ERASED
                depth = len(within)
            if token[0] == "[":
                within.append((True, _through(here, None)))
            elif token[0] == "{":
                within.append((False, here))
        if depth == len(within):
            end, depth = token.end(), -1
    return "".join(parts) + text[end:], found


def _through(paths: Iterable[tuple[Steps, int]], step: str | None) -> list[tuple[Steps, int]]:
    return [(path, taken + 1) for path, taken in paths if taken < len(path) and path[taken] == step]


def _steps(path: str) -> Steps:
    steps: list[str | None] = []
    for part in path.split("."):
        matched = _STEP.fullmatch(part)
        if matched is None or not (matched[1] or (matched[2] and not steps)):
            raise SetupError(
                f"--path {path!r} is not the path of a member: write customer.email, or lines[].name for "
                "each item of a list"
            )
        steps += [*([matched[1]] if matched[1] else []), *[None] * (len(matched[2]) // 2)]
    if steps[0] == MEMBER:
        raise SetupError(
            f"--path {path!r} is in the reference to a body, which stays: delete the body in OUTBOX_BODIES; "
            "`outbox bodies check` then names its event"
        )
    return tuple(steps)


def _refuse_overlap(paths: Sequence[str]) -> None:
    for outer, inner in permutations(paths, 2):
        steps = _steps(outer)
        if _steps(inner)[: len(steps)] == steps:
            raise SetupError(
                f"--path {outer} and --path {inner} overlap: give --path {outer} alone to replace all of it, "
                "or leave it out"
            )


def _selected(file: Path, where: str) -> NDArray[np.bool_]:
    """Return of each row of a file whether it meets a condition."""
    selected = np.zeros(pq.read_metadata(file).num_rows, bool)
    query = archive_sql.SELECTED.format(file=literal(str(file)), where=where)
    with (
        TemporaryDirectory(prefix="outbox-redact-") as folder,
        question.locked([str(file)], folder) as connection,
    ):
        try:
            for batch in connection.sql(query).to_arrow_reader():
                selected[batch.column(0).to_numpy()] = True
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise question.rejected_condition(error) from None
    return selected


def _copies(settings: DaySettings, day: date) -> tuple[str, ...]:
    start, stop = bounds_of(day)
    with connect(settings, name="outbox archive redact") as connection:
        parameters = {"day": day, "start": start, "stop": stop}
        ((restored, parked),) = connection.execute(archive_sql.COPIES, parameters)
    return (
        *([f"the table {restored}"] if restored else []),
        *([f"{counted(parked, 'dead letter')} in outbox_parked"] if parked else []),
        *open_store(settings).kept(day),
    )
