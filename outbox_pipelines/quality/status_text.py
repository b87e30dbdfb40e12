"""The measurements and the results of the checks, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from outbox_pipelines.core.outages import server_of
from outbox_pipelines.core.text import counted, plain, size
from outbox_pipelines.debezium.connector_state import Connector
from outbox_pipelines.quality.measurements import CAP, Measurements, ShardStatus, age
from outbox_pipelines.quality.rules import CheckResult
from outbox_pipelines.quality.slots import Slots

_AWAITS_STANDBY: Final = (
    "wait for a synchronous standby; events count as backlog until it confirms them: start the standby, or "
    "remove it from synchronous_standby_names"
)


def render(found: Measurements, results: Iterable[CheckResult]) -> str:
    """Return the measurements, then the failed checks, worst first, each with its remedy."""
    lines = []
    for shard in found.shards:
        lines += [
            f"table {found.table}" if found.table else f"shard {shard.shard}",
            f"  owner       {owner(shard, has_heartbeat=found.has_days)}",
            f"  kafka       {_kafka(shard)}",
            *([f"  commits     {_AWAITS_STANDBY}"] if shard.awaits_standby else []),
            *([f"  partitions  not created ahead: {shard.top_up_error}"] if shard.top_up_error else []),
            f"  backlog     {_count(shard.backlog, 'event')}"
            + (f", oldest {age(shard.oldest_seconds)}" if shard.backlog and found.has_ages else ""),
        ]
        if found.has_days:
            latency = "-" if shard.latency_seconds is None else f"{shard.latency_seconds * 1000:,.0f} ms"
            lines += [
                f"  rate        {shard.events_per_second:,.0f} events/s over the last minute",
                f"  latency     {latency}",
            ]
    lines += [
        *([f"source        {_source(found.slots)}"] if found.slots and found.slots.slot else []),
        *([f"connector     {_connector(found.connector)}"] if found.connector else []),
        *([f"shards        {found.changing}"] if found.changing else []),
        *([f"waiting       {found.waiting}"] if found.waiting else []),
        *(_of_days(found) if found.has_days else _of_table(found)),
        *_rendered(results),
    ]
    return "\n".join(map(plain, lines))


def _of_days(found: Measurements) -> list[str]:
    return [
        f"parked        {_count(found.parked)}",
        *_reasons(found.parked_reasons),
        f"dead letters  {_count(found.dead_letters)}"
        + (f", {found.new_dead_letters:,} in the last hour" if found.new_dead_letters else ""),
        *([f"delayed       {_delayed(found)}"] if found.delayed else []),
        *_reasons(found.delayed_reasons),
        *(f"replay        {replay.line}" for replay in found.replays),
        f"days ahead    {found.partitions_ahead}",
        f"size          {size(found.table_bytes)}, keys {size(found.idempotency_keys_bytes)}",
    ]


def _delayed(found: Measurements) -> str:
    next_due = (
        []
        if found.delayed_next_due_seconds is None
        else [f"next due in {age(found.delayed_next_due_seconds)}"]
    )
    overdue = (
        [f"{_count(found.delayed_overdue)} overdue for {age(found.delayed_overdue_seconds)}"]
        if found.delayed_overdue
        else []
    )
    return ", ".join([_count(found.delayed), *next_due, *overdue])


def _of_table(found: Measurements) -> list[str]:
    hint = "  (correct the cause, then run `outbox dead-letters replay`)" if found.dead_letters else ""
    return [
        *([f"retried       {_count(found.retried, 'event')} rejected and retried"] if found.retried else []),
        *_reasons(found.retried_reasons),
        f"dead letters  {_count(found.dead_letters)}{hint}",
        *_reasons(found.dead_letter_reasons),
        *(f"warning       {warning}" for warning in found.warnings),
    ]


def _reasons(reasons: dict[str, int]) -> list[str]:
    return [f"  {count:,} × {reason}" for reason, count in reasons.items()]


def _rendered(results: Iterable[CheckResult]) -> list[str]:
    """Return the failed checks, worst first, each with its remedy, as lines."""
    wrong = sorted((result for result in results if result.status), key=lambda result: -result.status)
    if not wrong:
        return ["checks        all passed"]
    return [
        line
        for result in wrong
        for line in (
            f"{result.status.name:<5}         {result.rule.name}: {result.text}",
            f"              → {result.rule.help}",
        )
    ]


def described(result: CheckResult) -> dict[str, object]:
    """Return a result for JSON."""
    return {
        "check": result.rule.name,
        "status": result.status.name.lower(),
        "value": result.value,
        "text": result.text,
        "help": result.rule.help,
    }


def _count(number: int, noun: str = "") -> str:
    said = counted(number, noun) if noun else f"{number:,}"
    return said if number < CAP else f"at least {said}"


def owner(shard: ShardStatus, *, has_heartbeat: bool = True) -> str:
    """Return who owns a shard since when, for people."""
    if shard.intruder is not None:
        return f"no active relay: the lock is held by {shard.intruder}"
    if shard.owner is None:
        seen = shard.heartbeat_seconds if has_heartbeat else None
        heartbeat = "" if seen is None else f" (last heartbeat {age(seen)} ago)"
        return f"no active relay{heartbeat}; start `outbox relay`"
    successor = ", successor waiting" if shard.successor_waits else ""
    since = "" if shard.owned_seconds is None else f" for {age(shard.owned_seconds)}"
    return f"{shard.owner}{since}{successor}"


def _source(slots: Slots) -> str:
    kept = "" if slots.retained_bytes is None else f", for which {size(slots.retained_bytes)} of log are kept"
    reader = "not read" if slots.reader is None else "read"
    return f"{slots.source}, slot {slots.slot} ({reader}{kept})"


def _connector(connector: Connector) -> str:
    state = connector.state or ("unknown" if connector.error else "none")
    tasks = ", ".join(f"task {task.id} {task.state} on {task.worker}" for task in connector.tasks)
    return f"{connector.name}: {state}" + (f", {tasks}" if tasks else "")


def _kafka(shard: ShardStatus) -> str:
    if shard.breaker == "closed":
        return "-" if shard.owner is None else "reachable"
    # The reason names the schema registry, if it is that one.
    is_kafka = server_of(shard.breaker_reason) == "Kafka"
    what = "UNAVAILABLE" if is_kafka else "waits for the schema registry"
    return f"{what}, breaker {shard.breaker}: {shard.breaker_reason}; events stay in the table"
