"""What is done to a relay and everything around it: faults by name, and a choice of them that follows a seed.

Invariants:
- A fault is a context: it begins, and at its end is healed.
- What is drawn together has different targets: each can be healed without the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox_pipelines.local.server import Server
    from tests.history.processes import Process
    from tests.history.proxy import Proxy
    from tests.history.run import Run

Make = Callable[["Run", random.Random], AbstractContextManager[None]]


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    target: str
    fault: Make
    disturbs: bool = True
    """Whether the relay may deliver again, or a program exit, because of it."""


def draw(chance: random.Random, names: Sequence[str]) -> Mapping[str, Kind]:
    """One fault, or two at the same time, of those named."""
    first, second = chance.choices(names, k=2)
    alone = chance.random() < 0.7 or ALL[first].target == ALL[second].target
    return {name: ALL[name] for name in ([first] if alone else [first, second])}


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


def _kill(server: Callable[[Run], Server]) -> Make:
    @contextmanager
    def fault(run: Run, chance: random.Random) -> Iterator[None]:
        server(run).kill()
        yield
        server(run).start()

    return fault


def _restart(server: Callable[[Run], Server]) -> Make:
    @contextmanager
    def fault(run: Run, chance: random.Random) -> Iterator[None]:
        server(run).stop()
        yield
        server(run).start()

    return fault


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


def _delay(proxy: Proxy, chance: random.Random) -> None:
    proxy.delay(chance.uniform(0.02, 0.3))


def _of_servers() -> Iterator[tuple[str, Kind]]:
    servers: list[tuple[str, Callable[[Run], Server], Callable[[Run], list[Proxy]]]] = [
        ("database", lambda run: run.servers.postgres, lambda run: run.proxies),
        ("broker", lambda run: run.servers.kafka, lambda run: [run.servers.kafka_proxy]),
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
    yield f"delay in {network}", Kind(network, _network(proxies, _delay))


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
    # Ends in good order: nothing is on its way that a successor would send again.
    "terminate relay": Kind("relay", _terminate_one(_relays), disturbs=False),
    "freeze relay": Kind("relay", _freeze_one(_relays)),
    "kill writer": Kind("writer", _kill_one(_writers), disturbs=False),
    "freeze writer": Kind("writer", _freeze_one(_writers), disturbs=False),
    **dict(_of_servers()),
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
ALL: Mapping[str, Kind] = {**KINDS, **CONSUMER_KINDS}
