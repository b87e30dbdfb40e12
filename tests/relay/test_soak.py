"""Faults of every kind, drawn at random, for as long as SOAK_SECONDS says; the history judges at the end."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import ExitStack, suppress

import psycopg
import pytest

from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from tests.conftest import Outbox
from tests.relay import faults, history

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_random_faults(own_servers: tuple[Postgres, Kafka, Outbox]) -> None:
    """Guards against what only a long and unlucky run meets."""
    postgres, kafka, outbox = own_servers
    seed = faults.seed()
    chance = random.Random(seed)
    with outbox.connect() as connection:
        history.prepare(connection)
    until = time.monotonic() + SECONDS
    count = 0
    while time.monotonic() < until:
        count += 1
        writers = history.Writers(outbox.settings.dsn, seed + count, 4)
        with ExitStack() as relays:
            first = relays.enter_context(faults.relay(outbox, OUTBOX_LEASE_SECONDS="2"))
            relays.enter_context(faults.relay(outbox, OUTBOX_LEASE_SECONDS="2"))
            faults.wait_for_more(faults.published(outbox), 20, seconds=60)
            fault = chance.choice(["kill", "freeze", "terminate", "kafka", "postgres"])
            print(f"{count}: {fault}", flush=True)
            if fault == "kill":
                os.kill(first.pid, signal.SIGKILL)
            elif fault == "terminate":
                os.kill(first.pid, signal.SIGTERM)
            elif fault == "freeze":
                os.kill(first.pid, signal.SIGSTOP)
                threading.Event().wait(chance.random() * 5)
                os.kill(first.pid, signal.SIGCONT)
            elif fault == "kafka":
                kafka.kill()
                threading.Event().wait(chance.random() * 5)
                kafka.start()
            else:
                postgres.kill()
                postgres.start()
                with suppress(psycopg.OperationalError):
                    writers.stop()
                continue
            faults.wait_for_more(faults.published(outbox), 20, seconds=60)
        writers.stop()
    faults.verify(outbox)
