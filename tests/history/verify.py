"""The verdict on one outbox, for tests that arrange the faults themselves."""

from __future__ import annotations

import os
import random

from tests.conftest import Outbox
from tests.history import business, effects, reader
from tests.history.judge import Verdict, judge
from tests.history.record import Fault, History

_ALWAYS = Fault("what the test does", 0, float("inf"), disturbs=True)


def seed() -> int:
    """From the environment's SEED, or chance; printed, for a failure to be repeated."""
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    print("SEED", seed)
    return seed


def topics(outbox: Outbox) -> dict[str, str]:
    """Each kind's topic."""
    return {kind: outbox.topic(kind) for kind in business.KINDS}


def verdict(outbox: Outbox, *, calm: bool = False, consumer: str = "") -> Verdict:
    """Compares what is committed with what the topics hold now, and with what the consumer of this name did.

    Args:
        calm: allows no duplicate.
        consumer: none where it is empty.
    """
    return judge(history(outbox, calm=calm, consumer=consumer))


def history(outbox: Outbox, *, calm: bool = False, consumer: str = "") -> History:
    """What is to be judged, with the same arguments."""
    history = History("test", 0, "at_least_once", consumer=consumer, faults=[] if calm else [_ALWAYS])
    with outbox.connect() as connection:
        history.committed = business.committed(connection)
        if consumer:
            history.effects = effects.made(connection)
    history.messages, _ = reader.read(outbox.settings.kafka, topics(outbox))
    return history
