"""The shops of `examples/`, with the same requests to each."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.examples.services import EXAMPLES, Event, environment, events, go_program_of, python, serving
from tests.schema.servers import Database

# Django's own server cannot say which port it was given.
WSGI = """
from wsgiref.simple_server import make_server
from django.core.wsgi import get_wsgi_application
with make_server("127.0.0.1", 0, get_wsgi_application()) as server:
    print(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()
"""


class Shop(NamedTuple):
    client: httpx.Client
    database: Database
    orders: str
    parcels: str

    def place(self, key: str, total: int = 5) -> httpx.Response:
        headers = {"Idempotency-Key": key, "X-Request-Id": f"request {key}"}
        return self.client.post("/orders", json={"total": total}, headers=headers)

    def ship(self, order: object, parcels: list[str]) -> httpx.Response:
        url = self.parcels.format(order)
        return self.client.post(url, json=parcels, headers={"X-Request-Id": "request ship"})

    def rows(self) -> list[tuple[object, ...]]:
        return self.database.rows(f"SELECT id::text, total, state FROM {self.orders} ORDER BY id")


@pytest.fixture
def fastapi_shop(database: Database) -> Iterator[Shop]:
    command = python("-m", "uvicorn", "--port", "0", "fastapi_shop:app")
    with serving(command, database) as client:
        yield Shop(client, database, "fastapi_orders", "/orders/{}/parcels")


@pytest.fixture
def django_shop(database: Database) -> Iterator[Shop]:
    directory = EXAMPLES / "django_shop"
    for command in (["migrate", "--verbosity", "0"], ["makemigrations", "--check"]):
        manage = python("manage.py", *command)
        subprocess.run(manage, cwd=directory, env=environment(database), check=True)
    settings = {"DJANGO_SETTINGS_MODULE": "shop.settings"}
    with serving(python("-c", WSGI), database, directory, **settings) as client:
        yield Shop(client, database, "shop_order", "/orders/{}/parcels")


@pytest.fixture
def go_shop(database: Database, go_program: Path) -> Iterator[Shop]:
    with serving([go_program], database, PGSSLMODE="disable", PORT="0") as client:
        yield Shop(client, database, "go_orders", "/parcels?order={}")


@pytest.fixture(scope="session")
def go_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go_program_of("go_shop", tmp_path_factory.mktemp("go"))


@pytest.fixture(params=["fastapi_shop", pytest.param("django_shop", marks=pytest.mark.extended), "go_shop"])
def shop(request: pytest.FixtureRequest, database: Database) -> Shop:
    # Named here too, so that pytest knows of both servers.
    shop: Shop = request.getfixturevalue(request.param)
    return shop


def test_what_a_shop_does(shop: Shop) -> None:
    """Guards against an example that users copy, and that loses, duplicates or invents events."""
    placed = shop.place("a")
    assert (placed.status_code, placed.json()["duplicate"]) == (201, False)
    [(order, total, state)] = shop.rows()
    assert (total, state) == (5, "placed")
    assert events(shop.database) == [Event("order", str(order), "order.placed", {"total": 5}, "request a")]

    # The same request again, as a client sends it whose connection was cut.
    again = shop.place("a")
    assert (again.status_code, again.json()) == (200, {**placed.json(), "duplicate": True})
    assert (len(shop.rows()), len(events(shop.database))) == (1, 1)

    # What fails after the event was written takes it along, and its key is free again.
    assert shop.place("b", total=5000).status_code in (402, 403)
    assert (len(shop.rows()), len(events(shop.database))) == (1, 1)
    assert shop.place("b").status_code == 201

    assert shop.ship(order, ["x", "y", "z"]).status_code == 204
    assert shop.rows()[0] == (order, 5, "shipped")
    assert events(shop.database)[2:] == [
        Event("order", str(order), "order.parcel_shipped", {"parcel": parcel}, "request ship")
        for parcel in "xyz"
    ]
    assert shop.ship(10**6, ["x"]).status_code == 404
    assert len(events(shop.database)) == 5


def test_a_request_without_a_key(shop: Shop) -> None:
    """Guards against a key that all such requests share: every second order a 'duplicate'."""
    for headers in ({}, {"Idempotency-Key": ""}):
        refused = shop.client.post("/orders", json={"total": 5}, headers=headers)
        assert refused.status_code in (400, 422)
    assert events(shop.database) == []
