"""All definitions of some outboxes, from the modules of the parts; and the outboxes of this code location."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import dagster as dg

from outbox_pipelines.config.file import config_path
from outbox_pipelines.config.types import OUTBOX_NAME
from outbox_pipelines.defs import (
    alerts,
    archive,
    catalog,
    day_quality,
    health,
    inbox,
    overview,
    partitions,
    reconciliation,
    replay_events,
    run_history,
    sources,
    storage,
    topics,
    upkeep,
)
from outbox_pipelines.defs.outbox import ONLY, Outbox, Part
from outbox_pipelines.defs.relay import assets as relay
from outbox_pipelines.defs.relay import dead_letter_job, sensors
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
# What a part consists of. Sensors are made below, since several outboxes share them.
_ASSETS: dict[Part, list[Callable[[Outbox], Any]]] = {
    "checks": [health.health],
    "inbox": [inbox.inbox],
    "archive": [archive.archive, partitions.dropped],
    "replays": [replay_events.replays],
    "reconciliation": [reconciliation.reconciliation],
}
_CHECKS: dict[Part, list[Callable[[Outbox], Any]]] = {
    "archive": [archive.archive_equals_table, day_quality.day_checks],
    "catalog": [catalog.event_types_documented],
    "checks": [health.checks, health.last_hour],
    "inbox": [inbox.handled],
}
JOBS: dict[Part, list[Callable[[Outbox], Any]]] = {
    "relay": [relay.relay_session, relay.relay_once],
    "partitions": [partitions.maintain_partitions],
    "archive": [archive.archive_day, partitions.drop_day],
    "iceberg": [upkeep.register_days],
    "expiry": [upkeep.expire_archive],
    "bodies": [upkeep.sweep_bodies],
    "replays": [replay_events.replay_events],
    "clean_table": [upkeep.clean_table],
    "make_months": [upkeep.make_months],
    "reconciliation": [reconciliation.reconcile_day],
    "catalog": [catalog.check_catalog],
    "checks": [health.check_health],
    "inbox": [inbox.drain_inbox],
    "dead_letters": [dead_letter_job.dead_letters_job],
    "cutover": [dead_letter_job.cutover_job],
    "history": [run_history.purge_history],
}
SCHEDULES: dict[Part, list[Callable[[Outbox], Any]]] = {
    "partitions": [partitions.maintain_partitions_schedule],
    "archive": [archive.archive_days, partitions.drop_days],
    "iceberg": [upkeep.register_days_schedule],
    "expiry": [upkeep.expire_archive_schedule],
    "bodies": [upkeep.sweep_bodies_schedule],
    "clean_table": [upkeep.clean_table_schedule],
    "make_months": [upkeep.make_months_schedule],
    "catalog": [catalog.check_catalog_schedule],
    "checks": [health.check_health_schedule],
    "history": [run_history.purge_history_schedule],
}


def build(outboxes: Sequence[Outbox], *, resolves: bool = True) -> dg.Definitions:
    """Return the definitions.

    Args:
        resolves: whether jobs of assets are resolved among the assets of their outbox alone: Dagster would
            look at those of all outboxes for each job, which takes two seconds with 50. Not if the assets are
            changed afterwards, as `post_processing` of a component does: resolved jobs keep the old ones.

    Raises:
        SetupError: two outboxes have one name.
    """
    outboxes = _with_keys_of_their_own(outboxes)
    names = [outbox.name for outbox in outboxes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SetupError(f"two outboxes are named {', '.join(twice)}: rename one")
    for line in unusual(outboxes):
        _LOG.warning("%s", line)
    parts = [_definitions(outbox, resolves=resolves) for outbox in outboxes]
    jobs = {job.name: job for part in parts for job in part.jobs or ()}
    return dg.Definitions.merge(
        *parts,
        dg.Definitions(
            assets=[storage.detached(each) for each in overview.assets(outboxes)],
            sensors=_sensors(outboxes, jobs),
        ),
    )


def _with_keys_of_their_own(outboxes: Sequence[Outbox]) -> list[Outbox]:
    """Return the outboxes; one whose assets would replace those of another reports it, under its own keys."""
    first: dict[dg.AssetKey, str] = {}
    found = []
    for outbox in outboxes:
        owner = first.setdefault(outbox.key(), outbox.name)
        found.append(outbox if owner == outbox.name else outbox.without_prefix(owner))
    return found


def unusual(outboxes: Sequence[Outbox]) -> list[str]:
    """Return a line for each outbox without settings, and for those that have the same tables.

    All are served: the sensors and runs of an outbox without settings fail with the same line.
    """
    settings, lines = {}, []
    for outbox in outboxes:
        try:
            settings[outbox.name] = outbox.load_settings()
        except SetupError as error:
            lines.append(str(error) if outbox.name in str(error) else f"outbox {outbox.name}: {error}")
    return [*lines, *sources.shared_tables(settings)]


def _definitions(outbox: Outbox, *, resolves: bool) -> dg.Definitions:
    """Return all definitions of an outbox except its sensors."""
    has_connector = outbox.has("checks") and outbox.is_set("connect_url")
    assets: list[Any] = [
        topics.application_tables(outbox),
        topics.events(outbox),
        relay.relay(outbox),
        *_made(outbox, _ASSETS),
        *([health.connector(outbox)] if has_connector else []),
        *topics.topics(outbox),
    ]
    if outbox.map_spec is not None:
        assets = [
            each.map_asset_specs(outbox.map_spec)
            if isinstance(each, dg.AssetsDefinition)
            else outbox.map_spec(each)
            for each in assets
        ]
    checks = [
        *_made(outbox, _CHECKS),
        *([health.connector_checks(outbox)] if has_connector else []),
    ]
    assets, checks = ([storage.detached(each) for each in group] for group in (assets, checks))
    jobs = _made(outbox, JOBS)
    if resolves:
        alone = dg.Definitions(assets=assets, asset_checks=checks, jobs=jobs, loggers=storage.LOGGERS)
        jobs = [alone.resolve_job_def(job.name) for job in jobs]
    return dg.Definitions(assets=assets, asset_checks=checks, jobs=jobs, schedules=_made(outbox, SCHEDULES))


def _made(outbox: Outbox, parts: dict[Part, list[Callable[[Outbox], Any]]]) -> list[Any]:
    made = (make(outbox) for part, makers in parts.items() if outbox.has(part) for make in makers)
    return [each for each in made if each is not None]


def _sensors(outboxes: Sequence[Outbox], jobs: dict[str, Any]) -> list[dg.SensorDefinition]:
    def having(part: Part) -> list[Outbox]:
        return [outbox for outbox in outboxes if outbox.has(part)]

    def of(part: Part, job: str) -> tuple[list[Outbox], list[Any]]:
        return having(part), [jobs[outbox.name_of(job)] for outbox in having(part)]

    return [
        *([sensors.relay_supervisor(*of("relay", "relay_session"))] if having("relay") else []),
        *([health.health_sensor(*of("checks", "check_health"))] if having("checks") else []),
        *([inbox.inbox_sensor(*of("inbox", "drain_inbox"))] if having("inbox") else []),
        *([alerts.alerts_sensor(having("alerts"))] if having("alerts") else []),
        *overview.sensors(outboxes, outboxes[0].sensor_status),
    ]


def served() -> list[Outbox]:
    """Return the outboxes. One that cannot be loaded reports why, and the others are served."""
    try:
        if config_path() is None:
            return [_only(os.environ.get("OUTBOX_NAME") or ONLY)]
        from outbox_pipelines.outboxes import load_outboxes

        found = load_outboxes()
    except SetupError as error:
        return [Outbox(automation="running", error=str(error))]
    # A name that cannot be one in Dagster has no place to be shown.
    return [Outbox(name=name, automation="running") for name in found.names if OUTBOX_NAME.fullmatch(name)]


def _only(name: str) -> Outbox:
    if OUTBOX_NAME.fullmatch(name):
        return Outbox(name=name, automation="running")
    return Outbox(automation="running", error=f"OUTBOX_NAME={name} cannot be a name: see docs/outboxes.md")
