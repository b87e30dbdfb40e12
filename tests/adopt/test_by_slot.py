"""A table that Debezium publishes: nothing is lost, repeated or reordered there and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox_pipelines.adopt import steps
from outbox_pipelines.adopt.by_slot import Rest
from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.relay import service
from tests.adopt.conftest import SCHEMA, Make
from tests.adopt.debezium_table import Published, published
from tests.conftest import wait_until


@pytest.fixture
def table(make: Make) -> Iterator[Published]:
    with published(make) as made:
        yield made


def _switch(table: Published) -> None:
    steps.prepare(table.adopted.settings)
    accepted = ["rows"] if table.one("SELECT count(*) FROM public.outbox") else []
    steps.switch(table.adopted.settings, accepted, seconds=30, say=print)


def _drain(table: Published, rest: Rest = Rest.WAIT, *, seconds: float = 0) -> int:
    return steps.drain(table.adopted.settings, seconds=seconds, say=print, rest=rest)


def test_there_and_back(table: Published) -> None:
    """Guards against a gap, a repetition or another order where the publisher changes (G1, G2)."""
    table.write(0, 1)
    table.write(2, keep=True)
    _switch(table)
    table.write(3, 4)
    table.publish(1)
    with pytest.raises(NotReadyError, match="2 events of before the switch are not in their topics"):
        _drain(table)
    with pytest.raises(NotReadyError, match="outbox adopt drain"):
        table.adopted.back()
    with pytest.raises(service.ShardOwnedError):
        service.relay(
            table.adopted.settings.model_copy(update={"table_file": None}),
            until_empty=True,
            standby=service.Standby.REFUSE,
        )
    assert table.numbers() == [0]
    table.publish(confirm=False)
    assert _drain(table) == 0
    assert table.adopted.state() == "adopted"
    table.write(5)
    table.adopted.relay()
    assert table.numbers() == [0, 1, 2, 3, 4, 5]
    table.write(6)
    table.adopted.back()
    table.write(7, 8)
    # What it had published and not confirmed, Debezium knows from its own offsets.
    assert table.publish(confirm=False) == 4
    assert table.numbers() == [0, 1, 2, 3, 4, 5, 6, 1, 2, 7, 8]
