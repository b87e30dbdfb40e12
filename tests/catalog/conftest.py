"""The servers and databases of these tests, and an event catalog to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.registry import registry
from tests.schema.servers import database, server

__all__ = ["database", "registry", "server"]

Write = Callable[[str], Path]

CATALOG = """
events:
  order.placed:
    description: A customer has placed an order.
    producer: shop
    owner: team:orders
    consumers: [billing, shipping]
    topic: order-events
    schema:
      type: object
      required: [total]
      properties:
        total: {type: integer, minimum: 1, description: In cents.}
        at: {type: string, format: date-time}
        lines: {type: array, items: {$ref: "#/$defs/line"}}
      $defs:
        line: {type: object, required: [sku], properties: {sku: {type: string}}}
  order.shipped:
    description: It has left the warehouse.
    producer: warehouse
    owner: ada@example.com
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an event catalog; return its path."""

    def at(text: str) -> Path:
        path = tmp_path / "catalog.yaml"
        path.write_text(text)
        return path

    return at
