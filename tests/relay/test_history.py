"""The history checker itself: it must find what it is for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.conftest import Message, Outbox
from tests.relay import history


@pytest.fixture
def connection(outbox: Outbox) -> Iterator[psycopg.Connection[Any]]:
    with outbox.connect() as connection:
        history.prepare(connection)
        connection.execute("UPDATE account SET n = 3 WHERE id = 1")
        yield connection


def _messages(*numbers: int) -> list[Message]:
    return [
        Message("t", 0, offset, "1", json.dumps({"n": n}), {"id": f"id-{n}"})
        for offset, n in enumerate(numbers)
    ]


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ((1, 2, 3), []),
        ((1, 2, 1, 2, 3), []),
        ((1, 3), ["lost ['1/2']", "reordered ['1/3']"]),
        ((1, 2, 3, 4), ["phantom ['1/4']"]),
        ((1, 3, 2), ["reordered ['1/3', '1/2']"]),
        ((), ["lost ['1/1', '1/2', '1/3']"]),
    ],
)
def test_each_kind_of_damage_is_found(
    connection: psycopg.Connection[Any], numbers: tuple[int, ...], wrong: list[str]
) -> None:
    """Guards against a checker that cannot fail."""
    assert history.check(connection, _messages(*numbers)).wrong == wrong


def test_one_event_under_two_ids_is_a_phantom(connection: psycopg.Connection[Any]) -> None:
    """Guards against counting a rolled-back twin as a duplicate."""
    messages = _messages(1, 2, 3)
    messages.append(messages[1]._replace(headers={"id": "another"}))
    assert history.check(connection, messages).wrong == ["phantom ['1/2']"]


def test_duplicates_are_counted_and_no_harm(connection: psycopg.Connection[Any]) -> None:
    """Guards against an at-least-once relay that is called broken, or duplicates that nobody sees."""
    assert history.check(connection, _messages(1, 2, 1, 2, 3)).duplicates == 2
