"""The client of Kafka Connect, with answers that a real worker gave."""

from __future__ import annotations

import socket
from base64 import b64decode
from dataclasses import replace
from typing import Any

import pytest

from outbox_pipelines.debezium.connect import Connect, MissingError
from outbox_pipelines.debezium.connector_reading import ask
from outbox_pipelines.debezium.connector_state import Connector, Task
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.settings import load_settings
from tests.debezium.worker import ANSWERS, answering
from tests.quality.test_rules import CONNECTOR

# As Kafka 4.1 words it.
REBALANCE = {
    "status": 409,
    "body": {
        "error_code": 409,
        "message": "Cannot complete request because of a conflicting operation (e.g. worker rebalance)",
    },
}


def test_what_is_asked() -> None:
    """Guards against a name that is taken for a part of the address."""
    with answering(get=["config"]) as worker:
        assert Connect(worker.url + "/").config("a/b c")["slot.name"].startswith("debezium_")
    assert [(each.method, each.path) for each in worker.asked] == [
        ("GET", "/connectors/a%2Fb%20c/config"),
    ]


def test_a_connector_that_is_missing() -> None:
    with answering(get=["missing"]) as worker, pytest.raises(MissingError, match="nope not found"):
        Connect(worker.url).status("nope")


@pytest.mark.extended
@pytest.mark.parametrize("passing", [REBALANCE, "leader ended"], ids=["rebalance", "leader"])
def test_what_passes_is_waited_for(passing: str | dict[str, Any]) -> None:
    """Guards against a command that fails because a worker has just been restarted."""
    with answering(get=[passing, passing, "status"]) as worker:
        Connect(worker.url).status("shop")
        assert len(worker.asked) == 3
    with answering(get=[passing]) as worker, pytest.raises(NotReadyError, match="within 1 s"):
        Connect(worker.url, seconds=0.6).status("shop")


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "refuses the credentials"), (500, "HTTP 500"), (400, "STOPPED state")]
)
def test_what_lasts_is_not_waited_for(status: int, remedy: str) -> None:
    answer = {"status": status, "body": ANSWERS["offsets of running"]["body"]}
    with answering(get=[answer]) as worker, pytest.raises(SetupError, match=remedy):
        Connect(worker.url).offsets("shop")
    assert len(worker.asked) == 1


def test_the_password_is_sent_and_never_shown() -> None:
    with answering(get=[{"status": 401, "body": "no"}]) as worker:
        url = worker.url.replace("//", "//relay:s%40crab8@")
        settings = load_settings(connect_url=url)
        with pytest.raises(SetupError) as refused:
            Connect(settings.require_connect()).status("shop")
    assert worker.asked[0].login is not None
    assert b64decode(worker.asked[0].login.removeprefix("Basic ")) == b"relay:s@crab8"
    assert "crab8" not in f"{refused.value}{settings!r}"


def test_another_worker_is_asked_if_one_does_not_answer() -> None:
    with socket.socket() as silent, answering(get=["status"]) as worker:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        frozen = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert Connect(f"http://127.0.0.1:9,{frozen},{worker.url}", seconds=1).status("shop") != {}
        with pytest.raises(UnavailableError, match="check OUTBOX_CONNECT_URL"):
            Connect(frozen, seconds=0.2).status("shop")


def test_something_else_than_kafka_connect() -> None:
    page = {"status": 200, "body": "<html>"}
    with answering(get=[page]) as worker, pytest.raises(SetupError, match="not answer as Kafka Connect"):
        Connect(worker.url).status("shop")


def _connector(status: dict[str, Any]) -> Connector:
    tasks = [Task(t["id"], t["state"], t["worker_id"], t.get("trace")) for t in status["tasks"]]
    own = status["connector"]
    return replace(CONNECTOR, state=own["state"], trace=own.get("trace"), tasks=tasks)


def test_a_running_connector_has_no_problem() -> None:
    assert _connector(ANSWERS["status"]["body"]).problems == []


def test_an_event_that_ended_the_task_is_told_from_another_failure() -> None:
    (problem,) = _connector(ANSWERS["status failed"]["body"]).problems
    assert problem.startswith("task 0 has failed on a:8083: an event is too large (")
    assert "max.message.bytes" in problem
    lost = ANSWERS["status failed"]["body"] | {
        "tasks": [
            {"id": 0, "state": "FAILED", "worker_id": "a", "trace": "X\n\tat y\nCaused by: no route\n\tat z"}
        ]
    }
    (problem,) = _connector(lost).problems
    assert problem == (
        "task 0 has failed on a: X; caused by no route. Restart the connector: POST "
        "/connectors/shop/restart?includeTasks=true"
    )


def test_what_is_reported_includes_that_nothing_answers() -> None:
    """Guards against a check that ends with an error, so that no alert is sent."""
    with answering(config=["config"], status=["status"], offsets=["offsets"]) as worker:
        found = ask(load_settings(connect_url=worker.url))
    assert found.error is None
    assert found.offset is not None
    assert found.offset["txId"] > 0
    assert ask(load_settings(connect_url="http://127.0.0.1:9")).error is not None
    with answering(get=["missing"]) as worker:
        assert ask(load_settings(connect_url=worker.url)) == type(found)()
