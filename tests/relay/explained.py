"""A cursor that explains each statement of a source before it runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import psycopg


class Explained(psycopg.Cursor[Any]):
    """Counts what the statements of a source read; the class attributes are replaced by a test."""

    read: ClassVar[Counter[str]] = Counter()
    """Rows of tables, and rows that were read in vain."""
    relations: ClassVar[set[str]] = set()
    """Tables of which a scan was run."""
    nodes: ClassVar[set[str]] = set()
    """Types of the plans' nodes that were run."""

    def stream(self, query: Any, params: Any = None, **more: Any) -> Iterator[Any]:
        self._explain(query, params)
        return super().stream(query, params, **more)

    def execute(self, query: Any, params: Any = None, **more: Any) -> Any:
        if isinstance(params, dict):
            self._explain(query, params)
        return super().execute(query, params, **more)

    def _explain(self, query: Any, params: Any) -> None:
        text = query.decode() if isinstance(query, bytes) else query
        explain = psycopg.Cursor(self.connection)
        explain.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {text}".encode(), params)
        (((document,),),) = explain.fetchall()
        nodes = [document["Plan"]]
        for node in nodes:
            nodes += node.get("Plans", [])
            if node["Actual Loops"]:
                self.nodes.add(node["Node Type"])
            if "Relation Name" in node and node["Actual Loops"]:
                self.relations.add(node["Relation Name"])
                self.read["rows"] += int(node["Actual Rows"] * node["Actual Loops"])
                self.read["removed"] += node.get("Rows Removed by Filter", 0)
                self.read["removed"] += node.get("Rows Removed by Index Recheck", 0)
