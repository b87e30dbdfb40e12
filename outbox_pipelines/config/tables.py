"""Settings that are tables, and values that stand elsewhere, in `outbox.toml` and in variables.

Invariants:
- In a variable, a table is `name=value,name=value`, or a JSON object.
- `{ env = "VARIABLE" }` and `{ file = "PATH" }` stand for a value that is not written in the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from outbox_pipelines.core.secret import SECRET_NAME, first_line, has_password

_Value = TypeVar("_Value")
_Checked = TypeVar("_Checked")
_KINDS: Final = ("env", "file")
# Of a file that holds a secret: /dev/zero and a backup of a database are none.
_LONGEST: Final = 1_000_000


def as_table(value: Any) -> dict[str, Any]:
    """Return a table as the file has it, or as a variable writes it.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise ValueError("write a table, or name=value,name=value")
    if value.lstrip().startswith("{"):
        try:
            found = json.loads(value)
        except ValueError:
            raise ValueError('is not JSON: write {"name": "value"}, or name=value,name=value') from None
        return dict(found)
    table: dict[str, str] = {}
    for number, part in enumerate(filter(None, (part.strip() for part in value.split(","))), 1):
        name, equals, text = (word.strip() for word in part.partition("="))
        # No part is repeated here: it may be a password.
        if not equals:
            raise ValueError(f"part {number} is not name=value: write name=value,name=value")
        if name in table:
            raise ValueError(f"part {number} has a name that another has: keep one of them")
        table[name] = text
    return table


class EntriesError(ValueError):
    """What is wrong with the entries of a table: the place of each in it, and why."""

    def __init__(self, each: list[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(why for _, why in each))
        self.each = each


def each_checked(
    entries: Iterable[tuple[str, _Value]], check: Callable[[str, _Value], _Checked]
) -> dict[str, _Checked]:
    """Return what `check` makes of each entry, by its name.

    Raises:
        EntriesError: what it raised for entries.
    """
    found: dict[str, _Checked] = {}
    mistakes: list[tuple[tuple[str, ...], str]] = []
    for name, value in entries:
        try:
            found[name] = check(name, value)
        except ValueError as error:
            of_entry = error.each if isinstance(error, EntriesError) else [((), str(error))]
            mistakes += (((name, *place), why) for place, why in of_entry)
    if mistakes:
        raise EntriesError(mistakes)
    return found


def expanded(path: str | Path) -> Path:
    """Return the path, with the home of `~`; as it is written if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_reference(value: Any) -> bool:
    """Return whether a value stands elsewhere."""
    return (
        isinstance(value, dict)
        and len(value) == 1
        and all(kind in _KINDS and isinstance(where, str) for kind, where in value.items())
    )


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value in a table of Kafka's client or of consumers is a secret."""
    if name.rpartition(".")[2] == "dsn":
        return not isinstance(value, str) or has_password(value)
    return bool(SECRET_NAME.search(name))


def resolved(value: Any) -> Any:
    """Return the value, read from where it stands if it is a reference.

    Raises:
        ValueError: the variable is not set, or the file cannot be read.
    """
    if not is_reference(value):
        return value
    [(kind, where)] = value.items()
    if kind == "env":
        if not (found := os.environ.get(where)):
            raise ValueError(f"names {where}, which is not set: set it, or correct the name")
        return found
    try:
        path = expanded(where)
        # A pipe can be read once, and without a writer it is waited for without end.
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open(encoding="utf-8") as file:
            found = file.read(_LONGEST + 1).strip()
    # A path with a NUL is a ValueError.
    except (OSError, ValueError) as error:
        raise ValueError(f"names {where}, which cannot be read: {first_line(error)}") from None
    if not found or len(found) > _LONGEST:
        size = f"has more than {_LONGEST:,} characters" if found else "is empty"
        raise ValueError(f"names {where}, which {size}: write the value into it, or correct the name")
    return found


def beside(value: Any, folder: Path) -> Any:
    """Return a value whose references to files are relative to a folder."""
    if is_reference(value):
        [(kind, where)] = value.items()
        return {kind: str(folder / expanded(where)) if kind == "file" else where}
    if isinstance(value, dict):
        return {key: beside(each, folder) for key, each in value.items()}
    return value
