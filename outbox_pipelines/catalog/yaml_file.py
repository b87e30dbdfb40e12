"""YAML as JSON people expect it: no dates, no `on` that is a boolean, no name that is there twice."""

from __future__ import annotations

from typing import Any, Final

import yaml

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT: Final = "tag:yaml.org,2002:str"


def parse(text: str) -> Any:
    """What the text says.

    Raises:
        yaml.YAMLError: it is not YAML.
        ValueError: a name is there twice, of which YAML's readers would keep the last.
    """
    loader = _LOADER(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _mend(node, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _mend(node: Any, seen: set[int]) -> None:
    """Before values are made: aliases lead to the same node, maybe to one around them."""
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
