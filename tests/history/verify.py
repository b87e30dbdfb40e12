"""The verdict on one outbox, for tests that arrange the faults themselves."""

from __future__ import annotations

import os
import random

from tests.conftest import Outbox
from tests.history import business, reader
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


def verdict(outbox: Outbox, *, calm: bool = False) -> Verdict:
    """Compares what is committed with what the topics hold, now; `calm` allows no duplicate."""
    with outbox.connect() as connection:
        committed = business.committed(connection)
    messages = reader.read(outbox.settings.kafka, topics(outbox))
    return judge(History("test", 0, "at_least_once", committed, messages, faults=[] if calm else [_ALWAYS]))
