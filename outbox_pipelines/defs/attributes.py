"""Whether Dagster accepts an outbox's attributes: each is tried alone, by Dagster's own rules.

Invariants:
- A wrong attribute is an error of its outbox, which then has the default. It keeps nothing else from loading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from typing import Any, Final

import dagster as dg

from outbox_pipelines.quality.expectations.day_suite import CHECKS, OWN

SCHEDULES: Final = (
    "archive_days",
    "check_catalog",
    "check_health",
    "clean_table",
    "drop_days",
    "expire_archive",
    "maintain_partitions",
    "make_months",
    "purge_history",
    "register_days",
    "sweep_bodies",
)
ARCHIVE_CHECKS: Final = ("archive_equals_table", *CHECKS, OWN)
"""The checks of an archived day."""
_KEY_PART: Final = re.compile(r"[A-Za-z0-9_.-]+")
_OURS: Final = "outbox/"


def mistakes(values: Mapping[str, Any], parts: Iterable[str]) -> dict[str, str]:
    """Return what is wrong, by attribute.

    Args:
        values: of an outbox, by attribute.
        parts: those that exist.
    """
    found = {}
    for name, test in _TESTS.items():
        try:
            test(values[name])
        except (dg.DagsterInvalidDefinitionError, TypeError, ValueError) as error:
            found[name] = " ".join(str(error).split())
    for name in ("parts", "without"):
        try:
            if unknown := sorted(set(values[name]) - set(parts)):
                raise ValueError(f"there is no part {unknown[0]!r}: write some of {', '.join(parts)}")
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def _automation(value: Any) -> None:
    if value not in ("running", "stopped"):
        raise ValueError("write running or stopped")


def _schedules(value: Mapping[str, str]) -> None:
    for name, cron in value.items():
        if name not in SCHEDULES:
            raise ValueError(f"there is no schedule {name!r}: write some of {', '.join(SCHEDULES)}")
        dg.ScheduleDefinition(name=name, job_name=name, cron_schedule=cron)


def _key_prefix(value: Any) -> None:
    if value is None:
        return
    if isinstance(value, str) or not value or not all(_KEY_PART.fullmatch(part) for part in value):
        raise ValueError("write a list of words of letters, digits, _, . and -, for example [shop, orders]")


def _group(value: Any) -> None:
    if value is not None:
        # An empty name is no name for Dagster.
        dg.AssetSpec("key", group_name=value or "-")


def _owners(value: Any) -> None:
    if isinstance(value, str):
        raise ValueError("write a list")
    dg.AssetSpec("key", owners=list(value))


def _tags(value: Mapping[str, Any]) -> None:
    for name, text in value.items():
        if not isinstance(text, str):
            raise ValueError(f"the value of {name} is not a text: put it into quotes")
        if name.startswith(_OURS):
            raise ValueError(f"{name} is reserved: choose a name that does not begin with {_OURS}")
    dg.AssetSpec("key", tags=value)


def _pool(value: Any) -> None:
    dg.OpDefinition(lambda: None, name="op", pool=value)


def _partition_start(value: Any) -> None:
    if value is not None and not isinstance(value, date):
        raise ValueError("write a date")


def _blocking_checks(value: Any) -> None:
    if isinstance(value, str):
        raise ValueError("write a list")
    if unknown := sorted(set(value) - set(ARCHIVE_CHECKS)):
        raise ValueError(f"archive has no check {unknown[0]!r}: write some of {', '.join(ARCHIVE_CHECKS)}")


def _freshness_policy(value: Any) -> None:
    if value is not None and not isinstance(value, dg.FreshnessPolicy):
        raise ValueError("write a template that returns a FreshnessPolicy of Dagster")


def _automation_condition(value: Any) -> None:
    if value is not None and not isinstance(value, dg.AutomationCondition):
        raise ValueError("write a template such as '{{ dg.AutomationCondition.on_cron(\"@daily\") }}'")


_TESTS: Final[dict[str, Callable[[Any], None]]] = {
    "automation": _automation,
    "schedules": _schedules,
    "key_prefix": _key_prefix,
    "group": _group,
    "owners": _owners,
    "tags": _tags,
    "pool": _pool,
    "partition_start": _partition_start,
    "blocking_checks": _blocking_checks,
    "freshness_policy": _freshness_policy,
    "automation_condition": _automation_condition,
}
