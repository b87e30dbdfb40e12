"""The publisher by itself: what it hands to Kafka, in which order."""

from __future__ import annotations

import json

from outbox_pipelines.event import Event, Piece
from outbox_pipelines.relay.parking import ParkingLot
from outbox_pipelines.relay.position import Snapshot
from outbox_pipelines.relay.publisher import Publisher
from tests.conftest import Outbox, wait_until
from tests.relay.topic import create_topic


def _piece(*seqs: int) -> Piece:
    nowhere = Snapshot(0, 0, ())
    events = [Event(n, f"id-{n}", "order", "a", "order.placed", json.dumps({"n": n}), None) for n in seqs]
    return Piece(events, sum(len(event.payload) for event in events), nowhere, nowhere, ends_tick=False)


def test_a_piece_does_not_overtake_the_rest_of_the_one_before(outbox: Outbox) -> None:
    """Guards against a new producer (for a topic with a low limit) that takes the next piece first."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    publisher = Publisher(outbox.settings, ParkingLot())
    # What the client says at its start is served; else it counts as something on its way.
    wait_until(lambda: publisher.poll(0.01) or not len(publisher._producer))
    publisher.publish(_piece(1, 2))
    publisher.publish(_piece(3, 4))

    def is_empty() -> bool:
        publisher.poll(0.01)
        publisher.acknowledged()
        return publisher.pending == 0

    wait_until(is_empty, what="all to be acknowledged")
    publisher.discard()
    assert [json.loads(message.value or "")["n"] for message in outbox.messages()] == [1, 2, 3, 4]
