"""The mutants: each is one edit of one file, of SQL, of a session's or a client's settings, or of a number.

Invariants:
- A mutant's id names the file, the constant or function and the kind, and contains a hash of the text around
  it. It has no line, so it stays the same while the file changes elsewhere.
- Every string of these files that is SQL is mutated, and each file of `sql/`.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutants import sql

ROOT: Final = Path(__file__).parents[2]
_PACKAGE: Final = "outbox_pipelines/"

# The files of an area, and the folders whose tests may find a mutant of them.
AREAS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "relay": (
        (
            *("relay/relay_sql.py", "relay/parking/parking_sql.py", "relay/lease/*.py", "relay/*.py"),
            *(
                "relay/read/*.py",
                "relay/kafka/*.py",
                "relay/parking/prober.py",
                "core/session.py",
                "database/__init__.py",
            ),
        ),
        ("relay/test_*.py", "test_session_settings.py", "existing/test_statement_rows.py"),
    ),
    "marked": (("existing/*.py",), ("existing",)),
    "partitions": (("days/partitions/*.py",), ("days/partitions", "relay/test_bad_input.py")),
    # The model of its database is compared with the real one, by its statements.
    "consumer": (("consumer/*.py",), ("consumer", "model/consumer/test_database.py")),
    "archive": (("days/archive/*.py",), ("days/archive", "days/partitions")),
    "schema": (("sql/*.sql",), ("schema", "relay", "days/partitions")),
    "cdc": (("relay/read/slot/*.py",), ("relay/slot",)),
}

# Dictionaries and calls of settings: every entry is removed, and changed.
_SETTINGS: Final = {
    "core/session.py": ("CONNECTION", "SHARED", "OWN"),
    "database/__init__.py": ("connect", "_DRIVER_NEEDS"),
    "relay/kafka/client.py": ("_FIXED", "_DEFAULTS"),
    "relay/kafka/progress_topic.py": ("create_topic", "read_last"),
    "relay/kafka/transactional_producer.py": ("begin",),
    "relay/parking/prober.py": ("_new_producer",),
    "consumer/kafka_clients.py": (),
}
# Numbers that a comment calls needed; each is made ten times as large, and a tenth.
_NUMBERS: Final = {
    "relay/kafka/progress_topic.py": ("_LOOK_BACK",),
    "relay/kafka/transactional_producer.py": ("_COMMIT_SECONDS",),
    "relay/relay_sql.py": ("MOST_METADATA",),
    "days/archive/archive_sql.py": ("RESTORED_TX",),
}
_CALLS: Final = ("connect", "producer", "dict", "Consumer", "Producer", "AdminClient", "NewTopic")


# Where no statement shows which tests may find a setting, or SQL in a message: parts of the names of those
# that do, for a file or one name in it.
FINDERS: Final = {
    "outbox_pipelines/days/partitions/close.py:_close": ("test_close",),
    "outbox_pipelines/relay/kafka/client.py": ("test_client_settings",),
    "outbox_pipelines/relay/kafka/progress_topic.py": ("test_progress_topic", "test_exactly_once"),
    "outbox_pipelines/relay/relay_sql.py:MINE_BY": ("test_a_shard_reads_its_own_rows",),
    "outbox_pipelines/relay/relay_sql.py:MOST_METADATA": ("test_sizes",),
    "outbox_pipelines/relay/": ("test_client_settings", "test_transactional_producer", "test_exactly_once"),
    "outbox_pipelines/core/session.py:": ("test_session_settings",),
    "outbox_pipelines/database/__init__.py": ("test_session_settings", "test_pooler"),
    "outbox_pipelines/consumer/kafka_clients.py:": ("consumer/test_reading", "a_copy_of_a_dead_letter"),
    "outbox_pipelines/consumer/dedupe_table.py:": ("consumer/test_dedupe_table",),
    "outbox_pipelines/consumer/": ("consumer/test_membership", "consumer/test_consumer", "test_dead_letters"),
    "outbox_pipelines/days/partitions/": ("test_purge",),
    "outbox_pipelines/existing/table_statements.py:": (
        "existing/test_statement_rows",
        "existing/test_shapes",
    ),
    # DuckDB's statements are not recorded.
    "outbox_pipelines/days/archive/archive_sql.py:FILE_": ("archive/test_proof", "archive/test_archive"),
    "outbox_pipelines/days/archive/data_set.py:": ("archive/test_query", "archive/test_reader", "test_views"),
    "outbox_pipelines/days/archive/proof.py:": ("archive/test_proof", "archive/test_rendering"),
    "outbox_pipelines/days/archive/question.py:": ("archive/test_query", "archive/test_views"),
    "outbox_pipelines/days/archive/rendering.py:": ("archive/test_rendering",),
    "outbox_pipelines/days/archive/rows.py:": ("archive/test_archive_rows",),
    "outbox_pipelines/days/archive/": ("test_restore",),
}


@dataclass(frozen=True)
class Mutant:
    """One edit of a file.

    Attributes:
        around: a piece of the statement that is mutated, to find the tests that send it; "" for settings.
    """

    file: str
    name: str
    edit: sql.Edit
    old: str
    around: tuple[str, ...]
    before: str

    @property
    def id(self) -> str:
        """As it is named in lists and in `equal.toml`."""
        digest = hashlib.sha1(f"{self.before}|{self.old}|{self.edit.new}".encode()).hexdigest()[:6]
        return f"{self.file}:{self.name}:{self.edit.kind.replace(' ', '-')}:{digest}"

    def source(self) -> str:
        """Return the mutated file."""
        return self.edit.of((ROOT / self.file).read_text(encoding="utf-8"))

    def __str__(self) -> str:
        old, new = (" ".join(each.split()) or "nothing" for each in (self.old, self.edit.new))
        return f"{self.id}  {' '.join(self.before[-50:].split())} [{old} → {new}]"


def of_area(area: str) -> list[Mutant]:
    """Return all mutants of an area, each once."""
    found: dict[str, Mutant] = {}
    for pattern in AREAS[area][0]:
        folder, pattern = (ROOT, pattern) if pattern.startswith("sql/") else (ROOT / _PACKAGE, pattern)
        for path in sorted(folder.glob(pattern)):
            for mutant in of_file(path.relative_to(ROOT).as_posix()):
                found.setdefault(mutant.id, mutant)
    return list(found.values())


def of_file(file: str) -> Iterator[Mutant]:
    """Yield the mutants of a file."""
    yield from of_text(file, (ROOT / file).read_text(encoding="utf-8"))


def of_text(file: str, text: str) -> Iterator[Mutant]:
    """Yield the mutants of a file with this text."""
    if file.endswith(".sql"):
        yield from _of_script(file, text)
        return
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    names = _names(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.STRING:
            continue
        prefix = len(token.string) - len(token.string.lstrip("rRbBfFuU"))
        quotes = 3 if token.string[prefix : prefix + 3] in ('"""', "'''") else 1
        begin = lines[token.start[0] - 1] + token.start[1] + prefix + quotes
        content = token.string[prefix + quotes : -quotes]
        name = names.get(token.start[0])
        if name is None or not sql.is_sql(content):
            continue
        for edit in sql.edits(content):
            yield _made(file, name, text, content, edit, begin)
    relative = file.removeprefix(_PACKAGE)
    if relative in _SETTINGS:
        yield from _of_settings(file, text, lines, _SETTINGS[relative])
    for name in _NUMBERS.get(relative, ()):
        yield from _of_number(file, text, lines, name)


def _made(file: str, name: str, text: str, content: str, edit: sql.Edit, begin: int) -> Mutant:
    placed = sql.Edit(edit.kind, begin + edit.start, begin + edit.stop, edit.new)
    before = " ".join(content[: edit.start].split())[-80:]
    return Mutant(file, name, placed, content[edit.start : edit.stop], _pieces(content, edit), before)


def _pieces(content: str, edit: sql.Edit) -> tuple[str, ...]:
    """Return the part of a statement around an edit that no placeholder interrupts, and the longest one."""
    stops = [0]
    # Also within a literal.
    for placeholder in re.finditer(r"\{\{?[^{}]*\}?\}", content):
        stops += placeholder.span()
    stops.append(len(content))
    parts = [(content[a:b], a, b) for a, b in zip(stops[::2], stops[1::2], strict=True)]
    own = [part for part, a, b in parts if a <= edit.start <= b]
    longest = max((part for part, _, _ in parts), key=len)
    # As it is sent, without what the program writes twice.
    return tuple(part.replace("{{", "{").replace("}}", "}") for part in (*own[:1], longest))


def _names(text: str) -> dict[int, str]:
    """Return for each line the constant or the function that it is in; docstrings are in none."""
    found: dict[int, str] = {}

    def walk(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = inside
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = child.name
            elif not inside and isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                name = child.target.id
            elif not inside and isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
                name = child.targets[0].id
            if isinstance(child, ast.stmt):
                lines = range(child.lineno, (child.end_lineno or child.lineno) + 1)
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    for line in lines:
                        found.pop(line, None)
                elif name:
                    found.update(dict.fromkeys(lines, name))
            walk(child, name)

    walk(ast.parse(text), "")
    return found


def _of_script(file: str, text: str) -> Iterator[Mutant]:
    name = ""
    at = 0
    for part in text.split("\n\n"):
        first = next((line for line in part.splitlines() if not line.startswith("--")), "")
        words = first.replace("(", " ").split()
        if words[:1] == ["CREATE"]:
            name = next(
                (word for word in words[1:] if word.startswith(("outbox", "processed", "inbox"))), words[-1]
            )
        if name:
            for edit in sql.edits(part):
                placed = sql.Edit(edit.kind, at + edit.start, at + edit.stop, edit.new)
                before = " ".join(part[: edit.start].split())[-80:]
                yield Mutant(file, name, placed, part[edit.start : edit.stop], (name,), before)
        at += len(part) + 2


def _of_settings(file: str, text: str, lines: list[int], names: tuple[str, ...]) -> Iterator[Mutant]:
    tree = ast.parse(text)

    def place(node: ast.expr | ast.keyword) -> tuple[int, int]:
        begin = lines[node.lineno - 1] + len(
            text.splitlines()[node.lineno - 1].encode()[: node.col_offset].decode()
        )
        end_line, end = node.end_lineno or 0, node.end_col_offset or 0
        return begin, lines[end_line - 1] + len(text.splitlines()[end_line - 1].encode()[:end].decode())

    def entries(node: ast.AST, name: str) -> Iterator[Mutant]:
        for each in ast.walk(node):
            if isinstance(each, ast.Dict):
                for key, value in zip(each.keys, each.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield from _entry(name, key.value, place(key)[0], place(value))
            elif isinstance(each, ast.Call) and _callee(each) in _CALLS:
                for keyword in each.keywords:
                    if keyword.arg:
                        yield from _entry(name, keyword.arg, place(keyword)[0], place(keyword.value))

    def _entry(name: str, key: str, begin: int, value: tuple[int, int]) -> Iterator[Mutant]:
        stop = value[1]
        rest = text[stop:].lstrip(" ")
        removed = sql.Edit(
            "setting removed", begin, stop + (rest.startswith(",") and text[stop:].index(",") + 1), ""
        )
        yield Mutant(file, name, removed, text[begin:stop], (), key)
        given = text[value[0] : value[1]]
        if (new := _changed(given)) is not None:
            yield Mutant(file, name, sql.Edit("setting changed", *value, new), given, (), key)

    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        for target in targets:
            if isinstance(target, ast.Name) and (target.id in names or not names):
                yield from entries(node, target.id)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.FunctionDef) and (inner.name in names or not names):
            yield from entries(inner, inner.name)


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


_OTHERS: Final = {
    "True": "False",
    "False": "True",
    '"on"': '"off"',
    '"off"': '"on"',
    '"0"': '"1"',
    '"read committed"': '"repeatable read"',
    '"read_committed"': '"read_uncommitted"',
    '"all"': '"1"',
    '"murmur2_random"': '"random"',
    '"compact"': '"delete"',
    '"primary"': '"any"',
    '"UTC"': '"Asia/Tokyo"',
    '"auto"': '"force_generic_plan"',
    '"error"': '"latest"',
    '"earliest"': '"latest"',
}


def _changed(value: str) -> str | None:
    if value in _OTHERS:
        return _OTHERS[value]
    digits = value.replace("_", "").replace(".", "", 1)
    if digits.isdigit():
        return "60_000" if value == "0" else f"{value} * 100"
    return None


def _of_number(file: str, text: str, lines: list[int], name: str) -> Iterator[Mutant]:
    for node in ast.parse(text).body:
        if (
            isinstance(node, ast.AnnAssign)
            and getattr(node.target, "id", "") == name
            and node.value is not None
        ):
            begin = lines[node.value.lineno - 1] + node.value.col_offset
            stop = lines[(node.value.end_lineno or 1) - 1] + (node.value.end_col_offset or 0)
            old = text[begin:stop]
            for factor in ("* 10", "// 10"):
                yield Mutant(file, name, sql.Edit("number", begin, stop, f"{old} {factor}"), old, (), name)
