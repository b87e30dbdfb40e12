"""Puts a mutated file in the place of the original, in a process that has already imported it.

Invariants:
- Only the harness of the tests calls this, and only in a process that ends after one mutant.
- What other modules have imported from the file, or derived from it while they were imported, changes as
  well: constants, functions, methods, default arguments. Objects that were made before keep what they have.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

# A JSON array of a file and its mutated text, for the processes that tests start.
VARIABLE: Final = "TESTS_MUTANT"
_PLAIN: Final = (str, bytes, int, float, tuple, list, dict, set, frozenset, type(None))
_OURS: Final = ("outbox_pipelines", "tests")


def apply(file: str, source: str) -> list[tuple[Any, Any]]:
    """Let this process behave as if `file` contained `source`.

    Returns:
        The constants that have changed, each as it was and as it is; no numbers, which others may equal.
    """
    if file.endswith(".sql"):
        _replace_script(Path(__file__).parents[2] / file, source)
        return []
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    changed: list[tuple[Any, Any]] = []
    _renew(importlib.import_module(name), source, set(), changed)
    return changed


def _replace_script(path: Path, source: str) -> None:
    read, read_raw = Path.read_text, Path.read_bytes

    def read_text(self: Path, *given: Any, **named: Any) -> str:
        return source if self.resolve() == path else read(self, *given, **named)

    def read_bytes(self: Path) -> bytes:
        return source.encode() if self.resolve() == path else read_raw(self)

    Path.read_text = read_text  # type: ignore[method-assign]
    Path.read_bytes = read_bytes  # type: ignore[method-assign]
    from outbox_pipelines.core import scripts

    for each in vars(scripts).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()


def _renew(module: ModuleType, source: str, done: set[str], found: list[tuple[Any, Any]]) -> None:
    done.add(module.__name__)
    new = ModuleType(module.__name__)
    new.__dict__.update(
        __file__=module.__file__,
        __package__=module.__package__,
        __spec__=module.__spec__,
        __loader__=module.__loader__,
    )
    exec(compile(source, str(module.__file__), "exec"), new.__dict__)
    changed = list(_update(vars(module), vars(new), module.__name__, vars(module).__setitem__))
    found += [(old, fresh) for _, old, fresh in changed if not _is_shared(old)]
    _clear(module)
    for constant, old, fresh in changed:
        for other in [each for name, each in sys.modules.items() if name.startswith(_OURS)]:
            if other is module or not hasattr(other, "__dict__"):
                continue
            hits = [
                name
                for name, value in list(vars(other).items())
                if value is old and (name == constant or not _is_shared(old))
            ]
            for name in hits:
                setattr(other, name, fresh)
            if hits and other.__name__ not in done and other.__name__.startswith("outbox_pipelines"):
                _renew(other, Path(str(other.__file__)).read_text(encoding="utf-8"), done, found)


def _is_shared(value: Any) -> bool:
    """Return whether constants that have nothing to do with each other may be this one object."""
    return value is None or isinstance(value, int | float) or len(value) < 2


def _clear(module: ModuleType) -> None:
    for each in list(vars(module).values()):
        if hasattr(each, "cache_clear"):
            each.cache_clear()


def _update(
    old: Any, new: Any, module: str, put: Callable[[str, Any], None]
) -> Iterator[tuple[str, Any, Any]]:
    """Change what differs in a namespace, in place where possible; yield each constant that was replaced."""
    for name, fresh in list(new.items()):
        if name.startswith("__") or name not in old:
            continue
        was = old[name]
        for function, its in _functions(was, fresh, module):
            if function.__code__.co_freevars == its.__code__.co_freevars:
                function.__code__ = its.__code__
                function.__defaults__, function.__kwdefaults__ = its.__defaults__, its.__kwdefaults__
        if isinstance(was, type) and isinstance(fresh, type) and was.__module__ == module:
            list(_update(vars(was), vars(fresh), module, partial(setattr, was)))
        elif isinstance(was, _PLAIN) and isinstance(fresh, _PLAIN) and was != fresh:
            put(name, fresh)
            yield name, was, fresh


def _functions(was: Any, fresh: Any, module: str) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Yield the functions of two equal definitions: methods, properties, commands, what decorators wrap."""
    for part in ("__func__", "fget", "func", "callback", "__wrapped__"):
        if hasattr(was, part) and hasattr(fresh, part):
            yield from _functions(getattr(was, part), getattr(fresh, part), module)
    if (
        isinstance(was, FunctionType)
        and isinstance(fresh, FunctionType)
        and was.__module__ == module
        and not hasattr(was, "__wrapped__")
    ):
        yield was, fresh
