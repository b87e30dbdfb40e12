"""Select an application's files, read them and return the findings.

Invariants:
- The application is not imported or run.
- A file that cannot be parsed is a finding; the others are still read.
- Only these files are parsed: those that mention an outbox or messages, those that call one of their
  publishing functions, and those needed to understand them. No other file can have a finding.
- Named files and directories are read, whatever their name or place, unless `exclude` matches them. Inside a
  directory, hidden directories and installed or built files are excluded; links to directories are not
  followed.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.lint import dual_write, finding, module, outbox_writes
from outbox_pipelines.lint.effects import Effects
from outbox_pipelines.lint.event_types import Documented, review
from outbox_pipelines.lint.finding import CHANGED, DEFAULT, PAST_HELPER, UNREADABLE, Finding, at
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.project import Facts, Project
from outbox_pipelines.lint.story import Story
from outbox_pipelines.lint.syntax import imports, statements

# A file that cannot be parsed is a finding if it mentions one of these.
_CONCERNED = re.compile(rb"outbox|kafka|faust|atomic_requests", re.IGNORECASE)
_PUBLISHING = re.compile(
    rb"outbox|kafka|faust|faststream|pika|kombu|celery|\.delay|\.apply_async|\.send_task", re.IGNORECASE
)
_BROKEN: Final = (SyntaxError, ValueError, RecursionError, MemoryError)
_CONNECTING = re.compile(rb"\.connect\(|\blisten\(")
_WORD = re.compile(rb"[A-Za-z_]\w+")
_CHECKS: Final[tuple[Callable[[Story, Module], Iterable[outbox_writes.RuleFinding]], ...]] = (
    outbox_writes.outside,
    outbox_writes.after_commit,
    outbox_writes.elsewhere,
    outbox_writes.not_awaited,
    outbox_writes.swallowed,
    outbox_writes.past_helper,
    outbox_writes.changed,
)
_CHECKS_OF_MESSAGES: Final[
    tuple[Callable[[Story, Module, Effects], Iterable[outbox_writes.RuleFinding]], ...]
] = (
    dual_write.before_commit,
    dual_write.in_hook,
    dual_write.beside_commit,
)


@dataclass(frozen=True)
class Options:
    """The options of a check.

    Args:
        selected: codes of the rules.
        strict_inserts: whether to find direct inserts and changes in an application that never imports the
            writer.
        atomic_requests: whether Django opens a transaction for each request; also read from its settings.
        catalog: the event catalog that event types are compared with.
    """

    selected: Collection[str] = DEFAULT
    strict_inserts: bool = False
    atomic_requests: bool = False
    catalog: Documented | None = None


def check(files: Iterable[Path], options: Options = Options()) -> list[Finding]:
    """Return the findings in these files, treated as one application, in order of place.

    Raises:
        SetupError: a file cannot be read.
    """
    return check_sources(sources_of(files), options)


def sources_of(files: Iterable[Path]) -> dict[str, bytes]:
    """Return the contents of files by their paths.

    Raises:
        SetupError: a file cannot be read.
    """
    return {str(path): _content(path) for path in files}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from error


def check_sources(sources: dict[str, bytes], options: Options = Options()) -> list[Finding]:
    """Return the findings in sources, given by their paths."""
    read = read_sources(sources, options)
    found: dict[str, list[Finding]] = {
        path: [_unreadable(path, error, sources[path])] for path, error in read.broken.items()
    }
    for path, each in read.modules.items():
        found.setdefault(path, []).extend(_in_module(path, each, read.effects))
    if options.catalog is not None:
        for one in review(sources, read.project, options.catalog):
            found.setdefault(one.path, []).append(one)
    kept: list[Finding] = []
    for path, findings in found.items():
        findings = [one for one in findings if _is_asked_for(one, read.project.facts, options)]
        if path in read.modules:
            findings = finding.apply(sources[path], path, findings, options.selected)
        kept += [one for one in findings if one.code in options.selected]
    return sorted(set(kept))


@dataclass(frozen=True)
class Read:
    """An application as far as it was read.

    Args:
        modules: the files that can hold a finding.
        broken: files that cannot be parsed, and why.
    """

    project: Project
    effects: Effects
    modules: dict[str, Module]
    broken: Mapping[str, BaseException]


def read_sources(sources: dict[str, bytes], options: Options = Options()) -> Read:
    """Read the files that can have a finding."""
    project, broken = Project(sources, module.read), {}
    concerned = {path for path, source in sources.items() if _CONCERNED.search(source)}
    trees: list[tuple[str, ast.Module]] = []
    for path in sorted(concerned):
        try:
            tree = ast.parse(sources[path])
        except _BROKEN as error:
            broken[path] = error
        else:
            project.give(path, tree)
            trees.append((path, tree))
    project.facts = _facts(((tree, sources[path]) for path, tree in trees), options)
    effects = Effects(project)
    modules: dict[str, Module] = {}
    waiting = {path for path, source in sources.items() if _PUBLISHING.search(source)} | concerned
    words: dict[str, frozenset[bytes]] = {}
    publishing: set[bytes] = set()
    while waiting:
        for path in sorted(waiting - broken.keys()):
            try:
                each = project.module(path)
            except RecursionError as error:
                broken[path] = error
                continue
            if each is not None:
                if _CONNECTING.search(sources[path]):
                    each.hooks = dict(dual_write.connected(each.tree, each))
                modules[path] = each
        effects.forget()
        publishing |= {name.encode() for name in effects.publishing()}
        publishing |= {name.encode() for each in modules.values() for name in each.producers()}
        left = sources.keys() - modules.keys() - waiting - broken.keys()
        for path in left - words.keys():
            words[path] = frozenset(_WORD.findall(sources[path]))
        waiting = {path for path in left if not publishing.isdisjoint(words[path])}
    return Read(project, effects, modules, broken)


def _in_module(path: str, read: Module, effects: Effects) -> Iterator[Finding]:
    for story in read.stories:
        for look in _CHECKS:
            for rule, node, why in look(story, read):
                yield at(path, node, rule, why)
        for tell in _CHECKS_OF_MESSAGES:
            for rule, node, why in tell(story, read, effects):
                yield at(path, node, rule, why)


def _is_asked_for(finding: Finding, facts: Facts, options: Options) -> bool:
    of_writer = (PAST_HELPER.code, CHANGED.code)
    if finding.code in of_writer and not (facts.uses_writer or options.strict_inserts):
        return False
    return finding.code in options.selected


def _facts(trees: Iterable[tuple[ast.Module, bytes]], options: Options) -> Facts:
    uses_writer, atomic_requests = False, options.atomic_requests
    mapped: set[str] = set()
    for tree, source in trees:
        if b"outbox_pipelines" in source and not uses_writer:
            uses_writer = any(name.startswith("outbox_pipelines.writer") for name in _imported(tree))
        if b"ATOMIC_REQUESTS" in source and not atomic_requests:
            atomic_requests = _has_atomic_requests(tree)
        if b"outbox" in source:
            mapped |= set(module.models(tree))
    return Facts(uses_writer, atomic_requests, frozenset(mapped))


def _imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names that are imported, `import a.b` too, of which `a` alone is a local name."""
    yield from imports(tree).values()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def _has_atomic_requests(tree: ast.Module) -> bool:
    """Return whether Django's settings say so: an entry of DATABASES, or an assignment to one."""
    return any(
        isinstance(key, ast.Constant)
        and key.value == "ATOMIC_REQUESTS"
        and not (isinstance(value, ast.Constant) and not value.value)
        for node in ast.walk(tree)
        for key, value in _entries(node)
    )


def _entries(node: ast.AST) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    match node:
        case ast.Dict(keys=keys, values=values):
            yield from zip(keys, values, strict=True)
        case ast.Assign(targets=[ast.Subscript(slice=key)], value=value):
            yield key, value


def _unreadable(path: str, error: BaseException, source: bytes) -> Finding:
    line, column = (error.lineno or 1, error.offset or 1) if isinstance(error, SyntaxError) else (1, 1)
    why = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
    if isinstance(error, SyntaxError):
        why += newer(source, line)
    return Finding(path, line, column, UNREADABLE.code, UNREADABLE.name, why, UNREADABLE.remedy, line)


_INSTALLED: Final = {"node_modules", "site-packages", "__pycache__", "__pypackages__"}
# The version that has it first, and how a line shows it.
_SYNTAX: Final = (
    ((3, 12), re.compile(rb"\s*type\s+\w+\s*(\[.*\])?\s*=")),
    ((3, 12), re.compile(rb"\s*(async\s+)?(def|class)\s+\w+\s*\[")),
    ((3, 12), re.compile(rb"""(^|.*\W)(f|rf|fr)("|\')""", re.IGNORECASE)),
    ((3, 14), re.compile(rb"""(^|.*\W)(t|rt|tr)("|\')""", re.IGNORECASE)),
    ((3, 14), re.compile(rb"\s*except\*?\s+[\w.]+\s*,")),
    ((3, 15), re.compile(rb"\s*lazy\s+(import|from)\s")),
)


def python_files(paths: Iterable[Path], exclude: Sequence[str] = ()) -> list[Path]:
    """Return the Python files under the paths, each once, in a stable order.

    Args:
        exclude: patterns of names, or of paths, of files and directories to leave out.

    Raises:
        SetupError: a path does not exist, or contains no Python file.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise SetupError(f"{path} does not exist: name files or directories of your application")
        under = _under(path, exclude) if path.is_dir() else [path]
        found.update(dict.fromkeys(one for one in under if not _matches(one, exclude)))
    if not found:
        raise SetupError("no Python files found: name files or directories of your application")
    return list(found)


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    texts = (path.name, path.as_posix())
    return any(fnmatchcase(text, pattern.rstrip("/")) for text in texts for pattern in patterns)


def _under(root: Path, exclude: Sequence[str]) -> Iterator[Path]:
    for directory, inner, names in os.walk(root):
        place = Path(directory)
        inner[:] = sorted(
            name for name in inner if not (_left_out(place / name) or _matches(place / name, exclude))
        )
        yield from (place / name for name in sorted(names) if _is_python(place / name))


def _is_python(path: Path) -> bool:
    # Editors leave broken links behind.
    return path.suffix == ".py" and path.is_file()


def _left_out(directory: Path) -> bool:
    name = directory.name
    return name.startswith(".") or name in _INSTALLED or (directory / "pyvenv.cfg").exists()


def newer(source: bytes, line: int) -> str:
    """Return what to add to the message of a syntax error: whether a newer Python may read the line."""
    running = sys.version_info[:2]
    lines = source.splitlines()[line - 1 : line]
    found = {version for version, syntax in _SYNTAX for text in lines if syntax.match(text)}
    if not found or max(found) <= running:
        return ""
    version = ".".join(map(str, min(one for one in found if one > running)))
    return (
        f"; it may be the syntax of Python {version} or newer, and this is Python "
        f"{'.'.join(map(str, running))}: run outbox lint-writes with the Python of the application"
    )
