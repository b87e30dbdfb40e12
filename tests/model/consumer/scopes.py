"""The scopes of the consumer: which events, how many processes, which faults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

from tests.model.consumer.process import Setting
from tests.model.consumer.world import Consumers, Plan
from tests.model.scope import Scope

_WORK: Final = ("works", "works")
_ONE_KEY: Final = ("a", "a")
_TWO_KEYS: Final = ("a", "b")


def _scope(
    about: str,
    setting: Setting,
    log: tuple[tuple[int, ...], ...],
    modes: tuple[str, ...],
    faults: Mapping[str, int],
    must: Collection[str],
    *,
    total: int = 1,
    is_small: bool = True,
    is_slow: bool = False,
    seeds: int = 0,
) -> Scope:
    plan = Plan(setting, log, modes, faults, total, is_slow)
    seen = {*must, *(() if seeds else faults)}
    return Scope(partial(Consumers, plan), about, seen, is_small=is_small, seeds=seeds)


_ANY: Final = {"crash": 1, "lose": 1, "expel": 1, "move": 1}
_RUN: Final = ("run",)
_RUNS: Final = ("run", "run")

CONSUMER: Final[dict[str, Scope]] = {
    "consumer-one": _scope(
        "one process, two events of a key, two faults",
        Setting(_WORK, _ONE_KEY),
        ((0, 1),),
        _RUN,
        {"crash": 1, "lose": 1},
        ("RECORD", "RECEIVE", "CLAIM", "FINISH", "OWN", "blocked", "late", "reap", "start"),
        total=2,
    ),
    "consumer-two": _scope(
        "two processes, two events of a key, a fault",
        Setting(_WORK, _ONE_KEY),
        ((0, 1),),
        _RUNS,
        _ANY,
        ("lost", "revoke", "assign", "blocked", "KNOWN", "NEXT"),
        is_small=False,
    ),
    "consumer-two-crash": _scope(
        "two processes, two events of a key, one is killed or gives its partition up",
        Setting(_WORK, _ONE_KEY),
        ((0, 1),),
        _RUNS,
        {"crash": 1, "move": 1},
        ("revoke", "assign", "release", "KNOWN"),
    ),
    "consumer-refused": _scope(
        "one process, an event that fails and another one behind it, two faults",
        Setting(("refused", "works"), _ONE_KEY),
        ((0, 1),),
        _RUN,
        {"crash": 1, "lose": 1},
        ("rollback", "MISSED", "dead letter", "NEXT", "READ"),
        total=2,
        is_small=False,
    ),
    "consumer-refused-once": _scope(
        "one process, an event that fails and another one behind it, a fault",
        Setting(("refused", "works"), _ONE_KEY),
        ((0, 1),),
        _RUN,
        {"crash": 1, "lose": 1},
        ("rollback", "MISSED", "dead letter", "OWN"),
    ),
    "consumer-refused-two": _scope(
        "two processes, an event that fails and another one behind it, a fault",
        Setting(("refused", "works"), _ONE_KEY),
        ((0, 1),),
        _RUNS,
        _ANY,
        ("rollback", "MISSED", "dead letter", "lost", "READ"),
        is_small=False,
    ),
    "consumer-batch": _scope(
        "two processes, a batch of two events of a key, one loses its place in the group",
        Setting(_WORK, _ONE_KEY, batch=2),
        ((0, 1),),
        _RUNS,
        {"expel": 1},
        ("RECORD_MANY", "TAKEN", "lost", "rollback"),
        is_small=False,
    ),
    "consumer-batches": _scope(
        "two processes, batches of two events of a key, a fault",
        Setting(_WORK, _ONE_KEY, batch=2),
        ((0, 1),),
        _RUNS,
        _ANY,
        ("RECORD_MANY", "TAKEN", "lost", "rollback", "revoke"),
        is_small=False,
    ),
    "consumer-batch-refused": _scope(
        "one process, a batch with an event that fails, a fault",
        Setting(("refused", "works"), _ONE_KEY, batch=2),
        ((0, 1),),
        _RUN,
        {"crash": 1, "lose": 1, "victim": 1},
        ("RECORD_MANY", "RECORD", "dead letter"),
    ),
    "consumer-again": _scope(
        "one process, the relay sends an event twice, two faults",
        Setting(_WORK, _ONE_KEY, batch=2),
        ((0, 1, 0),),
        _RUN,
        {"crash": 1, "lose": 1},
        ("RECORD_MANY", "KNOWN"),
        is_small=False,
        total=2,
    ),
    "consumer-again-once": _scope(
        "one process, the relay sends an event twice, a fault",
        Setting(_WORK, _ONE_KEY, batch=2),
        ((0, 1, 0),),
        _RUN,
        {"crash": 1, "lose": 1},
        ("RECORD_MANY", "KNOWN"),
    ),
    "consumer-kills": _scope(
        "one process, an event that ends it in a batch with another one",
        Setting(("works", "kills"), _TWO_KEYS, batch=2),
        ((0, 1),),
        _RUN,
        {"stop": 1},
        ("kill", "READ", "dead letter", "start"),
    ),
    "consumer-kills-two": _scope(
        "two processes, an event that ends them in a batch with another one, a fault",
        Setting(("works", "kills"), _TWO_KEYS, batch=2),
        ((0, 1),),
        _RUNS,
        {"expel": 1, "move": 1, "crash": 1, "lose": 1},
        ("kill", "OWN", "READ", "dead letter", "start"),
        is_small=False,
    ),
    "consumer-operator": _scope(
        "one process, an event that fails, and an operator who replays and discards",
        Setting(("refused", "works"), _ONE_KEY),
        ((0, 1),),
        _RUN,
        {"replay": 1, "discard": 1, "lose": 1},
        ("dead letter", "MISSED"),
        total=2,
    ),
    "consumer-operator-two": _scope(
        "two processes, an event that fails, and an operator who replays and discards",
        Setting(("refused", "works"), _ONE_KEY),
        ((0, 1),),
        _RUNS,
        {"replay": 1, "discard": 1},
        ("dead letter", "MISSED", "READ"),
        total=2,
        is_small=False,
    ),
    "consumer-blocks": _scope(
        "one process, on_dead_letter=block, and an operator who replays and discards",
        Setting(("refused", "works"), _ONE_KEY, blocks=True),
        ((0, 1),),
        _RUN,
        {"replay": 1, "discard": 1, "crash": 1},
        ("dead letter", "NEXT"),
    ),
    "consumer-outage": _scope(
        "one process, a service that becomes unavailable, outage_after=2, a fault",
        Setting(("needs", "works"), _ONE_KEY, outage_after=2),
        ((0, 1),),
        _RUN,
        {"outage": 1, "crash": 1},
        ("service up", "service down", "HURRY", "heal"),
        total=2,
    ),
    "consumer-outage-two": _scope(
        "two processes, a service that becomes unavailable, outage_after=2, a fault",
        Setting(("needs", "works"), _ONE_KEY, outage_after=2),
        ((0, 1),),
        _RUNS,
        {"outage": 1, "crash": 1, "lose": 1},
        ("service up", "service down", "HURRY", "heal"),
        total=2,
        is_small=False,
    ),
    "consumer-cache": _scope(
        "one process, a cache that claims to know every event, a fault",
        Setting(_WORK, _ONE_KEY, batch=2, cache=True),
        ((0, 1),),
        _RUN,
        {"crash": 1, "lose": 1},
        ("KNOWN",),
    ),
    "consumer-inbox": _scope(
        "receive and drain, an event that fails and another one behind it, a fault",
        Setting(("refused", "works"), _ONE_KEY),
        ((0, 1),),
        ("receive", "drain"),
        {"crash": 1, "lose": 1},
        ("RECEIVE", "look", "NEXT", "dead letter"),
    ),
    "consumer-inbox-two": _scope(
        "receive and two that drain, an event that fails and another one behind it, a fault",
        Setting(("refused", "works"), _ONE_KEY),
        ((0, 1),),
        ("receive", "drain", "drain"),
        {"crash": 1, "lose": 1},
        ("RECEIVE", "look", "NEXT", "dead letter"),
        is_small=False,
    ),
    "consumer-slow": _scope(
        "receive and two that drain, each slower than the backoff",
        Setting(_WORK, _ONE_KEY),
        ((0, 1),),
        ("receive", "drain", "drain"),
        {},
        ("FINISH", "READ", "NEXT"),
        is_slow=True,
    ),
    "consumer-behind": _scope(
        "one process, an event that fails and a batch of two behind it",
        Setting(("refused", "works", "works"), ("a", "a", "a"), batch=2),
        ((0, 1, 2),),
        _RUN,
        {},
        ("RECORD_MANY", "NEXT", "dead letter"),
    ),
    "consumer-behind-fault": _scope(
        "one process, an event that fails and a batch of two behind it, a fault",
        Setting(("refused", "works", "works"), ("a", "a", "a"), batch=2),
        ((0, 1, 2),),
        _RUN,
        {"crash": 1, "lose": 1},
        ("RECORD_MANY", "NEXT", "dead letter"),
        is_small=False,
    ),
    "consumer-stop": _scope(
        "two processes, two partitions, one gets SIGTERM",
        Setting(_WORK, _TWO_KEYS),
        ((0,), (1,)),
        _RUNS,
        {"stop": 1},
        ("ended", "DISOWN", "leave"),
        is_small=False,
    ),
    "consumer-partitions": _scope(
        "two processes, two partitions, a fault",
        Setting(_WORK, _TWO_KEYS),
        ((0,), (1,)),
        _RUNS,
        _ANY,
        ("lost", "revoke", "OWN"),
        is_small=False,
    ),
    "consumer-stop-one": _scope(
        "one process, a type without a handler, and SIGTERM",
        Setting(("ignored", "works", "works"), ("a", "a", "b")),
        ((0, 1, 2),),
        _RUN,
        {"stop": 1, "lose": 1},
        ("ended", "DISOWN", "leave"),
        total=2,
    ),
    "consumer-large": _scope(
        "three processes, two partitions, seven events, ten faults: random histories",
        Setting(
            ("works", "refused", "works", "kills", "works", "works", "works"),
            ("a", "a", "a", "b", "b", "c", "c"),
            batch=2,
            attempts=20,
        ),
        ((0, 1, 2, 5, 6, 2), (3, 4)),
        ("run", "run", "run"),
        {"crash": 2, "lose": 3, "victim": 2, "expel": 2, "move": 2, "stop": 1, "replay": 1},
        (),
        total=10,
        seeds=300,
    ),
}
