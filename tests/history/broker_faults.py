"""Faults of brokers other than kills and restarts, and requests that come late.

Invariants:
- As in `nemesis`: a fault is a context that begins, and at its end is healed.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaException, TopicPartition

from tests.history.requests import ABORT, ADD, COMMIT, FIND, INIT, PRODUCE, KafkaProxy, Late
from tests.kafka_clients import AdminClient, Consumer

if TYPE_CHECKING:
    from outbox_pipelines.local.kafka import Kafka
    from tests.history.record import Delivery
    from tests.history.run import Run

# Which requests come late: those that are asked all the time, and those of starts.
_OFTEN: Final[Mapping[Delivery, tuple[str, ...]]] = {
    "at_least_once": (PRODUCE,),
    "exactly_once": (COMMIT, COMMIT, COMMIT, PRODUCE, ADD),
}
_RARE: Final[Mapping[Delivery, tuple[str, ...]]] = {
    "at_least_once": (INIT, FIND),
    "exactly_once": (INIT, FIND, ABORT),
}
_SECONDS: Final = 30.0


def one(run: Run, chance: random.Random) -> Kafka:
    """A broker that chance chooses."""
    return chance.choice(run.servers.brokers)


@contextmanager
def freeze(run: Run, chance: random.Random) -> Iterator[None]:
    broker = one(run, chance)
    broker.freeze()
    try:
        yield
    finally:
        broker.thaw()


@contextmanager
def stutter(run: Run, chance: random.Random) -> Iterator[None]:
    """A broker that is busy: it stands still again and again, each time so long that calls time out."""
    broker, end = one(run, chance), threading.Event()
    pauses = [chance.uniform(0.05, 2.5) for _ in range(20)]

    def stutter() -> None:
        for n in itertools.count():
            broker.freeze()
            is_over = end.wait(pauses[n % len(pauses)])
            broker.thaw()
            if is_over or end.wait(0.1):
                return

    thread = threading.Thread(target=stutter, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@contextmanager
def late_requests(run: Run, chance: random.Random) -> Iterator[None]:
    """One after the other, as long as the fault lasts."""
    requests, delivery = run.servers.requests, run.history.delivery
    before = requests.came_late.copy()
    for names in (_OFTEN[delivery], _RARE[delivery]):
        requests.delay(draw(random.Random(chance.random()), names))
    if chance.random() < 0.5:
        # What is asked of a coordinator overtakes the events.
        requests.slow({PRODUCE: chance.uniform(0, 0.05)})
    try:
        yield
    finally:
        requests.heal()
        for name, count in (requests.came_late - before).items():
            run.history.steps[f"late {name}"] = run.history.steps.get(f"late {name}", 0) + count


def draw(chance: random.Random, names: tuple[str, ...]) -> Late:
    """A late request, and after it another one."""
    name = chance.choice(names)
    # The same request, asked again; then a part of the next transaction, or of what follows it.
    next_one = (ADD,) + (PRODUCE,) * chance.randint(0, 4) if name in (COMMIT, ABORT, ADD) else (name,)
    return Late(
        name,
        skip=chance.choice([0, 0, chance.randint(0, 5)]),
        moments=(name, *chance.choice([(), next_one, next_one])),
        seconds=chance.choice([0.0, chance.uniform(0, 0.05), chance.uniform(0, 2)]),
        pause=chance.choice([0.0, 0.1, 0.25]),
        arrives=chance.random() < 0.25,
        again=lambda: draw(chance, names),
    )


@contextmanager
def kill_at_request(run: Run, chance: random.Random) -> Iterator[None]:
    """Kills a broker that has just been asked: the coordinator to commit, or a leader to take events."""
    servers, pause = run.servers, chance.choice([0.0, chance.uniform(0, 0.02)])
    killed: list[Kafka] = []

    def kill(proxy: KafkaProxy) -> None:
        time.sleep(pause)
        killed.append(servers.brokers[servers.kafka_proxies.index(proxy)])
        killed[0].kill()

    name = COMMIT if run.history.delivery == "exactly_once" else PRODUCE
    try:
        with servers.requests.at(name, kill):
            yield
    finally:
        for broker in killed:
            broker.start()


@contextmanager
def two_away(run: Run, chance: random.Random) -> Iterator[None]:
    """All but one: what that one takes is acknowledged to no client until another one is back."""
    *away, left = chance.sample(run.servers.brokers, len(run.servers.brokers))
    begin, end = chance.choice([("kill", "start"), ("stop", "start"), ("freeze", "thaw")])
    for broker in away:
        getattr(broker, begin)()
    try:
        before = _replicated(run, left)
        yield
        after = _replicated(run, left)
        if moved := [place for place in before.keys() & after.keys() if before[place] != after[place]]:
            run.history.stuck.append(f"acknowledged by one broker of three: {moved[:5]}")
    finally:
        for broker in away:
            getattr(broker, end)()


def _replicated(run: Run, broker: Kafka) -> dict[tuple[str, int], int]:
    """Up to where enough brokers have the partitions that this one leads."""
    client = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "of nobody"})
    found = {}
    try:
        for topic in client.list_topics(timeout=_SECONDS).topics.values():
            for partition in topic.partitions.values():
                if topic.topic in run.topics.values() and partition.leader == broker.settings["node.id"]:
                    place = TopicPartition(topic.topic, partition.id)
                    # A leader that was elected a moment ago does not know.
                    with suppress(KafkaException):
                        found[place.topic, place.partition] = client.get_watermark_offsets(place, 5)[1]
    finally:
        client.close()
    return found


@contextmanager
def roll(run: Run, chance: random.Random) -> Iterator[None]:
    """Restarts all brokers with another setting, each when all replicas of the others are in sync."""
    threads = chance.randint(2, 8)
    for broker in run.servers.brokers:
        broker.stop()
        broker.settings["num.io.threads"] = threads
        broker.start()
        if not run.wait(run.patience, lambda: _is_in_sync(run), pace=0.2):
            run.history.stuck.append("replicas are not in sync after the restart of a broker")
    yield


def _is_in_sync(run: Run) -> bool:
    try:
        topics = AdminClient({"bootstrap.servers": run.servers.bootstrap}).list_topics(timeout=10).topics
    except KafkaException:
        return False
    return all(
        len(partition.isrs) == len(partition.replicas)
        for topic in topics.values()
        for partition in topic.partitions.values()
    )
