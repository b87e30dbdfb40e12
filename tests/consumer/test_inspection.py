"""`outbox consumer status MODULE:NAME`: a consumer as seen from outside of its processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outbox_pipelines.consumer import loading
from outbox_pipelines.consumer.loading import inspect
from outbox_pipelines.errors import SetupError
from tests import in_process, kafka_clients
from tests.conftest import clean_environment, wait_until
from tests.consumer.place import Place, effect, running, uuid7

MODULE = """
from tests.consumer.place import Place, effect
consumer = Place({place}).bare({more})
consumer.on("order.placed", "order.cancled")(effect)
"""


def status(place: Place, folder: Path, *more: str) -> str:
    (folder / "billing.py").write_text(
        MODULE.format(place=f"{place.dsn!r}, {place.kafka!r}, {place.topic!r}", more="")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        # Imported again, since it names the topic of one test.
        patch.delitem(sys.modules, "billing", raising=False)
        done = in_process.run(("consumer", "status", "billing:consumer", *more), clean_environment())
        sys.modules.pop("billing", None)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_status_of_one_consumer(place: Place, tmp_path: Path) -> None:
    """Guards against a misspelled type that nothing shows, and a look that moves offsets."""
    place.load(20)
    with running(place.consumer()) as run:
        wait_until(lambda: place.uncommitted() == 0, what="all offsets")
        run.end()
    place.send(*(uuid7() for _ in range(3)), type="order.canceled")
    place.put("no event")
    lines = status(place, tmp_path).splitlines()
    assert lines == [
        "billing: 0 waiting; 0 dead letters",
        f"{place.topic}: 4 messages behind",
        "types of the newest 23 messages:",
        "      20 × order.placed",
        "       3 × order.canceled, no handler",
        "warning: no message has the type 'order.cancled', which has a handler; 'order.canceled' has no "
        "handler: check the name",
    ]
    shown = json.loads(status(place, tmp_path, "--json"))
    assert shown["inboxes"][0]["source"] == "billing"
    assert shown["kafka"]["behind"] == {place.topic: 4}
    assert shown["kafka"]["unmatched"] == {"order.cancled": "order.canceled"}
    assert place.uncommitted() == 4


@pytest.mark.extended
def test_the_ends_of_transactions_are_no_messages(place: Place) -> None:
    """Guards against a consumer of an exactly_once topic that never has 0 messages behind."""
    producer = kafka_clients.Producer(
        {"bootstrap.servers": place.kafka, "transactional.id": place.topic, "partitioner": "murmur2_random"}
    )
    producer.init_transactions(60)

    def send(messages: int) -> None:
        producer.begin_transaction()
        for n in range(messages):
            producer.produce(
                place.topic, "{}", key=str(n), headers={"id": str(uuid7()), "event-type": "order.placed"}
            )

    send(8)
    producer.commit_transaction(60)
    consumer = place.consumer()
    with running(consumer) as run:
        wait_until(lambda: place.effects() == 8, what="all events")
        run.end()
    assert inspect(consumer).behind == {place.topic: 0}
    send(20)
    assert producer.flush(60) == 0
    producer.abort_transaction(60)
    assert inspect(consumer).behind == {place.topic: 0}
    send(2)
    producer.commit_transaction(60)
    found = inspect(consumer)
    assert 2 <= found.behind[place.topic] <= 4
    assert found.types == {"order.placed": 10}


def test_a_topic_that_is_not_there(place: Place) -> None:
    consumer = place.bare(topics=["^no-such-topic-.*"])
    consumer.on("order.placed")(effect)
    found = inspect(consumer)
    assert (found.behind, found.sampled, found.unmatched) == ({}, 0, {})


def test_kafka_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "_SECONDS", 0.5)
    place = Place("", "127.0.0.1:9", "t")
    consumer = place.bare()
    consumer.on("order.placed")(effect)
    with pytest.raises(SetupError, match=r"Kafka \(127.0.0.1:9\) is unavailable"):
        inspect(consumer)
    assert capfd.readouterr().err == ""
