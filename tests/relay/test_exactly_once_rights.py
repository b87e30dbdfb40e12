"""exactly_once where the broker refuses something: a topic, or the length of a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.relay import service
from outbox_pipelines.relay.lease import resharding
from outbox_pipelines.relay.lease.resharding import NotAllThereError
from tests.conftest import Outbox, wait_until
from tests.kafka_clients import AdminClient
from tests.relay.parked import parked_rows
from tests.relay.test_exactly_once import ONCE
from tests.relay.test_topics import _make
from tests.relay.threads import quick, relays, running, wait_for_holders, wait_until_relayed


@pytest.fixture
def on_strict(outbox: Outbox, strict: Kafka) -> Outbox:
    return Outbox(outbox.settings.model_copy(update={"kafka": strict.bootstrap}))


@contextmanager
def deny(broker: Kafka, what: ResourceType, prefix: str, operation: AclOperation) -> Iterator[None]:
    """Refuses one operation on everything of a prefix, for as long as the block."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})

    def rule(kind: type, *how: object) -> Any:
        return kind(what, prefix, ResourcePatternType.PREFIXED, "User:ANONYMOUS", "*", *how)

    made = [
        rule(AclBinding, operation, AclPermissionType.DENY),
        rule(AclBinding, AclOperation.ALL, AclPermissionType.ALLOW),
    ]
    for answer in admin.create_acls(made).values():
        answer.result(600)
    try:
        yield
    finally:
        gone = rule(AclBindingFilter, AclOperation.ANY, AclPermissionType.ANY)
        for removed in admin.delete_acls([gone]).values():
            removed.result(600)


def _insert(outbox: Outbox, aggregate_type: str, events: int) -> None:
    with outbox.connect() as connection:
        connection.execute(
            "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) "
            "SELECT %s, (n %% 7)::text, 'it.happened', jsonb_build_object('n', n) "
            "FROM generate_series(1, %s) n",
            [aggregate_type, events],
        )


def test_a_topic_that_may_not_be_written_to_stops_no_other(on_strict: Outbox, strict: Kafka) -> None:
    """Guards G9: a transaction that fails for one topic must not fail again and again for all of them."""
    outbox = on_strict
    for kind in ("open", "closed"):
        _make(outbox.settings.kafka, outbox.topic(kind))
    with (
        deny(strict, ResourceType.TOPIC, outbox.topic("closed"), AclOperation.WRITE),
        running(quick(outbox, max_attempts=1, **ONCE)),
    ):
        for _ in range(3):
            _insert(outbox, "closed", 20)
            _insert(outbox, "open", 100)
        wait_until(lambda: len(outbox.messages("open")) == 300, seconds=60, what="the other topic's events")
        wait_until(lambda: len(parked_rows(outbox)) == 60, what="the closed topic's events to be parked")
        with outbox.connect() as connection:
            causes = connection.execute("SELECT DISTINCT last_error FROM outbox_parked").fetchall()
        assert any("cannot be written to (not authorized)" in (cause or "") for (cause,) in causes)
        assert {row[2] for row in parked_rows(outbox)} <= {"retrying", "waiting"}


@pytest.mark.extended
def test_a_right_that_is_revoked_while_the_relay_runs(on_strict: Outbox, strict: Kafka) -> None:
    """Guards the same for a topic that was written to before."""
    outbox = on_strict
    for kind in ("open", "closed"):
        _make(outbox.settings.kafka, outbox.topic(kind))
    with running(quick(outbox, max_attempts=1, **ONCE)):
        _insert(outbox, "closed", 20)
        wait_until(lambda: len(outbox.messages("closed")) == 20, seconds=60)
        with deny(strict, ResourceType.TOPIC, outbox.topic("closed"), AclOperation.WRITE):
            _insert(outbox, "closed", 20)
            _insert(outbox, "open", 100)
            wait_until(lambda: len(outbox.messages("open")) == 100, seconds=60)
            wait_until(lambda: len(parked_rows(outbox)) == 20)
        wait_until(lambda: len(outbox.messages("closed")) == 40, seconds=60, what="the right to count again")
        wait_until(lambda: parked_rows(outbox) == [])


def test_a_transaction_that_is_longer_than_the_broker_allows(on_strict: Outbox) -> None:
    """Guards against a relay that tries without end what only an operator can change."""
    settings = quick(on_strict, delivery="exactly_once", transaction_seconds=30.0)
    with pytest.raises(SetupError, match=r"OUTBOX_TRANSACTION_SECONDS=30 is more.*transaction\.max\.timeout"):
        service.relay(settings)


def test_a_transactional_id_that_may_not_be_used(on_strict: Outbox, strict: Kafka) -> None:
    """Guards against the same for a right that is missing."""
    with (
        deny(strict, ResourceType.TRANSACTIONAL_ID, "outbox-", AclOperation.WRITE),
        pytest.raises(SetupError, match="grant WRITE and DESCRIBE on the transactional id 'outbox-"),
    ):
        service.relay(quick(on_strict, **ONCE))


@pytest.mark.extended
def test_more_shards_than_the_progress_topic_may_have(
    on_strict: Outbox, strict: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a change that succeeds, and after which no relay can begin."""
    outbox = on_strict
    with running(quick(outbox, **ONCE)):
        with deny(strict, ResourceType.TOPIC, "outbox-progress-", AclOperation.ALTER):
            wait_for_holders(outbox, 1)
            with pytest.raises(NotAllThereError, match="abandoned"):
                resharding.change(outbox.settings, 2)
        assert "exactly_once needs the topic outbox-progress-" in caplog.text
        outbox.fill(100)
        wait_until_relayed(outbox)
    with relays(outbox, 2, **ONCE):
        assert resharding.change(outbox.settings, 2)
