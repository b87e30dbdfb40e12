"""Partitions whose leaders move from broker to broker while the relay publishes."""

from __future__ import annotations

import random
import threading

from outbox_pipelines.quality import outbox_measurements
from outbox_pipelines.relay import service
from tests.conftest import Outbox, wait_until
from tests.history import business, mock, verify
from tests.history.verify import topics

PARTITIONS = 4
BROKERS = 3


def test_leaders_move_under_load(shop: Outbox) -> None:
    """Guards G1, G2 and G4: a move is no refusal, and nothing passes over what the last leader was sent."""
    seed = verify.seed()
    chance = random.Random(seed)
    with mock.running(BROKERS) as kafka:
        moving = Outbox(shop.settings.model_copy(update={"kafka": kafka.bootstrap}))
        kafka.create(topics(moving), PARTITIONS)
        stop = threading.Event()
        relay = threading.Thread(target=service.relay, args=(moving.settings,), kwargs={"stop": stop})
        relay.start()
        try:
            with moving.connect(autocommit=False) as connection:
                for n in range(1500):
                    business.count(connection, business.KINDS[n % 3], n % 20)
                    if n % 5 == 4:
                        connection.commit()
                    if n % 50 == 49:
                        for topic in topics(moving).values():
                            for partition in range(PARTITIONS):
                                kafka.lead(topic, partition, chance.randint(1, BROKERS))
            wait_until(lambda: not outbox_measurements.read(moving.settings).shards[0].backlog, seconds=60)
        finally:
            stop.set()
            relay.join(600)
        assert not relay.is_alive()
        found = verify.verdict(moving)
        with moving.connect() as connection:
            assert connection.execute("SELECT count(*) FROM outbox_parked").fetchone() == (0,)
    assert found.wrong == []
    assert found.committed == 1500
