"""What is done to a relay and everything around it: faults by name, and a choice of them that follows a seed.

Invariants:
- A fault is a context: it begins, and at its end is healed.
- What is drawn together has different targets: each can be healed without the other.
"""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.history import broker_faults

if TYPE_CHECKING:
    from outbox_pipelines.local.server import Server
    from tests.history.processes import Process
    from tests.history.proxy import Proxy
    from tests.history.relays import Relay
    from tests.history.run import Run

# What is asked of the servers comes before they are hurt, and is taken back after they are healed; a replay
# can be completed when topics take everything again.
_ORDER = {"replay": 0, "topics": 1, "shards": 1}
# Less than the large ones of `business.MIXED`, more than a batch of small ones at their usual pace.
_SMALL_LIMIT = 30_000
Make = Callable[["Run", random.Random], AbstractContextManager[None]]
Choose = Callable[["Run", random.Random], "Server"]


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    target: str
    fault: Make
    disturbs: bool = True
    """Whether the relay may deliver again, or a program exit, because of it."""


def draw(chance: random.Random, names: Sequence[str]) -> Mapping[str, Kind]:
    """One fault, or up to three at the same time, of those named."""
    found: dict[str, Kind] = {}
    for name in chance.choices(names, k=chance.choice([1, 1, 1, 2, 2, 3])):
        if ALL[name].target not in {kind.target for kind in found.values()}:
            found[name] = ALL[name]
    return dict(sorted(found.items(), key=lambda drawn: _ORDER.get(drawn[1].target, 2)))


def length(chance: random.Random) -> float:
    """Of a fault, in seconds: from 0.1 to 30, as often below 1.7 as above."""
    return math.exp(chance.uniform(math.log(0.1), math.log(30)))


Programs = Callable[["Run"], "list[Process]"]


def _one(
    programs: Programs, begin: Callable[[Run, Process], object], end: Callable[[Process], object]
) -> Make:
    @contextmanager
    def fault(run: Run, chance: random.Random) -> Iterator[None]:
        program = chance.choice(programs(run))
        begin(run, program)
        yield
        end(program)

    return fault


def _kill_one(programs: Programs) -> Make:
    return _one(programs, lambda _, program: program.kill(), lambda program: program.start())


def _freeze_one(programs: Programs) -> Make:
    return _one(programs, lambda _, program: program.freeze(), lambda program: program.thaw())


def _terminate_one(programs: Programs) -> Make:
    return _one(programs, lambda run, program: run.end(program), lambda program: program.start())


def _kill_all(programs: Programs) -> Make:
    @contextmanager
    def fault(run: Run, chance: random.Random) -> Iterator[None]:
        for program in programs(run):
            program.kill()
        yield
        for program in programs(run):
            program.start()

    return fault


@contextmanager
def _kill_catching_up(run: Run, chance: random.Random) -> Iterator[None]:
    """Kills in the midst of a long tick, whose rest is a successor's: elsewhere ticks are over in no time."""
    for relay in run.relays:
        relay.kill()
    yield
    for _ in range(4):
        run.relays[0].start()
        _wait_for_one(run)
        run.wait(chance.uniform(0, 0.1), pace=0.005)
        run.relays[0].kill()
    for relay in run.relays:
        relay.start()


def _wait_for_one(run: Run) -> None:
    before = run.arrived
    run.wait(10, lambda: run.arrived > before, pace=0.005)


def _kill(server: Choose) -> Make:
    @contextmanager
    def fault(run: Run, chance: random.Random) -> Iterator[None]:
        chosen = server(run, chance)
        chosen.kill()
        yield
        chosen.start()

    return fault


def _restart(server: Choose) -> Make:
    @contextmanager
    def fault(run: Run, chance: random.Random) -> Iterator[None]:
        chosen = server(run, chance)
        chosen.stop()
        yield
        chosen.start()

    return fault


@contextmanager
def _freeze_database(run: Run, chance: random.Random) -> Iterator[None]:
    """All of its processes: the first one alone keeps only new sessions waiting."""
    server = run.servers.postgres
    server.freeze()
    children = _children(server)
    try:
        _send(children, signal.SIGSTOP)
        yield
    finally:
        _send(children, signal.SIGCONT)
        server.thaw()


def _children(server: Server) -> list[int]:
    process = server._process
    assert process is not None
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _send(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


@contextmanager
def _refuse_large(run: Run, chance: random.Random) -> Iterator[None]:
    """Topics take no large events, for a while: those are parked, with all behind them, then released."""
    run.limit_topics(_SMALL_LIMIT)
    try:
        yield
    finally:
        run.limit_topics(None)
        run.replay()


@contextmanager
def _replay(run: Run, chance: random.Random) -> Iterator[None]:
    _begin_replay(run)
    yield
    run.complete_replay()


@contextmanager
def _kill_replay(run: Run, chance: random.Random) -> Iterator[None]:
    _begin_replay(run)
    yield
    run.replays.kill()
    run.complete_replay()


def _begin_replay(run: Run) -> None:
    run.replays.begin()
    # What is drawn with it is to meet it.
    run.wait(run.patience, run.replays.is_under_way, pace=0.1)


@contextmanager
def _change_shards(run: Run, chance: random.Random) -> Iterator[None]:
    run.change_shards(chance.randint(1, len(run.relays)))
    yield
    run.wait_for_command()


@contextmanager
def _change_source(run: Run, chance: random.Random) -> Iterator[None]:
    run.change_source(chance.choice(["cdc", "cdc", "polling"]))
    yield
    run.wait_for_command()


@contextmanager
def _kill_at_steps(run: Run, chance: random.Random) -> Iterator[None]:
    """Relays that die at one durable step after the other, each time another one."""
    run.draws_orders = True
    for relay in run.relays:
        relay.kill()
        run.start_relay(relay)
    try:
        yield
    finally:
        run.draws_orders = False


def _network(proxies: Callable[[Run], list[Proxy]], begin: Callable[[Proxy, random.Random], object]) -> Make:
    @contextmanager
    def fault(run: Run, chance: random.Random) -> Iterator[None]:
        everyones = proxies(run)
        # Of one relay only: the others go on, and it becomes a zombie.
        hurt = everyones if chance.random() < 0.5 else [chance.choice(everyones)]
        try:
            for proxy in hurt:
                begin(proxy, chance)
            yield
        finally:
            # Other runs use them too.
            for proxy in hurt:
                if begin is _lose_answers:
                    proxy.cut()
                proxy.heal()

    return fault


def _cut(proxy: Proxy, chance: random.Random) -> None:
    proxy.cut()


def _cut_one(proxy: Proxy, chance: random.Random) -> None:
    proxy.cut(chance)


def _cut_off(proxy: Proxy, chance: random.Random) -> None:
    proxy.refuse()
    proxy.cut()


def _swallow(proxy: Proxy, chance: random.Random) -> None:
    proxy.swallow()


def _swallow_answers(proxy: Proxy, chance: random.Random) -> None:
    proxy.swallow_answers()


def _lose_answers(proxy: Proxy, chance: random.Random) -> None:
    proxy.swallow_answers()


def _delay(proxy: Proxy, chance: random.Random) -> None:
    proxy.delay(chance.uniform(0.02, 0.3))


def _throttle(proxy: Proxy, chance: random.Random) -> None:
    proxy.throttle(chance.uniform(100_000, 2_000_000))


def _of_servers() -> Iterator[tuple[str, Kind]]:
    servers: list[tuple[str, Choose, Callable[[Run], list[Proxy]]]] = [
        ("database", lambda run, _: run.servers.postgres, lambda run: run.proxies),
        ("broker", broker_faults.one, lambda run: list(run.servers.kafka_proxies)),
    ]
    for name, server, proxies in servers:
        yield f"kill {name}", Kind(name, _kill(server))
        yield f"restart {name}", Kind(name, _restart(server))
        yield from _of_network(f"network of {name}", proxies)


def _of_network(network: str, proxies: Callable[[Run], list[Proxy]]) -> Iterator[tuple[str, Kind]]:
    yield f"cut {network}", Kind(network, _network(proxies, _cut))
    yield f"cut one connection in {network}", Kind(network, _network(proxies, _cut_one))
    yield f"cut off {network}", Kind(network, _network(proxies, _cut_off))
    yield f"black hole in {network}", Kind(network, _network(proxies, _swallow))
    yield f"one-way black hole in {network}", Kind(network, _network(proxies, _swallow_answers))
    yield f"lost answers in {network}", Kind(network, _network(proxies, _lose_answers))
    yield f"delay in {network}", Kind(network, _network(proxies, _delay))
    yield f"throttled {network}", Kind(network, _network(proxies, _throttle))


def _relays(run: Run) -> list[Process]:
    return run.relays


def _writers(run: Run) -> list[Process]:
    return run.writers


def _consumers(run: Run) -> list[Process]:
    return run.consumers


KINDS: Mapping[str, Kind] = {
    "kill relay": Kind("relay", _kill_one(_relays)),
    "kill all relays": Kind("relay", _kill_all(_relays)),
    "kill relays catching up": Kind("relay", _kill_catching_up),
    # Ends in good order: nothing is in flight that a successor would send again.
    "terminate relay": Kind("relay", _terminate_one(_relays), disturbs=False),
    "freeze relay": Kind("relay", _freeze_one(_relays)),
    "kill writer": Kind("writer", _kill_one(_writers), disturbs=False),
    "freeze writer": Kind("writer", _freeze_one(_writers), disturbs=False),
    **dict(_of_servers()),
    "freeze broker": Kind("broker", broker_faults.freeze),
    "stuttering broker": Kind("broker", broker_faults.stutter),
    "kill broker at a request": Kind("broker", broker_faults.kill_at_request),
    # A broker recognizes what comes twice: no relay may deliver again, or end.
    "late requests": Kind("requests", broker_faults.late_requests, disturbs=False),
    "freeze database": Kind("database", _freeze_database),
}
# Of relays of ours: the broken ones know no topics' limits and no shards, and their steps are not watched.
OUR_KINDS: Mapping[str, Kind] = {
    "kill relays at steps": Kind("relay", _kill_at_steps),
    # The prober tries again what it has no answer for.
    "refuse large events": Kind("topics", _refuse_large),
}
# Of a cluster.
CLUSTER_KINDS: Mapping[str, Kind] = {
    "two brokers away": Kind("broker", broker_faults.two_away),
    "rolling restart": Kind("broker", broker_faults.roll),
}
SHARD_KINDS: Mapping[str, Kind] = {
    # Relays start over, in good order.
    "change shards": Kind("shards", _change_shards, disturbs=False),
    "change source": Kind("shards", _change_source, disturbs=False),
}
# Of the append-only outbox. Live events are neither delivered again nor late because of a replay.
REPLAY_KINDS: Mapping[str, Kind] = {
    "replay": Kind("replay", _replay, disturbs=False),
    "kill replay": Kind("replay", _kill_replay, disturbs=False),
}
# Of runs that have consumers.
CONSUMER_KINDS: Mapping[str, Kind] = {
    "kill consumer": Kind("consumer", _kill_one(_consumers), disturbs=False),
    "kill all consumers": Kind("consumer", _kill_all(_consumers), disturbs=False),
    "terminate consumer": Kind("consumer", _terminate_one(_consumers), disturbs=False),
    "freeze consumer": Kind("consumer", _freeze_one(_consumers), disturbs=False),
    # Their way to the database; one that loses it ends.
    **dict(_of_network("network of consumers", lambda run: run.consumer_proxies)),
}

ALL: Mapping[str, Kind] = {
    **KINDS,
    **CLUSTER_KINDS,
    **OUR_KINDS,
    **SHARD_KINDS,
    **REPLAY_KINDS,
    **CONSUMER_KINDS,
}


def of(relay: Relay, *, has_consumers: bool, is_cluster: bool) -> list[str]:
    """The names of all faults that a relay can have."""
    return [
        *KINDS,
        *(CLUSTER_KINDS if is_cluster else ()),
        *(OUR_KINDS if relay.mode is not None else ()),
        *((*SHARD_KINDS, *REPLAY_KINDS) if relay.has_shards else ()),
        *(CONSUMER_KINDS if has_consumers else ()),
    ]
