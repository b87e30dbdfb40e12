"""Whose fault a failure is: every code is decided, and what is not known is an outage (G4)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError

from outbox_pipelines.relay.core.outcomes import Cause
from outbox_pipelines.relay.kafka import client_errors, topic_admin, topic_lookups
from tests.conftest import Outbox, wait_until
from tests.history import mock
from tests.relay.parked import parked_rows
from tests.relay.threads import quick, running

# The only codes that may cost an event an attempt.
BLAMES_THE_EVENT = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError._INVALID_ARG,
}
# What consumers, administrators and brokers among themselves are answered, and no producer is.
OF_OTHERS = {
    *range(-191, -190),
    *(
        -189,
        -182,
        *range(-180, -173),
        -173,
        -171,
        -170,
        -168,
        -167,
        *range(-165, -152),
        -149,
        *range(-147, -144),
    ),
    *(
        *range(-143, -138),
        -196,
        -198,
        -137,
        0,
        1,
        4,
        11,
        12,
        *range(22, 29),
        30,
        *range(33, 35),
        *range(36, 43),
    ),
    *(50, 54, 55, *range(60, 74), *range(77, 87), 88, *range(91, 98), *range(110, 120), *range(121, 134)),
}


def _codes() -> list[int]:
    """Every error code that the installed client knows."""
    return sorted({value for value in vars(KafkaError).values() if isinstance(value, int)})


def test_every_code_of_the_client_is_decided() -> None:
    """Guards against a code that has no decision, or that blames the event by accident."""
    assert [
        KafkaError(code).name() for code in _codes() if code not in client_errors._TABLE.keys() | OF_OTHERS
    ] == []
    assert not client_errors._TABLE.keys() & OF_OTHERS
    assert {
        code for code in _codes() if client_errors.cause(KafkaError(code)) is Cause.EVENT
    } == BLAMES_THE_EVENT
    assert all(client_errors.cause(KafkaError(code)) is Cause.OUTAGE for code in OF_OTHERS)


def test_a_code_that_no_client_knows_is_an_outage() -> None:
    """Guards against a newer broker whose every answer makes dead letters."""
    assert client_errors.cause(KafkaError(30_000)) is Cause.OUTAGE


@pytest.fixture
def broker(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[mock.Mock, Outbox]]:
    """A broker that gives the answers a test sets, and an outbox with a topic there."""
    # It has no controller, and a topic that refuses messages is tried again at once.
    monkeypatch.setattr(topic_admin, "_DESCRIBE_SECONDS", 0.3)
    monkeypatch.setattr(topic_lookups, "_TRIAL_SECONDS", 0.2)
    with mock.running() as broker:
        broker.create({"order": outbox.topic()}, partitions=1)
        changed = {"kafka": broker.bootstrap, "breaker_seconds": 0.5}
        yield broker, Outbox(outbox.settings.model_copy(update=changed))


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.INVALID_TIMESTAMP,
        # The client tries this again itself.
        pytest.param(KafkaError.NETWORK_EXCEPTION, marks=pytest.mark.extended),
        *(
            pytest.param(code, marks=pytest.mark.thorough(only=True))
            for code in (
                KafkaError.UNKNOWN,
                KafkaError.THROTTLING_QUOTA_EXCEEDED,
                KafkaError.KAFKA_STORAGE_ERROR,
            )
        ),
    ],
)
def test_a_brokers_failure_costs_no_event_an_attempt(broker: tuple[mock.Mock, Outbox], code: int) -> None:
    """Guards against dead letters made by a broker's failure, or by the clock of the relay."""
    kafka, outbox = broker
    outbox.fill(30, aggregates=30)
    kafka.answer(*[code] * 5)
    with running(quick(outbox, max_attempts=1)):
        wait_until(lambda: len(outbox.messages()) >= 30, seconds=60, what="all to be published")
        wait_until(lambda: not parked_rows(outbox), what="nothing to be parked")
    with outbox.connect() as connection:
        row = connection.execute("SELECT count(*), max(retry_count) FROM outbox_events").fetchone()
    assert row == (30, 0)
