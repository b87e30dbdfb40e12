"""What is to be corrected before the table of OUTBOX_TABLE is relayed, or to make that faster.

Invariants:
- Everything is reported at once, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from outbox_pipelines.config import parsed, rules
from outbox_pipelines.config.file import KeyPath
from outbox_pipelines.config.table_mapping import Mapping
from outbox_pipelines.core.text import plain
from outbox_pipelines.database import Connection, connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing import existing_sql, pg_catalog
from outbox_pipelines.existing.examine import examine
from outbox_pipelines.existing.findings import Finding, identifier, literal
from outbox_pipelines.existing.guesses import flags
from outbox_pipelines.existing.pg_catalog import Column
from outbox_pipelines.relay import adoption
from outbox_pipelines.relay.kafka.message import needs_time
from outbox_pipelines.settings import OutboxSettings, RelaySettings

# Defaults that are in the zone of the session that inserts.
_LOCAL: Final = (
    "now()",
    "current_timestamp",
    "localtimestamp",
    "transaction_timestamp()",
    "clock_timestamp()",
)


@dataclass(frozen=True, slots=True)
class Checked:
    """A table, and what is to be corrected."""

    table: str
    findings: list[Finding]

    @property
    def is_wrong(self) -> bool:
        """Whether the relay would refuse the table."""
        return any(finding.is_error for finding in self.findings)


def read(settings: RelaySettings) -> Checked:
    """Return what is to be corrected.

    Raises:
        SetupError: the database is unavailable, or OUTBOX_TABLE is not a valid description.
    """
    mapping = open_mapping(settings, has_slot=True)
    with connect(settings, name="outbox: table") as connection:
        try:
            followed = adoption.followed(connection, mapping)
        except SetupError as error:
            return Checked(str(mapping), [Finding(str(error))])
        examined = examine(connection, followed)
        findings = [
            *of_settings(connection, settings, mapping),
            *examined.findings,
            *_of_rows(connection, followed, examined.columns),
        ]
    return Checked(str(mapping), findings)


def _of_rows(connection: Connection, mapping: Mapping, columns: dict[str, Column]) -> list[Finding]:
    """Return what rows have, as far as that is cheap to know, and as far as it is no matter of each start."""
    relation = pg_catalog.look_up(connection, mapping.schema, mapping.table)
    if relation is None or not (relation.may_use and relation.may_read):
        return []
    findings: list[Finding] = []
    status, time = (columns.get(mapping.columns.get(name, "")) for name in ("status", "created_at"))
    if status is not None and status.can_be("status"):
        name, pending = identifier(status.name), literal(mapping.states["pending"])
        for value in pg_catalog.occurring(connection, relation, status):
            if value not in mapping.states.values():
                problem = f"rows of {mapping} have the status {value!r}, and are not published"
                remedy = "if no publisher works on them, and they must be"
                update = f"UPDATE {relation.spelled} SET {name} = {pending} WHERE {name} = {literal(value)}"
                findings.append(Finding(problem, remedy, (update,), is_error=False))
    if mapping.remembers_failures and "last_error" not in mapping.columns:
        problem = f"{mapping} has no last_error: why an event was refused is only in the relay's log"
        remedy = "name the column in [table.columns], if necessary after"
        add = f"ALTER TABLE {relation.spelled} ADD COLUMN last_error text"
        findings.append(Finding(problem, remedy, (add,), is_error=False))
    findings += _of_an_earlier_publisher(connection, mapping, relation, columns)
    published = columns.get(mapping.columns.get("published_at", ""))
    for flag in flags(columns.values()):
        if published is not None and pg_catalog.is_marked(connection, relation, flag, published):
            problem = f"rows of {mapping} are pending and have {flag.name} = true: the relay publishes them"
            name, mark = identifier(published.name), identifier(flag.name)
            update = f"UPDATE {relation.spelled} SET {name} = now() WHERE {mark} AND {name} IS NULL"
            findings.append(Finding(problem, "if they are published already", (update,), is_error=False))
    zone = connection.execute(existing_sql.ZONE).fetchone()
    if zone and time is not None and time.type == "timestamp" and (time.default or "").lower() in _LOCAL:
        problem = (
            f"column {time.name!r} of {mapping} has no time zone, and its default is the time in {zone[0]}; "
            "the relay reads it as UTC, so that the age of events is wrong by the difference"
        )
        change = f"ALTER COLUMN {identifier(time.name)} SET DEFAULT (now() AT TIME ZONE 'UTC')"
        statement = f"ALTER TABLE {relation.spelled} {change}"
        findings.append(Finding(problem, "if the application can", (statement,), is_error=False))
    return findings


def _of_an_earlier_publisher(
    connection: Connection, mapping: Mapping, relation: pg_catalog.Relation, columns: dict[str, Column]
) -> list[Finding]:
    """Return what it may have recorded, and the relay would take for its own record."""
    findings: list[Finding] = []
    used = {ours: columns.get(theirs) for ours, theirs in mapping.columns.items()}
    if any(column is None or not column.can_be(ours) for ours, column in used.items()):
        return []
    if mapping.has_status:
        status, failed = identifier(mapping.columns["status"]), literal(mapping.states["failed"])
        # As text: an enum may lack the value.
        chosen = f"{status}::text = {failed}"
        if number := pg_catalog.count(connection, relation, chosen):
            problem = f"{number} rows of {mapping} have the status {mapping.states['failed']!r}: dead letters"
            remedy = (
                "if an earlier publisher has set it, for example in an outage, and they must be published"
            )
            pending = literal(mapping.states["pending"])
            change = f"{status} = {pending}"
            if "retry_count" in mapping.columns:
                change += f", {identifier(mapping.columns['retry_count'])} = 0"
            update = f"UPDATE {relation.spelled} SET {change} WHERE {chosen}"
            findings.append(Finding(problem, remedy, (update,), is_error=False))
    if "retry_count" in mapping.columns and "last_error" not in mapping.columns:
        tries = identifier(mapping.columns["retry_count"])
        state = f"::text = {literal(mapping.states['pending'])}" if mapping.has_status else " IS NULL"
        marker = identifier(mapping.columns["status" if mapping.has_status else "published_at"])
        where = f"{marker}{state} AND {tries} > 0"
        if number := pg_catalog.count(connection, relation, where):
            problem = (
                f"{number} pending rows of {mapping} have attempts in {tries}: without a last_error the "
                "relay takes counts below OUTBOX_MAX_ATTEMPTS for its own"
            )
            remedy = "name a last_error in [table.columns], or if an earlier publisher has counted"
            update = f"UPDATE {relation.spelled} SET {tries} = 0 WHERE {where}"
            findings.append(Finding(problem, remedy, (update,), is_error=False))
    return findings


def of_settings(connection: Connection, settings: RelaySettings, mapping: Mapping) -> list[Finding]:
    """Return what does not fit together in the settings, the mapping and the database."""
    findings: list[Finding] = []
    if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        findings.append(
            Finding(
                "the encoding of the database is SQL_ASCII, which does not define characters",
                "use a database with an encoding such as UTF8",
            )
        )
    return findings + [finding for _, finding in conflicts(settings, mapping)]


def conflicts(settings: RelaySettings, mapping: Mapping) -> Iterator[tuple[KeyPath, Finding]]:
    """Yield what does not fit together in the settings and the mapping, each with the place of a setting."""
    if settings.delivery == "exactly_once":
        yield (
            ("delivery",),
            Finding(
                f"{mapping} cannot store the position that exactly_once needs",
                "set OUTBOX_DELIVERY=at_least_once",
            ),
        )
    for name in ("max_attempts", "retry_seconds", "on_dead_letter"):
        for kind, types in zip(("event_types", "aggregate_types"), rules.own(settings, name), strict=True):
            for each in sorted(types):
                yield (
                    (kind, each, name),
                    Finding(
                        f"{each} has its own {name}, and {mapping} has one for all of its rows",
                        f"write {name} in [relay]",
                    ),
                )
    if needs_time(settings) and "created_at" not in mapping.columns:
        yield (
            ("table", "columns"),
            Finding(
                "OUTBOX_VALUE_FORMAT, or that of a type, needs the time of an event",
                "name its column as created_at in [table.columns]",
            ),
        )


def open_mapping(settings: OutboxSettings, *, has_slot: bool = False) -> Mapping:
    """Return the mapping of OUTBOX_TABLE.

    Args:
        has_slot: whether it may name a slot: then no relay publishes the table.

    Raises:
        SetupError: there is none.
    """
    mapping = parsed.mapping(settings)
    if mapping is None:
        raise SetupError(
            "OUTBOX_TABLE is not set: `outbox table describe NAME` prints the section [table] of outbox.toml"
        )
    if mapping.slot is not None and not has_slot:
        raise SetupError(
            f"OUTBOX_TABLE: what reads the slot {mapping.slot} publishes "
            f"{mapping}, and not a relay: unset OUTBOX_TABLE for the relay of the append-only outbox. "
            "Only `outbox adopt`, `outbox debezium` and `outbox table check` take such a table"
        )
    return mapping


def render(checked: Checked) -> str:
    """Return the findings as text for a terminal; each statement is a line of its own."""
    lines: list[str] = []
    for finding in checked.findings:
        lines.append(f"{severity(finding)}: {plain(finding.text)}")
        lines += [f"    {plain(statement)};" for statement in finding.statements]
    if not lines:
        return plain(f"{checked.table}: nothing to correct")
    return "\n".join(lines)


def severity(finding: Finding) -> str:
    """Return `error` or `warning`."""
    return "error" if finding.is_error else "warning"
