"""Batches that the broker has stored but never acknowledged: sent again, they may not pass one another."""

from __future__ import annotations

import threading
from pathlib import Path

from outbox_pipelines.relay import service
from tests.conftest import Outbox
from tests.history import business, mock, verify
from tests.history.verify import topics


def test_what_was_stored_and_not_acknowledged_is_sent_again_in_order(shop: Outbox, tmp_path: Path) -> None:
    """Guards G1 and G2: a retry that is taken for a loss, skips an event or overtakes one.

    The mock stores retries again, which Kafka would not: so the duplicates show that the fault has happened.
    """
    config = "socket.timeout.ms=1000,reconnect.backoff.ms=10"
    with mock.running() as kafka:
        lossy = Outbox(shop.settings.model_copy(update={"kafka": kafka.bootstrap, "kafka_config": config}))
        kafka.create(topics(lossy), 4)
        with lossy.connect(autocommit=False) as connection:
            for n in range(200):
                business.count(connection, business.KINDS[n % 3], n % 5)
                if n % 10 == 9:
                    connection.commit()
        kafka.lose_acknowledgements(3, 2.5)
        relay = threading.Thread(target=service.relay, args=(lossy.settings,), kwargs={"until_empty": True})
        relay.start()
        relay.join(600)
        assert not relay.is_alive()
        found = verify.verdict(lossy)
    assert found.wrong == []
    assert found.committed == 200
    assert found.redelivered > 0
