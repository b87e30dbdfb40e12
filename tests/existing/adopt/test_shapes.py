"""The tables of widely copied guides, adopted and given back, with the writers of their guides."""

from __future__ import annotations

import uuid

import pytest

from outbox_pipelines.existing.adopt import planning, steps
from tests.existing.adopt.conftest import Adopted, Make
from tests.existing.conftest import FEW_GUIDES

KEYS = tuple(str(uuid.UUID(int=n)) for n in range(1, 4))


@pytest.fixture(params=FEW_GUIDES, ids=lambda guide: guide.name)
def adopted(request: pytest.FixtureRequest, make: Make) -> Adopted:
    return make(request.param)


def _some(first: int, last: int) -> list[tuple[str, int]]:
    return [(KEYS[n % 3], n) for n in range(first, last)]


def _expected(last: int) -> dict[str, list[int]]:
    return {key: list(range(n, last, 3)) for n, key in enumerate(KEYS)}


def test_there_and_back_and_there(adopted: Adopted) -> None:
    """Guards G1 and G2 across the switch, for each shape and its writer, which does not change."""
    ids = adopted.write(*_some(0, 6))
    adopted.relay(table=True)
    ids += adopted.write(*_some(6, 12))
    assert planning.plan(adopted.settings).judged.problems == ()
    steps.prepare(adopted.settings)
    assert steps.prepare(adopted.settings) == []
    ids += adopted.write(*_some(12, 15))
    assert adopted.switch().changed
    assert not adopted.switch().changed
    ids += adopted.write(*_some(15, 21))
    assert adopted.drain() == 9
    assert adopted.drain() == 0
    adopted.relay()
    assert adopted.numbers() == _expected(21)
    ids += adopted.write(*_some(21, 24))
    assert adopted.back().changed
    assert not adopted.back().changed
    ids += adopted.write(*_some(24, 30))
    adopted.relay(table=True)
    assert adopted.numbers() == _expected(30)
    adopted.switch()
    ids += adopted.write(*_some(30, 36))
    adopted.drain()
    adopted.relay()
    assert adopted.numbers() == _expected(36)
    found = {message.headers["id"] for message in adopted.messages()}
    if adopted.guide.name == "E":
        _require_traces(adopted)
    assert len(found) == len(set(ids)) == 36
    if adopted.guide.name == "C":
        assert ids == [str(n) for n in range(1, 37)]
        ids = [number if int(number) not in _NEW else _uuid(int(number)) for number in ids]
    assert found == set(ids)


def _require_traces(adopted: Adopted) -> None:
    """Old and new events carry the trace that their writer named; the view shows it."""
    with adopted.connect() as connection:
        traces = dict(connection.execute("SELECT id::text, trace_id FROM outbox").fetchall())
    for message in adopted.messages():
        headers = message.headers
        trace, parent = headers["trace_id"], headers["traceparent"]
        assert trace is not None
        assert len(trace) == 32
        assert parent is not None
        assert parent.startswith(f"00-{trace}-")
        if headers["id"] in traces:
            assert traces[headers["id"]] == trace
    assert len(traces) == 36


_NEW = {*range(16, 25), *range(31, 37)}


def _uuid(number: int) -> str:
    return f"00000000-0000-8000-8000-{number:012x}"
