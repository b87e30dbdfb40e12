"""Read an application's files and return the findings.

Invariants:
- The application is not imported or run.
- A file that cannot be parsed is a finding; the others are still read.
- Only these files are parsed: those that mention an outbox or messages, those that call one of their
  publishing functions, and those needed to understand them. No other file can have a finding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.lint import dual_write, finding, module, outbox_writes
from outbox_pipelines.lint.effects import Effects
from outbox_pipelines.lint.event_types import Documented, review
from outbox_pipelines.lint.files import newer
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
_CHECKS: Final[tuple[Callable[[Story, Module], Iterable[outbox_writes.Found]], ...]] = (
    outbox_writes.outside,
    outbox_writes.after_commit,
    outbox_writes.elsewhere,
    outbox_writes.not_awaited,
    outbox_writes.swallowed,
    outbox_writes.past_helper,
    outbox_writes.changed,
)
_CHECKS_OF_MESSAGES: Final[tuple[Callable[[Story, Module, Effects], Iterable[outbox_writes.Found]], ...]] = (
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
