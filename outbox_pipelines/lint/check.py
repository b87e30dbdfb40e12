"""Reads an application's files and finds what is wrong in them.

Invariants:
- Nothing of the application is imported or run.
- A file that cannot be parsed is a finding; the others are read all the same.
- Only files that speak of an outbox or of Kafka are parsed: no other can hold a finding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.lint import module, publishing, results, rows, suppressions, transactions
from outbox_pipelines.lint.finding import PAST_HELPER, RULES, UNREADABLE, Finding, at
from outbox_pipelines.lint.module import Facts, Module
from outbox_pipelines.lint.names import imports
from outbox_pipelines.lint.story import Story

_CONCERNED = re.compile(rb"outbox|kafka|faust|atomic_requests", re.IGNORECASE)
_CHECKS: Final[tuple[Callable[[Story, Module], Iterable[transactions.Found]], ...]] = (
    transactions.outside,
    transactions.after_commit,
    transactions.elsewhere,
    results.not_awaited,
    results.swallowed,
    publishing.before_commit,
    rows.past_helper,
    rows.changed,
)


@dataclass(frozen=True)
class Options:
    """What is looked for.

    Args:
        selected: codes of the rules.
        strict_inserts: whether direct inserts are found in an application that never imports the writer.
        atomic_requests: whether Django opens a transaction for each request; also read from its settings.
    """

    selected: Collection[str] = frozenset(RULES)
    strict_inserts: bool = False
    atomic_requests: bool = False


def check(files: Iterable[Path], options: Options = Options()) -> list[Finding]:
    """What is found in these files, which are taken as one application, in order of place.

    Raises:
        SetupError: a file cannot be read.
    """
    sources = {str(path): source for path in files if _CONCERNED.search(source := _content(path))}
    return check_sources(sources, options)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from error


def check_sources(sources: dict[str, bytes], options: Options = Options()) -> list[Finding]:
    """The same of sources by their paths."""
    trees: dict[str, ast.Module] = {}
    found: dict[str, list[Finding]] = {path: [] for path in sources}
    for path, source in sources.items():
        try:
            trees[path] = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            found[path].append(_unreadable(path, error))
    facts = _facts(trees.values(), options)
    for path, tree in trees.items():
        found[path] += _in_module(path, tree, facts)
    kept: list[Finding] = []
    for path, findings in found.items():
        findings = [one for one in findings if _is_asked_for(one, facts, options)]
        if path in trees:
            findings = suppressions.apply(sources[path], path, findings, options.selected)
        kept += [one for one in findings if one.code in options.selected]
    return sorted(set(kept))


def _in_module(path: str, tree: ast.Module, facts: Facts) -> Iterator[Finding]:
    try:
        read = module.read(tree, facts)
    except RecursionError as error:
        yield _unreadable(path, error)
        return
    for story in read.stories:
        for look in _CHECKS:
            for rule, node, why in look(story, read):
                yield at(path, node, rule, why)


def _is_asked_for(finding: Finding, facts: Facts, options: Options) -> bool:
    if finding.code == PAST_HELPER.code and not (facts.uses_writer or options.strict_inserts):
        return False
    return finding.code in options.selected


def _facts(trees: Iterable[ast.Module], options: Options) -> Facts:
    uses_writer, atomic_requests = False, options.atomic_requests
    mapped: set[str] = set()
    for tree in trees:
        uses_writer = uses_writer or any(
            name.startswith("outbox_pipelines.writer") for name in _imported(tree)
        )
        atomic_requests = atomic_requests or _has_atomic_requests(tree)
        mapped |= set(module.models(tree))
    return Facts(uses_writer, atomic_requests, frozenset(mapped))


def _imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names that are imported, `import a.b` too, of which `a` alone is a local name."""
    yield from imports(tree).values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def _has_atomic_requests(tree: ast.Module) -> bool:
    """Whether Django's settings say so: an entry of DATABASES, or an assignment to one."""
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


def _unreadable(path: str, error: BaseException) -> Finding:
    line, column = (error.lineno or 1, error.offset or 1) if isinstance(error, SyntaxError) else (1, 1)
    why = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
    return Finding(path, line, column, UNREADABLE.code, UNREADABLE.name, why, UNREADABLE.mend, line)
