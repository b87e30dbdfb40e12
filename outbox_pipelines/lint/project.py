"""The files of an application together: what an imported name is, and what a function in another file does.

Invariants:
- A file is read once, when something in it is asked for. While it is being read it answers what it knows so
  far.
- An import is resolved to the file whose path ends like it; of several, to the nearest one to the importer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

from outbox_pipelines.lint.libraries import Library, Role, Thing
from outbox_pipelines.lint.syntax import imports, is_task, path_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Re-exports and base classes are followed so far.
_DEEPEST: Final = 8


@dataclass(frozen=True)
class Facts:
    """Facts from all files of an application, and the options of the command."""

    uses_writer: bool = False
    atomic_requests: bool = False
    models: frozenset[str] = frozenset()


@dataclass
class Names:
    """What a file defines at its top level, and what it imports."""

    path: str
    tree: ast.Module
    imports: Mapping[str, str]
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)
    stars: list[str] = field(default_factory=list)
    """Modules of which everything is imported."""


@dataclass(frozen=True)
class Definition:
    """A class, function or other name at the top level of a file."""

    path: str
    name: str


class Project:
    """The files of an application by their paths.

    Args:
        read: reads the stories of a parsed file into `modules`: `module.read`, which needs this class.
    """

    def __init__(
        self, sources: Mapping[str, bytes], read: Callable[[ast.Module, Project, str], object]
    ) -> None:
        self._sources = sources
        self._read = read
        self.facts = Facts()
        self._depth = 0
        self._names: dict[str, Names | None] = {}
        self._files: dict[tuple[str, ...], str] = {}
        self._by_last: dict[str, list[tuple[str, ...]]] = {}
        self._definitions: dict[tuple[str, str], Definition | None] = {}
        self._originals: dict[tuple[str, str], str] = {}
        self._families: dict[str, tuple[str, ...]] = {}
        # Of `module.Module`.
        self.modules: dict[str, Any] = {}
        """As far as they have been read."""
        for path in sources:
            parts = _parts(path)
            self._files.setdefault(parts, path)
            if parts:
                self._by_last.setdefault(parts[-1], []).append(parts)

    # --- names ------------------------------------------------------------------------------------------

    def names(self, path: str) -> Names | None:
        """What a file defines; None where it cannot be parsed."""
        if path not in self._names:
            try:
                self._names[path] = _names(path, ast.parse(self._sources[path]))
            except (SyntaxError, ValueError, RecursionError, MemoryError, KeyError):
                self._names[path] = None
        return self._names[path]

    def give(self, path: str, tree: ast.Module) -> None:
        """Takes a file that is parsed already."""
        self._names[path] = _names(path, tree)

    def definition(self, importer: str, dotted: str, depth: int = 0) -> Definition | None:
        """Where an imported name is defined; None if that is not among the files."""
        asked = (str(PurePath(importer).parent), dotted)
        if asked not in self._definitions:
            self._definitions[asked] = self._definition(importer, dotted, depth)
        return self._definitions[asked]

    def _definition(self, importer: str, dotted: str, depth: int) -> Definition | None:
        found = self._module(importer, dotted)
        if found is None or depth > _DEEPEST:
            return None
        path, rest = found
        name, _, more = rest.partition(".")
        names = self.names(path)
        if not name or names is None:
            return None
        if name in names.functions or name in names.classes or name in names.assigned:
            return Definition(path, rest)
        if name in names.imports:
            return self.definition(path, f"{names.imports[name]}.{more}".rstrip("."), depth + 1)
        given = (self.definition(path, f"{star}.{rest}", depth + 1) for star in names.stars)
        return next((one for one in given if one), None)

    def _module(self, importer: str, dotted: str) -> tuple[str, str] | None:
        """The file of the longest part of a dotted name that is one, and the rest of the name."""
        level = len(dotted) - len(dotted.lstrip("."))
        asked = tuple(dotted.lstrip(".").split("."))
        here = tuple(PurePath(importer).parts[:-1])
        for length in range(len(asked), -1 if level else 0, -1):
            rest = ".".join(asked[length:])
            if level:
                path = self._files.get((*here[: len(here) - level + 1], *asked[:length]))
            else:
                path = self._nearest(here, asked[:length])
            if path is not None:
                return path, rest
        return None

    def _nearest(self, here: tuple[str, ...], asked: tuple[str, ...]) -> str | None:
        fitting = [one for one in self._by_last.get(asked[-1], ()) if one[-len(asked) :] == asked]
        if not fitting:
            return None
        best = max(fitting, key=lambda one: (_shared(one[: -len(asked)], here), -len(one)))
        return self._files[best]

    def original(self, importer: str, dotted: str) -> str:
        """The name under which a library defines a name that modules of the application re-export."""
        asked = (str(PurePath(importer).parent), dotted)
        if asked not in self._originals:
            self._originals[asked] = self._outside(importer, dotted, 0) or dotted
        return self._originals[asked]

    def _outside(self, importer: str, dotted: str, depth: int) -> str | None:
        found = self._module(importer, dotted)
        # A module whose own name is a library's imports that library.
        if found is None or found[0] == importer:
            return None if dotted.startswith(".") else dotted
        path, rest = found
        name, dot, more = rest.partition(".")
        names = self.names(path)
        if not name or names is None or depth > _DEEPEST:
            return None
        if name in names.functions or name in names.classes or name in names.assigned:
            return None
        if name in names.imports:
            return self._outside(path, names.imports[name] + dot + more, depth + 1)
        given = (self._outside(path, f"{star}.{rest}", depth + 1) for star in names.stars)
        return next((one for one in given if one), None)

    def alias(self, importer: str, dotted: str) -> tuple[Any, ast.expr] | None:
        """The module that defines an imported alias of a type, and what it stands for."""
        definition = self.definition(importer, dotted)
        module = self.module(definition.path) if definition else None
        if definition is None or module is None or module.scope is None:
            return None
        stands_for = module.scope.known.aliases.get(definition.name)
        return None if stands_for is None else (module, stands_for)

    # --- things -----------------------------------------------------------------------------------------

    def thing(self, importer: str, dotted: str) -> Thing | None:
        """What an imported name is: a class, a function, or an object that its module makes."""
        definition = self.definition(importer, dotted)
        if definition is None:
            return None
        name, _, rest = definition.name.partition(".")
        thing = self.own(definition.path, name)
        for attribute in rest.split(".") if rest else ():
            thing = self.attribute(thing, attribute) if thing else None
        return thing

    def own(self, path: str, name: str) -> Thing | None:
        """What a name at the top level of a file is."""
        names = self.names(path)
        if names is None:
            return None
        key = f"{path}::{name}"
        if name in names.classes:
            return Thing(Role.CLASS, key=key)
        if name in names.functions:
            task = any(is_task(one) for one in names.functions[name].decorator_list)
            return Thing(Role.FUNCTION, Library.CELERY if task else Library.OTHER, key=key)
        module = self.module(path)
        return module.shared.get(name) if module else None

    def attribute(self, thing: Thing, name: str) -> Thing | None:
        """What an attribute of an object or class of the application is."""
        if thing.role not in (Role.OBJECT, Role.CLASS):
            return None
        for key in self.family(thing.key):
            path, _, owner = key.partition("::")
            module = self.modules.get(path) or (self.module(path) if path in self._sources else None)
            found: Thing | None = module.attributes.get(owner, {}).get(name) if module else None
            if found is not None:
                return found
            if self._method(key, name) is not None:
                return Thing(Role.FUNCTION, key=f"{key}.{name}")
        return None

    def family(self, key: str) -> tuple[str, ...]:
        """A class and its bases, the nearest first; those out of sight as dotted names."""
        if key not in self._families:
            self._families[key] = (key,)
            self._families[key] = tuple(dict.fromkeys(self._bases(key, 0)))
        return self._families[key]

    def _bases(self, key: str, depth: int) -> Iterator[str]:
        yield key
        path, separator, name = key.partition("::")
        names = self.names(path) if separator else None
        node = names.classes.get(name) if names else None
        if node is None or names is None or depth > _DEEPEST:
            return
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            dotted = path_of(base)
            if dotted is None:
                continue
            root, dot, rest = dotted.partition(".")
            if root in names.classes:
                yield from self._bases(f"{path}::{root}", depth + 1)
            elif root in names.imports:
                imported = names.imports[root] + dot + rest
                found = self.definition(path, imported)
                if found is None:
                    yield imported
                else:
                    yield from self._bases(f"{found.path}::{found.name}", depth + 1)

    def derives(self, key: str, *prefixes: str) -> bool:
        """Return whether a class has a base whose dotted name begins so."""
        return any(one.startswith(prefixes) for one in self.family(key) if "::" not in one)

    def is_django_model(self, key: str) -> bool:
        """Return whether a class is a table of Django's."""
        return self.derives(key, "django.db.models.", "django.contrib.", "django.contrib.gis.db.models.")

    def _method(self, key: str, name: str) -> Function | None:
        path, separator, owner = key.partition("::")
        names = self.names(path) if separator else None
        node = names.classes.get(owner) if names else None
        found = [one for one in node.body if isinstance(one, Function) and one.name == name] if node else []
        return found[-1] if found else None

    def function(self, key: str) -> Function | None:
        """The function or method of a key."""
        path, _, name = key.partition("::")
        owner, dot, method = name.rpartition(".")
        if dot:
            return self._method(f"{path}::{owner}", method)
        names = self.names(path)
        return names.functions.get(name) if names else None

    def module(self, path: str) -> Any:
        """The stories of a file, read now if need be; None where it cannot be read.

        Raises:
            RecursionError: it is nested too deeply, and no other file needs it.
        """
        if path not in self.modules:
            names = self.names(path)
            if names is None or self._depth > _DEEPEST:
                return None
            self._depth += 1
            try:
                self._read(names.tree, self, path)
            except RecursionError:
                if self._depth == 1:
                    raise
                self.modules.pop(path, None)
                return None
            finally:
                self._depth -= 1
        return self.modules.get(path)

    def returned(self, key: str) -> Thing | None:
        """What a call of a function gives."""
        path, _, name = key.partition("::")
        module = self.module(path)
        found: Thing | None = module.returned(name) if module else None
        return found


def _parts(path: str) -> tuple[str, ...]:
    parts = PurePath(path).with_suffix("").parts
    return parts[:-1] if parts and parts[-1] == "__init__" else parts


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _names(path: str, tree: ast.Module) -> Names:
    names = Names(path, tree, imports(tree))
    for node in _top(tree.body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.functions[node.name] = node
            case ast.ClassDef():
                names.classes[node.name] = node
            case ast.Assign(targets=targets):
                names.assigned |= {one.id for one in targets if isinstance(one, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.assigned.add(name)
            case ast.ImportFrom(module=module, names=[ast.alias(name="*")], level=level):
                names.stars.append("." * level + (module or ""))
    return names


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those in its branches too."""
    for node in body:
        yield node
        match node:
            case ast.If(body=then, orelse=otherwise):
                yield from _top([*then, *otherwise])
            case ast.Try(body=tried, handlers=handlers, orelse=otherwise):
                yield from _top([*tried, *otherwise, *(one for each in handlers for one in each.body)])
            case ast.With(body=inner):
                yield from _top(inner)
