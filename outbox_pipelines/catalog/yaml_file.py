"""Parse YAML with the types of JSON: no dates, no boolean `on`, no duplicate names."""

from __future__ import annotations

import math
from typing import Any, Final

import yaml

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# A hundred times the size of a large catalog.
_LONGEST: Final = 10_000_000
_MOST_NODES: Final = 500_000
_DEEPEST: Final = 100
_TOO_DEEP: Final = f"is nested more than {_DEEPEST} deep: flatten it"
_TEXT: Final = "tag:yaml.org,2002:str"


def parse(text: str) -> Any:
    """Return the parsed text.

    Raises:
        yaml.YAMLError: it is not YAML.
        ValueError: it is too large or nested too deeply, also through its aliases.
        ValueError: it has a duplicate name, of which YAML's parsers would keep the last.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"has {len(text):,} characters: {_LONGEST:,} is the limit")
    loader = _LOADER(text)
    try:
        _require_shallow(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MOST_NODES:
            raise ValueError(f"has over {_MOST_NODES:,} values with its aliases written out: use fewer")
        _mend(node, set())
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    finally:
        loader.dispose()


def _require_shallow(text: str) -> None:
    """Check the depth before nodes are built, because that takes a frame of the C stack for each level."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                raise ValueError(_TOO_DEEP)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _size(node: Any, known: dict[int, float]) -> float:
    """Return the number of values with all aliases expanded; infinite for a cycle."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else []
        parts = node.value if isinstance(node, yaml.SequenceNode) else parts
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _mend(node: Any, seen: set[int]) -> None:
    """Make names and dates strings before values are built; aliases can point to an enclosing node."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and not name.tag.endswith(":merge"):
                name.tag = _TEXT
                if name.value in names:
                    line = name.start_mark.line + 1
                    raise ValueError(f"has {name.value} twice, again in line {line}: keep one of them")
                names.add(name.value)
            _mend(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _mend(value, seen)
    elif node.tag.endswith(":timestamp"):
        node.tag = _TEXT
