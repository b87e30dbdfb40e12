"""An outbox in Dagster: its names, its options, and where its settings come from.

Invariants:
- Two outboxes share no name: keys, groups, names of jobs, ops, schedules and sensors, and tags contain the
  outbox's name, except for the outbox named `outbox`.
- No value of a setting is part of a definition: settings are read in the process that needs them.
- Creating an outbox raises nothing: a mistake in its settings or attributes is reported by its check
  `database`, its sensors and its runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import dagster as dg

from outbox_pipelines.config.types import OUTBOX_NAME
from outbox_pipelines.defs import attributes, sources
from outbox_pipelines.defs.first_day import first_day, recorded
from outbox_pipelines.errors import SetupError

if TYPE_CHECKING:
    from outbox_pipelines.settings import Settings

ONLY: Final = "outbox"
"""The outbox whose definitions have no prefix."""
PACKAGE: Final = {"outbox/package": "outbox_pipelines"}
"""Every job has this tag, and Dagster copies it to the job's runs."""
NAME: Final = "outbox/name"
"""Tag of every job, run and asset: the name of its outbox."""

Part = Literal[
    "relay",
    "partitions",
    "archive",
    "iceberg",
    "expiry",
    "bodies",
    "replays",
    "checks",
    "alerts",
    "reconciliation",
    "inbox",
    "catalog",
    "clean_table",
    "make_months",
    "dead_letters",
    "cutover",
    "history",
]
PARTS: Final[tuple[Part, ...]] = Part.__args__  # type: ignore[attr-defined]
# Settings without which a part has nothing to do.
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "iceberg": ("iceberg",),
    "expiry": ("archive_retention_days",),
    "bodies": ("bodies",),
    "inbox": ("drain_consumers",),
    "catalog": ("catalog_file",),
    "clean_table": ("clean_after_hours",),
    "make_months": ("months_ahead",),
}
# Parts that one kind of outbox alone has.
_APPEND_ONLY: Final = frozenset(
    {
        "partitions",
        "archive",
        "iceberg",
        "expiry",
        "bodies",
        "replays",
        "reconciliation",
        "catalog",
        "cutover",
    }
)
_EXISTING_TABLE: Final = frozenset({"clean_table", "make_months"})
Automation = Literal["running", "stopped"]

# What descriptions mention in backquotes.
_MENTIONED: Final = re.compile(
    r"`(?:(outbox/\w+|application/tables)|(relay_supervisor|relay_session|relay_once|dead_letters|cutover|archive_days?"
    r"|drop_days?|maintain_partitions|clean_table|make_months|expire_archive|register_days|sweep_bodies|replay_events|reconcile_day|check_catalog|check_health|health"
    r"|inbox|drain_inbox|alerts|purge_history))`"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Outbox:
    """One outbox, as Dagster shows and serves it.

    Example:
        ```python
        Outbox(name="orders", dsn_variable="ORDERS_DSN", settings={"archive": "s3://events/orders"})
        ```

    Args:
        name: lowercase letters, digits and `_`. It is part of every name in Dagster; the outbox named
            `outbox` has names without a prefix.
        dsn_variable: the environment variable that holds the connection string. Default: the entry of
            `outbox.toml` with this name, otherwise OUTBOX_DSN.
        variables: other settings whose values are in environment variables, as field: variable. For secrets
            (`alerts`, `consumer_dsn`, `dead_letter_command`).
        settings: settings by field name (`kafka`, `archive`, `topic`, …) that differ from those of the
            environment (`OUTBOX_…`). Secrets are refused.
        parts: the parts that are defined, where they have work. Default: all.
        without: parts that are not defined.
        automation: whether sensors and schedules run as soon as the code location is loaded.
        schedules: cron expressions by the schedule's name without prefix, in UTC, as
            `{"archive_days": "10 4 * * *"}`.
        key_prefix: instead of `outbox/NAME` in asset keys.
        group: instead of `outbox_NAME`.
        owners: of every asset.
        tags: of every job, run and asset.
        executor: of every job. Default: in process.
        pool: of the ops that read or write whole days (archive, drop, sweep, replay, reconcile, clean).
        partition_start: the first day of the partitions. Default: the first day in the database.
        blocking_checks: checks of `archive` that stop what is downstream in the same run, and under an
            automation condition that asks for blocking checks, as `["payloads_valid"]`. They fail with ERROR.
        freshness_policy: of `archive`, for example `dg.FreshnessPolicy.cron(…)`.
        automation_condition: of `archive`, instead of the schedule `archive_days`.
        map_spec: returns how an asset is shown; it keeps the key.
    """

    name: str = ONLY
    dsn_variable: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Iterable[Part] = PARTS
    without: Iterable[Part] = ()
    automation: Automation = "stopped"
    schedules: Mapping[str, str] = field(default_factory=dict)
    key_prefix: Sequence[str] | None = None
    group: str | None = None
    owners: Sequence[str] = ("team:outbox",)
    tags: Mapping[str, str] = field(default_factory=dict)
    # A process for each step doubles the CPU time of a run and speeds up no job here.
    executor: dg.ExecutorDefinition = dg.in_process_executor
    pool: str | None = None
    partition_start: date | None = None
    blocking_checks: Sequence[str] = ()
    freshness_policy: dg.FreshnessPolicy | None = None
    automation_condition: dg.AutomationCondition[Any] | None = None
    map_spec: Callable[[dg.AssetSpec], dg.AssetSpec] | None = None
    error: str | None = None
    """Why there are no settings: the definition could not be read, or has a wrong attribute."""

    def __post_init__(self) -> None:
        # The one mistake that leaves no names to report it under.
        if not OUTBOX_NAME.fullmatch(self.name):
            raise SetupError(
                f"an outbox cannot be named {self.name!r}: write lowercase letters, digits and _, at most "
                "40, and begin with a letter"
            )
        wrong = attributes.mistakes(vars(self), PARTS)
        for each in fields(self):
            if each.name in wrong:
                make: Any = each.default_factory
                object.__setattr__(self, each.name, make() if each.default is MISSING else each.default)
        if wrong:
            why = "; ".join(f"attribute {name}: {reason}" for name, reason in wrong.items())
            object.__setattr__(self, "error", f"{self.error}; {why}" if self.error else why)

    def without_prefix(self, owner: str) -> Outbox:
        """Return the outbox with keys of its own and the error that another one has its `key_prefix`."""
        why = f"attribute key_prefix: the outbox {owner} has the same: its assets would be these"
        return replace(self, key_prefix=None, error=f"{self.error}; {why}" if self.error else why)

    def load_settings(self) -> Settings:
        """Return the current settings.

        Raises:
            SetupError: a value is invalid or missing; the message names the setting and the outbox.
        """
        try:
            if self.error is not None:
                raise SetupError(self.error)
            return sources.load(self.name, self.dsn_variable, self.variables, self.settings)
        except SetupError as error:
            if self.name == ONLY or str(error).startswith(f"outbox {self.name}:"):
                raise
            raise SetupError(f"outbox {self.name}: {error}") from None

    def by_its_variables(self, text: str) -> str:
        """Return an error or a description with the variables that this outbox has for settings."""
        named = {**self.variables, **({"dsn": self.dsn_variable} if self.dsn_variable else {})}
        for setting, variable in named.items():
            name = setting.upper().removeprefix("OUTBOX_")
            text = variable.join(re.split(rf"\bOUTBOX_{name}\b", text))
        return text

    def has(self, part: Part) -> bool:
        """Return whether a part is defined: it was not left out, and the outbox and its settings have it."""
        if part not in self._parts or part in (_APPEND_ONLY if self.is_existing_table else _EXISTING_TABLE):
            return False
        return self.is_set(*_NEEDED.get(part, ()))

    @cached_property
    def is_existing_table(self) -> bool:
        """Whether OUTBOX_TABLE names an existing table when the definitions load."""
        if self._at_load is not None:
            # One of several in `outbox.toml` does not take it from the environment.
            return bool(self._at_load.table)
        return self.is_set("table")

    def is_set(self, *settings: str) -> bool:
        """Return whether these settings have values when the definitions load."""
        named = {*self.settings, *self.variables}
        unnamed = [
            each for each in settings if each not in named and not os.environ.get(f"OUTBOX_{each.upper()}")
        ]
        if not unnamed:
            return True
        # Reading all settings needs the drivers, which definitions load only if a file may name one of these.
        loaded = self._at_load
        return loaded is not None and all(getattr(loaded, each) not in (None, "", {}) for each in settings)

    def key(self, *path: str) -> dg.AssetKey:
        """Return the key of an asset of the outbox, as `outbox/orders/events`."""
        return dg.AssetKey([*self._prefix, *path])

    def outer_key(self, *path: str) -> dg.AssetKey:
        """Return the key of an asset beside the outbox: the application's tables, a topic."""
        return self.key(*path) if self._has_prefix else dg.AssetKey(path)

    def name_of(self, name: str) -> str:
        """Return the name of a job, op, schedule or sensor, as `outbox_orders_archive_day`."""
        return name if self.name == ONLY else f"outbox_{self.name}_{name}"

    def group_of(self, name: str) -> str:
        """Return the group of an asset beside the outbox."""
        return self.asset_group if self._has_prefix else name

    def spec(
        self,
        name: str,
        description: str,
        kinds: set[str],
        *,
        deps: Sequence[str] = ("events",),
        **options: Any,
    ) -> dg.AssetSpec:
        """Return an asset that no run of Dagster materializes.

        Args:
            deps: other assets of the outbox.
        """
        return dg.AssetSpec(
            self.key(name),
            deps=[self.key(each) for each in deps],
            group_name=self.asset_group,
            tags=self.asset_tags,
            owners=self.owners,
            kinds=kinds,
            description=self.text(description),
            **options,
        )

    def timing(self, name: str, cron: str, description: str, job: str = "") -> dict[str, Any]:
        """Return the arguments of a schedule, which launches the job of its name by default."""
        return {
            "name": self.name_of(name),
            "job_name": self.name_of(job or name),
            "cron_schedule": self.cron(name, cron),
            "execution_timezone": "UTC",
            "default_status": self.schedule_status,
            "description": self.line(description),
        }

    def cron(self, schedule: str, default: str) -> str:
        """Return when a schedule ticks; hourly ones of several outboxes at different minutes."""
        return self.schedules.get(schedule) or _shifted(default, self.name)

    def text(self, description: str) -> str:
        """Return a description with the names of this outbox."""
        description = self._renamed(description)
        if not self._has_prefix:
            return description
        return f"{description}\nOUTBOX_… are the settings of the outbox `{self.name}`: see docs/dagster.md.\n"

    def line(self, description: str) -> str:
        """Return the description of a sensor or a schedule, whose page shows plain text in one paragraph."""
        return plain_line(self._renamed(description))

    def _renamed(self, description: str) -> str:
        description = self.by_its_variables(description)
        return _MENTIONED.sub(self._mentioned, description) if self._has_prefix else description

    def _mentioned(self, found: re.Match[str]) -> str:
        asset, name = found.groups()
        if name:
            return f"`{self.name_of(name)}`"
        path = asset.removeprefix("outbox/").split("/")
        return f"`{self.key(*path).to_user_string()}`"

    @cached_property
    def asset_group(self) -> str:
        """The group of the assets."""
        return self.group or (ONLY if self.name == ONLY else f"outbox_{self.name}")

    @cached_property
    def asset_tags(self) -> dict[str, str]:
        """Tags of every asset."""
        return {**self.tags, NAME: self.name}

    @cached_property
    def run_tags(self) -> dict[str, str]:
        """Tags of every job, by which its runs are recognized."""
        return {**self.tags, **PACKAGE, NAME: self.name}

    @cached_property
    def days(self) -> dg.DailyPartitionsDefinition:
        """The past days of the outbox; UTC, like the table's partitions."""
        # Other days would show as missing, and a run of one would fail.
        start = self.partition_start or recorded(self.name, lambda: first_day(self))
        return dg.DailyPartitionsDefinition(start_date=str(start), timezone="UTC")

    @property
    def sensor_status(self) -> dg.DefaultSensorStatus:
        """Of a new sensor."""
        is_running = self.automation == "running"
        return dg.DefaultSensorStatus.RUNNING if is_running else dg.DefaultSensorStatus.STOPPED

    @property
    def schedule_status(self) -> dg.DefaultScheduleStatus:
        """Of a new schedule."""
        is_running = self.automation == "running"
        return dg.DefaultScheduleStatus.RUNNING if is_running else dg.DefaultScheduleStatus.STOPPED

    @cached_property
    def _at_load(self) -> Settings | None:
        try:
            return self.load_settings()
        except SetupError:
            # The sensors and every run report it.
            return None

    @cached_property
    def _parts(self) -> frozenset[str]:
        return frozenset(self.parts) - frozenset(self.without)

    @cached_property
    def _prefix(self) -> tuple[str, ...]:
        return tuple(self.key_prefix or ((ONLY,) if self.name == ONLY else (ONLY, self.name)))

    @property
    def _has_prefix(self) -> bool:
        return self._prefix != (ONLY,)


def plain_line(description: str) -> str:
    """Return a description as one paragraph without Markdown."""
    return " ".join(description.replace("`", "").split())


def _shifted(cron: str, name: str) -> str:
    """Return the cron expression at another minute for each name, so that not all runs start together."""
    if name == ONLY:
        return cron
    minute, rest = cron.split(" ", 1)
    # Not `hash`, which differs in each process.
    return f"{(int(minute) + sum(name.encode()) * 7) % 60} {rest}"
