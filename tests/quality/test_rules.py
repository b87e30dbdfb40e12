"""What the rules say: at each limit, and on both sides of it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from outbox_pipelines.config.thresholds import LEAST, LIMITS, read_thresholds
from outbox_pipelines.days.partitions import FEW_AHEAD
from outbox_pipelines.debezium.connector_state import Connector, Task
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.measurements import (
    CAP,
    STILL_SECONDS,
    Late,
    Measurements,
    OpenReplay,
    ShardStatus,
)
from outbox_pipelines.quality.rules import RULES, Rule, Status, judge, judge_one, rules, worst
from outbox_pipelines.quality.slots import OtherSlot, Slots
from outbox_pipelines.settings import load_settings

SHARD = ShardStatus(
    shard=0,
    shards=1,
    owner="somebody",
    owned_seconds=60.0,
    heartbeat_seconds=0.1,
    unowned_seconds=0.0,
    successor_waits=False,
    breaker="closed",
    breaker_reason=None,
    top_up_error=None,
    intruder=None,
    wanted=None,
    backlog=0,
    oldest_seconds=0.0,
    events_per_second=0.0,
    latency_seconds=None,
)
SLOTS = Slots(
    slot="outbox_shop_public",
    made=True,
    ends=False,
    changing=False,
    error=None,
    exists=True,
    foreign=False,
    reader=1234,
    retained_bytes=1000,
    unconfirmed_bytes=10,
    safe_bytes=None,
    wal_status="reserved",
    inactive_since=None,
    invalidation_reason=None,
    published=True,
    unlimited=True,
    copy=False,
    standbys=[],
    waiting_commits=0,
    others=[],
)
WELL = Measurements(
    shards=[SHARD],
    parked=0,
    blocked_aggregates=0,
    parked_reasons={},
    dead_letters=0,
    new_dead_letters=0,
    dead_letter_reasons={},
    partitions_ahead=14,
    days_late=Late(0, 0, 0),
    days_detached=0,
    table_bytes=0,
    idempotency_keys=0,
    idempotency_keys_bytes=0,
    oldest_transaction_seconds=0.0,
    oldest_transaction=None,
    slots=replace(SLOTS, slot=None, made=False),
)
CONNECTOR = Connector(
    name="shop",
    error=None,
    state="RUNNING",
    worker="a:8083",
    trace=None,
    tasks=[Task(0, "RUNNING", "a:8083", None)],
    slot="debezium_shop_public",
    slot_exists=True,
    slot_lost=False,
    slot_active=True,
    unconfirmed_bytes=0,
    retained_bytes=0,
    waiting_seconds=0.0,
)
REPLAY = OpenReplay(
    id="019e",
    started_at="2026-11-28T01:00:00+00:00",
    by="ada",
    reason="a new consumer",
    target="{topic}",
    events=20,
    sent=10,
    state="running",
    error=None,
    silent_seconds=60.0,
)
# What makes each rule an error, or a warning where it knows no errors.
WRONG = {
    "lag": replace(WELL, shards=[replace(SHARD, oldest_seconds=60.0)]),
    "backlog": replace(WELL, shards=[replace(SHARD, backlog=60_000), replace(SHARD, backlog=40_000)]),
    "blocked_aggregates": replace(WELL, blocked_aggregates=100, parked_reasons={"too large": 100}),
    "dead_letters": replace(WELL, dead_letters=1, dead_letter_reasons={"too large": 1}),
    "delayed": replace(
        WELL, delayed_overdue=1, delayed_overdue_seconds=300.0, delayed_reasons={"no partition": 1}
    ),
    "replays": replace(WELL, replays=[REPLAY]),
    "partitions_ahead": replace(WELL, partitions_ahead=6),
    "days_closed": replace(WELL, days_late=Late(1, 0, 0)),
    "days_archived": replace(WELL, days_late=Late(0, 1, 0)),
    "days_dropped": replace(WELL, days_late=Late(0, 0, 7)),
    "days_attached": replace(WELL, days_detached=1),
    "shards_relayed": replace(WELL, shards=[SHARD, replace(SHARD, unowned_seconds=30.0)]),
    "kafka": replace(WELL, shards=[replace(SHARD, breaker="half-open", breaker_reason="no answer")]),
    "slot": replace(WELL, slots=replace(SLOTS, exists=False)),
    "slot_log": replace(WELL, slots=replace(SLOTS, others=[OtherSlot("debezium", False, 10**10)])),
    "connector": replace(WELL, connector=replace(CONNECTOR, state="PAUSED")),
    "connector_lag": replace(WELL, connector=replace(CONNECTOR, waiting_seconds=300.0)),
    "old_transactions": replace(WELL, oldest_transaction_seconds=3600.0, oldest_transaction="session 5"),
    "idempotency_keys": replace(WELL, idempotency_keys=50_000_000),
}


def _limits(rule: Rule) -> list[float]:
    return [limit for limit in (rule.warn, rule.error) if limit is not None]


def test_all_is_well() -> None:
    assert {result.status for result in judge(load_settings(), WELL)} == {Status.OK}


def test_the_backlog_of_all_shards_ends_at_the_cap() -> None:
    """Guards against a text that says it is counted up to a number, and shows a larger one."""
    shards = [replace(SHARD, backlog=60_000), replace(SHARD, backlog=60_000)]
    assert replace(WELL, shards=shards).unpublished == CAP


def test_a_connector_is_missing_only_if_no_relay_publishes() -> None:
    """Guards against an alert for those who name Kafka Connect before they change to it."""
    missing = replace(CONNECTOR, state=None, tasks=[], slot_exists=False)
    assert replace(WELL, connector=missing).connector_problems == []
    (problem,) = replace(WELL, shards=[replace(SHARD, owner=None)], connector=missing).connector_problems
    assert "outbox debezium config" in problem


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_finds_its_own_trouble_and_no_other(rule: Rule) -> None:
    results = judge(load_settings(connect_url="http://connect:8083"), WRONG[rule.name])
    wrong = {result.rule.name: result.status for result in results if result.status}
    assert wrong == {rule.name: Status.WARN if rule.error is None else Status.ERROR}
    assert worst(results) is wrong[rule.name]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_limit_begins_at_its_value(rule: Rule) -> None:
    """Guards against a limit that is moved by one, or turned around."""
    assert _limits(rule)
    for limit in _limits(rule):
        below, at, above = (
            judge_one(replace(rule, value=partial(lambda value, _: value, value)), WELL).status
            for value in (math.nextafter(limit, -math.inf), limit, math.nextafter(limit, math.inf))
        )
        assert (below > at and at is above) if rule.is_least else (below < at and at is above)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, None),
        ({"changing": True, "made": False}, None),
        ({"slot": None, "exists": False, "reader": None}, None),
        ({"made": False}, "setup was interrupted"),
        ({"ends": True}, "run `outbox cutover --to polling` again"),
        ({"exists": False}, "is missing"),
        ({"wal_status": "lost"}, "is lost (its log was removed"),
        ({"invalidation_reason": "wal_removed"}, "is lost (wal_removed)"),
        ({"wal_status": "unreserved"}, "about to be lost"),
        ({"published": False}, "publication"),
        ({"reader": None}, "start `outbox relay`"),
        ({"reader": None, "error": "no right"}, "so it reads between snapshots: no right"),
    ],
)
def test_what_is_wrong_with_a_slot(state: dict[str, Any], says: str | None) -> None:
    """Guards against a slot that fills the disk, or is lost, while everything looks well."""
    found = replace(SLOTS, **state)
    assert len(found.problems) == (says is not None)
    assert (says or "") in "".join(found.problems)
    (result,) = [
        each for each in judge(load_settings(), replace(WELL, slots=found)) if each.rule.name == "slot"
    ]
    assert result.status == (Status.WARN if says else Status.OK)
    assert (says or "") in result.text


def test_limits_can_be_changed_and_switched_off() -> None:
    settings = load_settings(warn_at="lag=1.5, backlog = off", error_at="idempotency_keys=10")
    changed = {rule.name: rule for rule in rules(settings)}
    assert (changed["lag"].warn, changed["lag"].error) == (1.5, 60.0)
    assert (changed["backlog"].warn, changed["backlog"].error) == (None, None)
    assert (changed["idempotency_keys"].warn, changed["idempotency_keys"].error) == (50_000_000.0, 10.0)


def test_a_rule_that_is_off_is_not_expected_of_anything() -> None:
    """Guards against a check that vanishes, or fails, because nothing is expected of it."""
    settings = load_settings(warn_at="backlog=off")
    states = {result.rule.name: result.status for result in judge(settings, WRONG["backlog"])}
    assert states["backlog"] is Status.OK


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lagg=3", "no check is named 'lagg': write NAME=LIMIT,… with lag, backlog"),
        ("lag", "part 1 is not name=value"),
        ("lag=soon", "lag=soon has no limit: write lag=NUMBER, or lag=off"),
        ("lag=nan", "lag=nan has no limit"),
    ],
)
def test_limits_that_mean_nothing_are_refused(text: str, says: str) -> None:
    with pytest.raises(SetupError, match="OUTBOX_WARN_AT=") as refused:
        load_settings(warn_at=text)
    assert says in str(refused.value)
    with pytest.raises(SetupError, match="OUTBOX_ERROR_AT="):
        load_settings(error_at=text)
    assert read_thresholds("") == {}


def test_thresholds_know_every_check() -> None:
    """Guards against a check whose thresholds cannot be set."""
    assert [rule.name for rule in RULES] == [*LIMITS]
    assert {rule.name for rule in RULES if rule.is_least} == LEAST


def test_a_limit_is_that_of_the_code_that_reads_it() -> None:
    """Guards against a backlog that is never counted as far as its warning, and the like."""
    limits = (LIMITS["backlog"][0], LIMITS["replays"][0], LIMITS["partitions_ahead"][1])
    assert limits == (CAP, STILL_SECONDS, FEW_AHEAD)


def test_a_warning_comes_before_the_error() -> None:
    """Guards against a warning that is never seen."""
    for warn, error in (("lag=100", "lag=5"), ("partitions_ahead=1", "partitions_ahead=2")):
        with pytest.raises(SetupError, match=f"OUTBOX_WARN_AT={warn}: {warn} is .* the error, {error} in"):
            load_settings(warn_at=warn, error_at=error)
        load_settings(warn_at=error, error_at=warn)
        load_settings(warn_at=warn, error_at=warn)
        name = warn.partition("=")[0]
        with pytest.raises(SetupError, match=f"the error, by default .*: warn .*set {name} in OUTBOX_ERROR"):
            load_settings(warn_at=warn)
        load_settings(error_at=error)
    load_settings(warn_at="lag=100", error_at="lag=off,idempotency_keys=1")
    load_settings(warn_at="lag=60,partitions_ahead=7,backlog=200000")
