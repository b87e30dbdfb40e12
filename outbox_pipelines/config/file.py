"""The file `outbox.toml`: what it says, and on which line.

Invariants:
- Its sections are those of the settings; `[outboxes.NAME]` has the entries of `[outbox]`, and sections of its
  own (`[outboxes.NAME.topics]`).
- A secret is not in it: an entry names the environment variable or the file that holds it.
- What is wrong is collected, not raised: `outbox config check` shows all of it. Only a file that cannot be
  read at all, or is not TOML, is an error at once.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic.fields import FieldInfo

from outbox_pipelines.config.sections import RULES, SECTIONS, WHOLE
from outbox_pipelines.config.tables import beside, expanded, is_reference, is_secret, resolved
from outbox_pipelines.config.types import OUTBOX_NAME
from outbox_pipelines.core.secret import first_line, has_password, redacted, register, register_dsn
from outbox_pipelines.errors import SetupError

VARIABLE: Final = "OUTBOX_CONFIG"
"""Names the file; without it, it is `outbox.toml` in the working directory, if that exists."""
NAME: Final = "outbox.toml"
SECRET: Final = frozenset(
    {
        *("dsn", "consumer_dsn", "alerts", "connect_url", "dead_letter_command"),
        *("keys_dsn", "master_key", "registry_token", "registry_user_info"),
    }
)
MAY_BE_PLAIN: Final = frozenset({"dsn", "consumer_dsn", "keys_dsn", "connect_url"})
"""Secrets only if they contain a password."""
# Two outboxes that had them from the same place would be one.
NOT_SHARED: Final = frozenset({"name", "dsn", "table", "connector"})
_OUTBOXES: Final = "outboxes"
_PLACEHOLDER: Final = "{outbox}"
_ELSEWHERE: Final = (
    'is a secret, which is not written here: write {name} = {{ env = "VARIABLE" }} or '
    '{name} = {{ file = "PATH" }}'
)
_HEADER: Final = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]")
_STRING: Final = re.compile(
    r'#[^\n]*|"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL
)
_KEY: Final = re.compile(r"\s*([\w.\-\"' ]+?)\s*=")

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """What the file says about one outbox, or about all."""

    values: dict[str, Any] = field(default_factory=dict)
    """By field of the settings. Secrets are read already."""
    places: dict[str, KeyPath] = field(default_factory=dict)
    """Where each field is, for `ConfigFile.line`."""
    mistakes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that has been read."""

    path: Path
    text: str
    shared: Entries
    outboxes: dict[str, Entries]
    """By name, in the order of the file."""

    def at(self, keys: KeyPath, within: KeyPath = ()) -> str:
        """The file, a line and the name of an entry or a section; the line is of what is wrong within it."""
        lines = _lines(self.text)
        # `sasl.password = …` is a table in a table, and `"sasl.password" = …` is not.
        dotted = [part for each in within for part in each.split(".")]
        line = max(_line(lines, (*keys, *within)), _line(lines, (*keys, *dotted)))
        return f"{self.path} line {line}: {keys[-1]}"

    def for_all(self, name: str) -> Entries:
        """The entries of all outboxes, as they apply to one of this name; if there is only one, its own."""
        if not self.outboxes:
            return self.shared
        values = {key: _filled(value, name) for key, value in self.shared.values.items()}
        return Entries(values, self.shared.places, self.shared.mistakes)

    def of(self, name: str) -> Entries:
        """The entries of an outbox, with those that it shares; its own win."""
        own, shared = self.outboxes[name], self.for_all(name).values
        values = {key: value for key, value in shared.items() if key not in NOT_SHARED} | own.values
        # A wrong name is one mistake, not two.
        if OUTBOX_NAME.fullmatch(name):
            values["name"] = name
        return Entries(values, {**self.shared.places, **own.places}, own.mistakes)


def setting_names() -> dict[str, str]:
    """Return the field of each setting by its name: in lower case, without OUTBOX_."""
    return {
        _name(info, name): name
        for section in SECTIONS.values()
        for name, info in section.model_fields.items()
    }


def config_path() -> Path | None:
    """Return where the file is: what OUTBOX_CONFIG names, or `outbox.toml`; None if there is none.

    Raises:
        SetupError: OUTBOX_CONFIG names no file, or `outbox.toml` is a directory or leads nowhere.
    """
    given = os.environ.get(VARIABLE)
    path = expanded(given or NAME)
    if path.is_file():
        return path
    if given:
        raise SetupError(f"{VARIABLE} names {given}, which is not a file: correct the path or unset it")
    if os.path.lexists(path):
        raise SetupError(f"{path} is not a file: correct or remove it, or name another one in {VARIABLE}")
    return None


def read_config_file() -> ConfigFile | None:
    """Return the file; None if there is none.

    Raises:
        SetupError: it is missing, cannot be read, or is not TOML.
    """
    path = config_path()
    return None if path is None else read_file(path)


def read_file(path: Path) -> ConfigFile:
    """Return a file of this format.

    Raises:
        SetupError: it cannot be read, or is not TOML.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read as UTF-8 text: {first_line(error)}") from None
    try:
        content = tomllib.loads(text)
    # A number of thousands of digits, or thousands of brackets.
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{path} is not TOML: {first_line(error)}") from None
    return _Reader(path, text).read(content)


class _Reader:
    """Turns the content into fields, and collects what is wrong."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = _lines(text)
        self._text = text

    def read(self, content: dict[str, Any]) -> ConfigFile:
        outboxes = content.pop(_OUTBOXES, None)
        shared = Entries()
        self._sections(shared, content, ())
        entries: dict[str, Entries] = {}
        if outboxes is not None and not (outboxes and isinstance(outboxes, dict)):
            self._mistake(shared, (_OUTBOXES,), "names no outbox: write [outboxes.orders] for each")
        outboxes = outboxes if isinstance(outboxes, dict) else {}
        for written, table in outboxes.items():
            # A connection string may have been pasted as a name, and names are printed.
            name, keys = redacted(written), (_OUTBOXES, written)
            own = entries[name] = Entries()
            if not OUTBOX_NAME.fullmatch(name):
                self._mistake(own, keys, "is no name of an outbox: write lower-case letters, digits and _")
            elif not isinstance(table, dict):
                self._mistake(own, keys, f"is no section: write [outboxes.{name}]")
            else:
                # `kafka = "…"` is an entry, and `[kafka]` a section.
                known = {key for key, value in table.items() if isinstance(value, dict)} & {*SECTIONS, *WHOLE}
                sections = {key: table[key] for key in table if key in known}
                rest = {key: value for key, value in table.items() if key not in known}
                self._entries(own, "outbox", rest, keys)
                self._sections(own, sections, keys)
        for setting in sorted(NOT_SHARED & shared.values.keys()) if entries else ():
            self._mistake(
                shared, shared.places[setting], "would be the same for each outbox: write it in each"
            )
        return ConfigFile(self._path, self._text, shared, entries)

    def _sections(self, to: Entries, content: Mapping[str, Any], keys: KeyPath) -> None:
        for section, table in content.items():
            if section in WHOLE and not isinstance(table, dict):
                remedy = "its addresses belong in [outbox]; " if section == "kafka" else ""
                self._mistake(to, (*keys, section), f"is no section: {remedy}write [{section}]")
            elif section in WHOLE:
                to.values[WHOLE[section]] = beside(table, self._path.parent)
                to.places[WHOLE[section]] = (*keys, section)
                if section not in RULES:
                    self._refuse_secrets(to, table, (*keys, section), "")
            elif section not in SECTIONS:
                other = next((each for each in SECTIONS if section in entry_names(each)), None)
                remedy = f"it belongs in [{other}]" if other else _close(section, {**SECTIONS, **WHOLE})
                self._mistake(to, (*keys, section), f"is no section: {remedy}")
            elif not isinstance(table, dict):
                self._mistake(to, (*keys, section), f"is no section: write [{'.'.join((*keys, section))}]")
            else:
                self._entries(to, section, table, (*keys, section))

    def _entries(self, to: Entries, section: str, table: Mapping[str, Any], keys: KeyPath) -> None:
        names = entry_names(section)
        for key, value in table.items():
            at = (*keys, key)
            if key not in names:
                other = next((each for each in SECTIONS if key in entry_names(each)), None)
                remedy = f"it belongs in [{other}]" if other else _close(key, names)
                self._mistake(to, at, f"does not belong in [{section}]: {remedy}")
                continue
            name = names[key]
            if name == "name" and keys[:1] == (_OUTBOXES,):
                self._mistake(to, at, f"is given by the section: remove it from [{'.'.join(keys)}]")
                continue
            try:
                to.places[name] = at
                to.values[name] = self._secret(name, value) if name in SECRET else self._local(name, value)
            except ValueError as error:
                self._mistake(to, at, str(error))

    def _refuse_secrets(self, to: Entries, table: Any, keys: KeyPath, prefix: str) -> None:
        for key, value in table.items() if isinstance(table, dict) else ():
            at, name = (*keys, key), f"{prefix}{key}"
            # With other keys it is a part of a name, as in `sasl.password = …`.
            if isinstance(value, dict) and not {"env", "file"} & value.keys():
                self._refuse_secrets(to, value, at, f"{name}.")
            elif is_secret(name, value) and not is_reference(value):
                register(str(value))
                register_dsn(str(value))
                self._mistake(to, at, _ELSEWHERE.format(name=name), name)

    def _secret(self, name: str, value: Any) -> str:
        if is_reference(value):
            return str(resolved(beside(value, self._path.parent)))
        if isinstance(value, str):
            if name in MAY_BE_PLAIN and not has_password(value):
                return value
            register(value)
            register_dsn(value)
        raise ValueError(_ELSEWHERE.format(name=name))

    def _local(self, name: str, value: Any) -> Any:
        """A path in the file is relative to it."""
        is_directory = name in ("archive", "bodies") and value not in ("", "none") and "://" not in str(value)
        if (name in _PATHS or is_directory) and isinstance(value, str) and not value.startswith("~"):
            return str(self._path.parent / value)
        return beside(value, self._path.parent)

    def _mistake(self, to: Entries, keys: KeyPath, why: str, name: str = "") -> None:
        line = f"{self._path} line {_line(self._lines, keys)}: {name or keys[-1]} {why}"
        # What is printed may be a connection string in a wrong place.
        to.mistakes.append(redacted(line))


def entry_names(section: str) -> dict[str, str]:
    """Return the field of each entry of a section."""
    fields = SECTIONS[section].model_fields
    return {_name(info, name): name for name, info in fields.items() if name not in WHOLE.values()}


def _name(info: FieldInfo, field: str) -> str:
    return (info.alias or field).lower().removeprefix("outbox_")


_PATHS: Final = frozenset(
    name
    for section in SECTIONS.values()
    for name, info in section.model_fields.items()
    if "Path" in str(info.annotation)
)


def _close(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"use {', '.join(known)}"


def _filled(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, name) for key, each in value.items()}
    return value.replace(_PLACEHOLDER, name) if isinstance(value, str) else value


def _lines(text: str) -> dict[KeyPath, int]:
    """The first line of each section and entry. tomllib does not tell it."""
    found: dict[KeyPath, int] = {}
    section: KeyPath = ()
    # A line of a long string may look like a header.
    text = _STRING.sub(lambda one: "\n" * one[0].count("\n") or one[0], text)
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            section = tuple(_parts(header[1]))
            for length in range(1, len(section) + 1):
                found.setdefault(section[:length], number)
        elif key := _KEY.match(line):
            keys = (*section, *_parts(key[1]))
            for length in range(len(section) + 1, len(keys) + 1):
                found.setdefault(keys[:length], number)
    return found


def _line(lines: Mapping[KeyPath, int], keys: KeyPath) -> int:
    """The line of an entry; in an inline table, that of the table."""
    return next((lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), 1)


def _parts(dotted: str) -> Iterator[str]:
    for quoted, bare in re.findall(r"\"([^\"]*)\"|([^\s.\"]+)", dotted.replace("'", '"')):
        yield quoted or bare
