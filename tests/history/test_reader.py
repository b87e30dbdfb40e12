"""The reader of histories sees all that is committed, whatever hides it for a while."""

from __future__ import annotations

import json

from tests.conftest import Outbox
from tests.history.reader import Reader
from tests.kafka_clients import Producer
from tests.relay.topic import create


def test_what_an_open_transaction_hides_is_read(outbox: Outbox) -> None:
    """Guards against a lost write that is none: a relay that was killed has left a transaction open."""
    kafka, topic = outbox.settings.kafka, outbox.topic()
    create(kafka, topic, 1)
    killed = Producer({"bootstrap.servers": kafka, "transactional.id": topic})
    killed.init_transactions(60)
    killed.begin_transaction()
    killed.produce(topic, b"{}", b"1")
    killed.flush(60)
    other = Producer({"bootstrap.servers": kafka})
    other.produce(topic, json.dumps({"n": 1, "token": "a"}).encode(), b"2", headers=[("id", b"i")])
    assert other.flush(60) == 0

    class Aborting(Reader):
        is_open = True

        def poll(self, seconds: float) -> None:
            super().poll(seconds)
            if self._ends and self.is_open:
                assert self.tokens == set()
                killed.abort_transaction(60)
                self.is_open = False

    reader = Aborting(kafka, {"order": topic})
    reader.read_to_end()
    reader.close()
    assert reader.tokens == {"a"}
