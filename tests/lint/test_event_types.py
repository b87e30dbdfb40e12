"""`outbox lint-writes --catalog`: event types in code beside those of the event catalog."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from outbox_pipelines.cli.main import cli
from outbox_pipelines.lint.event_types import Documented
from outbox_pipelines.lint.finding import HIDDEN, NOT_WRITTEN, UNDOCUMENTED
from outbox_pipelines.lint.linter import Options, check_sources

CODES = frozenset({UNDOCUMENTED.code, NOT_WRITTEN.code, HIDDEN.code, "OB009"})
EVENTS = """
from typing import ClassVar
from enum import StrEnum
import pydantic

class Base(pydantic.BaseModel):
    pass

class OrderPlaced(Base):
    __event_type__: ClassVar[str] = "order.placed"
    total: int

class OrderLost(Base):
    __event_type__: ClassVar[str] = "order.lost"

class Special(OrderLost):
    pass

class Kind(StrEnum):
    SENT = "order.sent"
    MISSPELLED = "order.snet"

PAID = "order.paid"
COMPUTED = PAID + "!"
"""
HEAD = """
from outbox_pipelines.writer import NewEvent, emit, emit_many
from outbox_pipelines.writer.sqlalchemy import OutboxEvent, RecordsEvents
from shop import events
from shop.events import COMPUTED, PAID, Kind, OrderLost, OrderPlaced, Special

"""
LIFECYCLES = {"order.placed": "active", "order.paid": "active", "order.sent": "deprecated", "old": "retired"}
LIFECYCLES |= {"new": "proposed"}


def _found(code: str, *, lifecycles: dict[str, str] = LIFECYCLES, head: str = HEAD) -> list[tuple[str, str]]:
    catalog = Documented("catalog.yaml", "events:\n  order.paid: {}\n", lifecycles)
    sources = {"shop/events.py": EVENTS.encode(), "shop/orders.py": f"{head}{code}\n".encode()}
    return [(each.code, each.why) for each in check_sources(sources, Options(CODES, catalog=catalog))]


def _unknown(name: str) -> list[tuple[str, str]]:
    return [("OB012", f"{name} is not in the event catalog")]


SEEN_ALL = '"order.placed", "order.paid"'


@pytest.mark.parametrize(
    ("code", "unknown"),
    [
        ('emit(c, "order", 1, "order.placd", {})', "order.placd"),
        ('emit(c, "order", 1, payload={}, event_type="order.placd")', "order.placd"),
        ('emit_many(c, [NewEvent("order", 1, "order.placd", {})])', "order.placd"),
        ('s.add(OutboxEvent("order", 1, "order.placd", {}))', "order.placd"),
        ('emit(c, "order", 1, Kind.MISSPELLED, {})', "order.snet"),
        ('emit(c, "order", 1, events.Kind.MISSPELLED.value, {})', "order.snet"),
        ('emit(c, "order", 1, "order.placed" if x else "order.placd", {})', "order.placd"),
        ("emit(c, OrderLost(), aggregate_id=1)", "order.lost"),
        ("event = Special()", "order.lost"),
        ("emit_many(c, [events.OrderLost() for _ in x])", "order.lost"),
        (
            'class Order(RecordsEvents, Table):\n    def f(self):\n        self.record("order.placd", {})',
            "order.placd",
        ),
        ('emit(c, "order", 1, "order.placed", {})', ""),
        ('emit(c, "order", 1, PAID, {})', ""),
        ('emit(c, "order", 1, Kind.SENT.value, {})', ""),
        ("emit(c, OrderPlaced(total=1))", ""),
        ('emit(c, "order", 1, "order.placd", {})  # outbox: ignore[OB012]', ""),
        ('def emit(*given): ...\nother.emit(c, "order", 1, "order.placd", {})', ""),
        ('class Tape:\n    def f(self):\n        self.record("order.placd", {})', ""),
        ('def f(emit):\n    emit(c, "order", 1, "order.placd", {})', ""),
    ],
)
def test_a_type_that_is_not_documented(code: str, unknown: str) -> None:
    """Guards against a misspelled type that first the day's archive shows, and against a false alarm."""
    assert _found(f"{code}\nx = {SEEN_ALL}") == (_unknown(unknown) if unknown else [])


def test_a_retired_type() -> None:
    """Guards against a writer that goes on."""
    found = _found(f'emit(c, "order", 1, "old", {SEEN_ALL})')
    assert found == [("OB012", "old is retired in the event catalog")]


@pytest.mark.parametrize(
    "code",
    [
        'emit(c, "order", 1, kind, {})',
        'emit(c, "order", 1, f"order.{kind}", {})',
        'emit(c, "order", 1, COMPUTED, {})',
        'TWICE = "order.placed"\nTWICE = "order.paid"\nemit(c, "order", 1, TWICE, {})',
        'def f(PAID):\n    emit(c, "order", 1, PAID, {})',
        'NewEvent("order", 1, kind, {})',
    ],
)
def test_what_is_not_in_sight_is_listed(code: str) -> None:
    """Guards against a type that is passed over without a word, or taken for another one."""
    assert _found(f"{code}\nx = {SEEN_ALL}") == [("OB014", "the text of the event type is not in sight")]


def test_a_typed_event_is_judged_where_it_is_made() -> None:
    """Guards against a list of all calls with a variable, and against events whose classes are elsewhere."""
    code = f"{HEAD}emit(c, event)\nemit(c, make())\nx = {SEEN_ALL}"
    assert _found(code, head="") == []
    catalog = Documented("catalog.yaml", "", LIFECYCLES)
    found = check_sources({"shop/orders.py": code.encode()}, Options(CODES, catalog=catalog))
    assert [each.code for each in found] == ["OB014", "OB014"]


def test_a_type_that_no_code_names() -> None:
    """Guards against a documented type that consumers wait for, and against one that a helper writes."""
    only_read = '@consumer.on("order.paid", OrderPlaced)\ndef paid(event, connection): ...'
    lines = [("OB013", "no code names order.paid"), ("OB013", "no code names order.placed")]
    head = HEAD.replace("PAID, ", "")
    catalog = Documented("catalog.yaml", "events:\n  'order.paid': {}\n", LIFECYCLES)
    sources = {"shop/orders.py": f"{head}{only_read}".encode()}
    found = check_sources(sources, Options(CODES, catalog=catalog))
    assert sorted((each.code, each.why) for each in found) == lines
    assert {each.line for each in found if "paid" in each.why} == {2}
    assert _found(f'publish("order.paid")\nOrderPlaced(total=1)\n{only_read}') == []


CATALOG = """
events:
  order.placed: {description: d, producer: p, owner: o}
  order.paid: {description: d, producer: p, owner: o}
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a check that fails for what is not in sight, or passes without its event catalog."""
    source, catalog = tmp_path / "shop.py", tmp_path / "catalog.yaml"
    source.write_text(f'{HEAD}def f(c, kind):\n    emit(c, "order", 1, kind, {{}})\n    "order.placed"\n')
    catalog.write_text(CATALOG)

    def run(*options: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["lint-writes", *options, str(source)])
        return done.exit_code, done.output

    code, output = run("--catalog", str(catalog))
    assert (code, "OB014 event-type-not-in-sight" in output) == (0, True)
    assert "no findings in 1 file; 1 event type not in sight" in output
    assert "::notice " in run("--catalog", str(catalog), "--github")[1]
    code, output = run("--catalog", str(catalog), "--not-written", "--json")
    assert (code, json.loads(output)[0]["why"]) == (1, "no code names order.paid")
    assert run() == (0, "no findings in 1 file\n")
    for options in (["--not-written"], ["--select", "OB012"]):
        code, output = run(*options)
        assert (code, "needs the event catalog: add --catalog FILE" in output) == (2, True)
    code, output = run("--catalog", str(source))
    assert (code, "shop.py: is not YAML" in output or "documents no events" in output) == (2, True)
    for module in ("outbox_pipelines.catalog.document", "yaml"):
        monkeypatch.setitem(sys.modules, module, None)
    code, output = run("--catalog", str(catalog))
    assert (code, "pip install 'outbox-pipelines[catalog]'" in output) == (2, True)
