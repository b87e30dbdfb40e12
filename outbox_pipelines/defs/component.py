"""An outbox as a component, `defs.yaml` in a folder of a Dagster project or a subclass; the overview of them.

Invariants:
- A component that cannot be read does not keep the code location from loading: its outbox reports the reason
  in its sensors and runs.
- `dg check yaml` and editors know every attribute.
- The overview defines the asset `outboxes` and its sensor only; each outbox stays with its component.
"""

# No postponed annotations here: Dagster reads those of the fields as written.
import logging
import re
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Optional, Self, cast

import dagster as dg
from dagster.components.scaffold.scaffold import Scaffolder, ScaffoldRequest
from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator

from outbox_pipelines.defs import overview, sources
from outbox_pipelines.defs.outbox import ONLY, PARTS, Automation, Outbox, Part
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
_ATTRIBUTE: Final = re.compile(r"attribute (\w+)")
_NO_NAME: Final = re.compile(r"[^a-z0-9_]+")
# Where the outbox of each name was found, by project.
_loaded: dict[tuple[Path, str], Path] = {}
# The outbox that has these keys, by project.
_keys: dict[tuple[Path, dg.AssetKey], str] = {}


class OutboxScaffolder(Scaffolder[Any]):
    """Writes `defs.yaml` for `dg scaffold defs`."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write the file into the new folder, whose name becomes the outbox's."""
        name = _named(request.target_path.name)
        request.target_path.mkdir(parents=True, exist_ok=True)
        (request.target_path / "defs.yaml").write_text(
            f"type: {request.type_name}\n\n"
            "attributes:\n"
            f"  name: {name}\n"
            f"  dsn_variable: {name.upper()}_DSN  # this variable holds the connection string\n"
            "  settings:\n"
            "    kafka: localhost:9092\n"
            "  automation: running  # sensors and schedules start with the code location\n"
        )


@dataclass
class OutboxTranslation(dg.Resolvable):
    """How the assets of an outbox are shown."""

    key_prefix: list[str] | None = None
    """Instead of `outbox/NAME`."""
    group: str | None = None
    """Instead of `outbox_NAME`."""
    owners: list[str] = field(default_factory=lambda: ["team:outbox"])
    tags: dict[str, str] = field(default_factory=dict)
    """Of every job, run and asset."""


@dg.scaffold_with(OutboxScaffolder)
@dataclass
class OutboxComponent(dg.Component, dg.Resolvable):
    """A transactional outbox: its relay, archive, checks and alerts.

    Subclass it to change what a YAML file cannot: override `executor`, `outbox` or `get_asset_spec`.
    """

    name: str
    """Part of every name in Dagster: lowercase letters, digits and `_`."""
    dsn_variable: str | None = None
    """The environment variable that holds the connection string; if not set: the outbox of this name in
    `outbox.toml`, otherwise OUTBOX_DSN."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that hold other settings, for secrets: `alerts: ORDERS_ALERTS`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings by name (`kafka`, `archive`, `topic`, …); all others come from `OUTBOX_…`."""
    parts: list[Part] = field(default_factory=lambda: list(PARTS))
    """The parts that are defined, where they have work."""
    without: list[Part] = field(default_factory=list)
    """Parts that are not defined."""
    automation: Automation = "stopped"
    """Whether sensors and schedules start with the code location."""
    schedules: dict[str, str] = field(default_factory=dict)
    """Cron expressions in UTC, by the schedule's name: `archive_days: "10 4 * * *"`."""
    translation: OutboxTranslation = field(default_factory=OutboxTranslation)
    pool: str | None = None
    """Pool of the ops that read or write whole days."""
    partition_start: str | None = None
    """The first day, as `2026-11-24`; if not set: the first day in the database."""
    blocking_checks: list[str] = field(default_factory=list)
    """Checks of `archive` that stop what is downstream: `[archive_equals_table, payloads_valid]`."""
    freshness_policy: Annotated[
        dg.FreshnessPolicy | None, dg.Resolver.default(model_field_type=Optional[str])  # noqa: UP045
    ] = None
    """Of `archive`: a template that returns one."""
    automation_condition: Annotated[
        dg.AutomationCondition[Any] | None, dg.Resolver.default(model_field_type=Optional[str])  # noqa: UP045
    ] = None
    """Of `archive`, as `"{{ dg.AutomationCondition.on_cron('@daily') }}"`."""

    # Why the file could not be read; not an attribute of the file.
    _unread: ClassVar[str | None] = None

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """Return the model of the attributes, which reads whatever is wrong with them."""
        return _lenient(cls.model())

    @classmethod
    def load(cls, attributes: BaseModel | None, context: dg.ComponentLoadContext) -> Self:
        """Return the component; one that only reports why, if its attributes cannot be read."""
        folder = _named(context.path.stem if context.path.is_file() else context.path.name)
        if attributes is None:
            return cls._unreadable(folder, "defs.yaml has no attributes: write at least `name`")
        name = _named(str(getattr(attributes, "name", folder)))
        why: str | None = getattr(attributes, "_unread", None)
        if why is None:
            try:
                return super().load(attributes, context)
            except Exception as error:  # noqa: BLE001 - whatever a template raises
                why = str(error).strip().splitlines()[-1]
        return cls._unreadable(name, why)

    @classmethod
    def _unreadable(cls, name: str, why: str) -> Self:
        component = cls(name=name)
        # A class variable for `dataclass`, which makes no attribute of it.
        setattr(component, "_unread", why)  # noqa: B010
        return component

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions of the outbox."""
        from outbox_pipelines.defs.build import build

        outbox = self.outbox()
        _report_shared_tables(context.component_tree)
        if first := _first_of(context, outbox.name):
            # Its keys and names are those of the first one, which is served.
            _LOG.error(
                "outbox %s: %s is ignored, since %s has this name: rename one",
                outbox.name,
                context.path.relative_to(context.project_root),
                first,
            )
            return dg.Definitions()
        if other := _owner_of(context, outbox):
            outbox = outbox.without_prefix(other)
        if outbox.error:
            outbox = replace(outbox, error=_located(outbox.error, context))
        return build([outbox], resolves=False)

    def outbox(self) -> Outbox:
        """Return the outbox; override this to compute settings or options."""
        given = {each.name: getattr(self, each.name) for each in fields(OutboxComponent)}
        given |= vars(given.pop("translation"))
        try:
            start = given.pop("partition_start")
            return Outbox(
                **given,
                partition_start=date.fromisoformat(start) if start else None,
                executor=self.executor(),
                map_spec=self.get_asset_spec,
                error=self._unread,
            )
        except (SetupError, ValueError) as error:
            return Outbox(name=_named(self.name), error=str(error), automation=self.automation)

    def executor(self) -> dg.ExecutorDefinition:
        """Return the executor of the jobs; override this to run them elsewhere."""
        return dg.in_process_executor

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return how an asset is shown; override this to change anything but its key."""
        return spec


@cache
def _lenient(model: type[BaseModel]) -> type[BaseModel]:
    """Return a model of the same attributes that keeps the reason if they do not fit."""

    class Lenient(model):  # type: ignore[misc,valid-type]
        _unread: str | None = PrivateAttr(default=None)

        @model_validator(mode="wrap")
        @classmethod
        def _read(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
            try:
                return handler(value)
            except ValidationError as error:
                given = value if isinstance(value, dict) else {}
                read = cls.model_construct(**({"name": given["name"]} if "name" in given else {}))
                # A value that fits none of several types has an error for each.
                lines = {each["loc"][:1]: _line(each) for each in reversed(error.errors())}
                read._unread = "; ".join(reversed(lines.values()))
                return cast(Self, read)

    Lenient.__name__ = Lenient.__qualname__ = model.__name__
    return Lenient


def _line(error: Any) -> str:
    """Return what is wrong with an attribute. The value is not shown: it may be a secret."""
    path = error["loc"][0] if error["loc"] else "attributes"
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return f"there is no attribute {path}: remove it, or see docs/dagster.md"
    return f"attribute {path}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _named(text: str) -> str:
    """Return a name that an outbox can have."""
    name = _NO_NAME.sub("_", text.lower()).strip("_")[:40]
    return name if name[:1].isalpha() else ONLY


def outboxes_of(tree: Any) -> list[Outbox]:
    """Return the outboxes of the components of a project, the first of each name."""
    found: dict[str, Outbox] = {}
    for component in tree.get_all_components(of_type=OutboxComponent):
        outbox = component.outbox()
        found.setdefault(outbox.name, outbox)
    return list(found.values())


@lru_cache(maxsize=1)
def _report_shared_tables(tree: Any) -> None:
    """Log, once for a project, which outboxes have the same tables."""
    settings = {}
    try:
        outboxes = outboxes_of(tree)
    except Exception:  # noqa: BLE001 - another component is faulty, which Dagster reports; or there is no project
        return
    for outbox in outboxes:
        # Its own component reports it.
        with suppress(SetupError):
            settings[outbox.name] = outbox.load_settings()
    for line in sources.shared_tables(settings):
        _LOG.warning("%s", line)


def _owner_of(context: dg.ComponentLoadContext, outbox: Outbox) -> str | None:
    """Return the outbox that has the same asset keys, if it was loaded before."""
    owner = _keys.setdefault((context.project_root, outbox.key()), outbox.name)
    if owner != outbox.name and (context.project_root, owner) not in _loaded:
        owner = _keys[context.project_root, outbox.key()] = outbox.name
    return None if owner == outbox.name else owner


def _located(error: str, context: dg.ComponentLoadContext) -> str:
    """Return an error with the place of the first attribute that it names."""
    file = context.path if context.path.is_file() else context.path / "defs.yaml"
    named = _ATTRIBUTE.search(error)
    if not file.is_file():
        return error
    lines = file.read_text().splitlines()
    found = [
        number for number, line in enumerate(lines, 1) if named and line.strip().startswith(f"{named[1]}:")
    ]
    place = f"{file.relative_to(context.project_root)}{f':{found[0]}' if found else ''}"
    return f"{place}: {error}"


def _first_of(context: dg.ComponentLoadContext, name: str) -> Path | None:
    """Return the place of another component with an outbox of this name, if it was loaded before."""
    first = _loaded.setdefault((context.project_root, name), context.path)
    if first != context.path and not first.exists():
        # It was moved, and this process has loaded the project before.
        first = _loaded[context.project_root, name] = context.path
    return None if first == context.path else first.relative_to(context.project_root)


class OverviewScaffolder(Scaffolder[Any]):
    """Writes `defs.yaml` for `dg scaffold defs`."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write the file into the new folder."""
        request.target_path.mkdir(parents=True, exist_ok=True)
        (request.target_path / "defs.yaml").write_text(
            f"type: {request.type_name}\n\n"
            "attributes:\n"
            "  automation: running  # the sensor starts with the code location\n"
        )


@dg.scaffold_with(OverviewScaffolder)
@dataclass
class OutboxesOverview(dg.Component, dg.Resolvable):
    """The asset `outboxes`: a row for each `OutboxComponent` of the project, the worst first."""

    automation: Automation = "stopped"
    """Whether the sensor starts with the code location."""

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the asset and its sensor."""
        outboxes = outboxes_of(context.component_tree)
        is_running = self.automation == "running"
        status = dg.DefaultSensorStatus.RUNNING if is_running else dg.DefaultSensorStatus.STOPPED
        return dg.Definitions(assets=overview.assets(outboxes), sensors=overview.sensors(outboxes, status))
