"""A place in a consumer group, while partitions go and come."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_pipelines.consumer import kafka_clients, kafka_messages, membership
from outbox_pipelines.local.server import free_port
from tests.conftest import either, headers_of, wait_until
from tests.consumer.place import Place


def _settings(place: Place) -> dict[str, Any]:
    # A member hears of a rebalance by its next heartbeat, usually after three seconds.
    given = {"bootstrap.servers": place.kafka, "heartbeat.interval.ms": 100}
    return kafka_clients.settings(given, f"{place.topic}-group")


class _Rebalancing:
    """Kafka's client, with a partition that is lost and assigned again in the poll of its first message."""

    def __init__(self, client: confluent_kafka.Consumer, member: membership.Member) -> None:
        self._client, self._member = client, member
        self.rebalances = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def poll(self, seconds: float) -> Any:
        message = self._client.poll(seconds)
        if message is not None and message.error() is None and not self.rebalances:
            self.rebalances += 1
            partitions = [TopicPartition(str(message.topic()), message.partition() or 0)]
            client: Any = self
            self._member._lost(client, partitions)
            self._member._assigned(client, partitions)
        return message


def test_a_partition_that_goes_and_comes_back_within_one_poll_skips_no_message(place: Place) -> None:
    """Guards G10: the first message after the assignment was dropped, and the offset went past it."""
    sent = place.send(*(uuid.uuid4() for _ in range(3)), keys=1)
    given = _settings(place)
    member = membership.Member(given, [place.topic])
    client = _Rebalancing(member._client, member)
    member._client = client  # type: ignore[assignment]
    seen: list[str] = []
    try:
        deadline = time.monotonic() + 180
        while sent[-1] not in seen and time.monotonic() < deadline:
            seen += [(dict(headers_of(message))["id"] or b"").decode() for message in member.poll()]
    finally:
        member.close()
    assert client.rebalances == 1
    assert seen == sent


class _Stuck:
    """Kafka's client, which has lost the group's coordinator, and waits for it at its end."""

    def __init__(self, client: confluent_kafka.Consumer) -> None:
        self._client = client
        self.is_found = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        self.is_found.wait(600)
        self._client.close()


def test_a_client_that_cannot_leave_is_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a consumer that ignores SIGTERM, because a broker stood still for some seconds."""
    monkeypatch.setattr(membership, "_LEAVE_SECONDS", 0.2)
    given = _settings(place)
    member = membership.Member(given, [place.topic])
    client = _Stuck(member._client)
    member._client = client  # type: ignore[assignment]
    closing = threading.Thread(target=member.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert "could not leave the group" in caplog.text
    client.is_found.set()


class _Lost:
    """Kafka's client that stands still: nothing arrives."""

    def __init__(self, client: confluent_kafka.Consumer, **answers: Any) -> None:
        self._client = client
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def poll(self, seconds: float) -> None:
        time.sleep(seconds)


def _unanswered(topic: str, timeout: float) -> None:
    raise KafkaException(KafkaError(KafkaError._TRANSPORT))


@pytest.mark.parametrize(
    "answers",
    either(
        {"list_topics": _unanswered},
        {"memberid": lambda: None},
        {"get_watermark_offsets": lambda at, cached: (-1001, -1001)},
        # Of an earlier assignment of the partition it has an end.
        {},
    ),
    ids=["no broker", "not in the group", "reads nothing", "reads nothing again"],
)
def test_a_client_that_stands_still_is_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]
) -> None:
    """Guards against a consumer that stands still until an operator restarts it."""
    given = _settings(place)
    deadline = time.monotonic() + 180
    with contextlib.closing(membership.Member(given, [place.topic])) as member:
        client: Any = member._client
        while len(client.assignment()) < 4 and time.monotonic() < deadline:
            assert member.poll() == []
        assert len(member.changes()[1]) == 4
        # Not before: the client needs longer to join.
        monkeypatch.setattr(membership, "_EVERY_SECONDS", 0.2)
        member._lost_clients.renewed()
        lost: Any = _Lost(client, **answers)
        member._client = lost
        sent = place.send(*(uuid.uuid4() for _ in range(40)), keys=20)
        seen: list[str] = []
        left: set[kafka_messages.Partition] = set()
        while len(seen) < len(sent) and time.monotonic() < deadline:
            seen += [(dict(headers_of(message))["id"] or b"").decode() for message in member.poll()]
            left |= member.changes()[0]
            if member._client is not lost:
                # The new one must not be replaced while it joins.
                monkeypatch.setattr(membership, "_EVERY_SECONDS", 600.0)
                member._lost_clients.renewed()
        assert member._client is not lost
    assert sorted(seen) == sorted(sent)
    assert len(left) == 4


@pytest.mark.extended
def test_a_client_that_is_busy_elsewhere_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one partition that stands still while messages of others arrive."""
    given = _settings(place)
    deadline = time.monotonic() + 180
    with contextlib.closing(membership.Member(given, [place.topic])) as member:
        client: Any = member._client
        lost: Any = _Lost(
            client,
            poll=client.poll,
            get_watermark_offsets=lambda at, cached: (0, -1001 if at.partition == 3 else 1),
        )
        member._client = lost
        place.load(100)
        while not member.poll(100):
            assert time.monotonic() < deadline
        monkeypatch.setattr(membership, "_EVERY_SECONDS", 0.05)
        member._lost_clients.renewed()
        while member._client is lost and time.monotonic() < deadline:
            place.load(100)
            member.poll(100)
        assert member._client is not lost


@pytest.mark.extended
def test_a_member_without_work_is_not_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a group that is rebalanced again and again: nothing to read, no partition of its own."""
    given = _settings(place)
    with contextlib.ExitStack() as stack:
        members = [membership.Member(given, [place.topic]) for _ in range(5)]
        for member in members:
            stack.callback(member.close)
        clients = [member._client for member in members]

        def polled() -> list[int]:
            for member in members:
                assert member.poll(seconds=0.01) == []
            return sorted(len(client.assignment()) for client in clients)

        wait_until(lambda: polled() == [0, 1, 1, 1, 1], what="a partition for each of four")
        asked: list[bool] = []
        ask = membership.LostClients._stands_still

        def noted(*given: Any) -> bool:
            asked.append(ask(*given))
            return asked[-1]

        monkeypatch.setattr(membership.LostClients, "_stands_still", noted)
        monkeypatch.setattr(membership, "_EVERY_SECONDS", 0.05)
        for member in members:
            member._lost_clients.renewed()
        wait_until(lambda: polled() and len(asked) >= 100, what="many questions")
        assert asked[-50:] == [False] * 50
        assert [member._client for member in members] == clients


def test_during_an_outage_no_client_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against members that leave and join in an outage, and a group that is rebalanced for each."""
    monkeypatch.setattr(membership, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(membership, "_ANSWER_SECONDS", 0.05)
    given = kafka_clients.settings({"bootstrap.servers": f"127.0.0.1:{free_port()}"}, "nobody")
    with contextlib.closing(membership.Member(given, ["nothing"])) as member:
        client = member._client
        for _ in range(10):
            assert member.poll(seconds=0.01) == []
        assert member._client is client


@pytest.mark.extended
def test_a_partition_that_goes_during_a_pause_flows_when_it_comes_back(place: Place) -> None:
    """Guards against a standstill after an outage: the client had it paused forever."""
    given = _settings(place)
    deadline = time.monotonic() + 180
    with contextlib.closing(membership.Member(given, [place.topic])) as member:
        while not (all_of_them := len(member._client.assignment())) and time.monotonic() < deadline:
            member.wait(0.1)
        with contextlib.closing(membership.Member(given, [place.topic])) as other:
            while not other._client.assignment() and time.monotonic() < deadline:
                other.poll(seconds=0.1)
                member.wait(0.1)
            assert 0 < len(member._client.assignment()) < all_of_them
        while len(member._client.assignment()) < all_of_them and time.monotonic() < deadline:
            assert member.poll(seconds=0.1) == []
        sent = place.send(*(uuid.uuid4() for _ in range(40)), keys=20)
        seen: list[str] = []
        while len(seen) < len(sent) and time.monotonic() < deadline:
            seen += [(dict(headers_of(message))["id"] or b"").decode() for message in member.poll()]
    assert sorted(seen) == sorted(sent)


def test_the_lag_is_what_is_to_come(place: Place) -> None:
    """Guards against a lag that is another number, or that ends a consumer."""
    place.load(50, keys=1)
    given = _settings(place)
    member = membership.Member(given, [place.topic])
    polled = 0
    try:
        deadline = time.monotonic() + 180
        while not any(member.lag.values()) and polled < 50 and time.monotonic() < deadline:
            # Each poll measures.
            member._lag_at = 0.0
            polled += len(member.poll())
        assert sorted(member.lag.values()) == [50 - polled]
        while polled < 50 and time.monotonic() < deadline:
            member._lag_at = 0.0
            polled += len(member.poll())
        assert sorted(member.lag.values()) == [0]
    finally:
        member.close()
