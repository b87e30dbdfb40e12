"""The configuration of Debezium's PostgreSQL connector for an outbox, with its event router, and its names.

Invariants:
- Every value is a text, as Kafka Connect stores it: two configurations are equal if their texts are.
- The order of each aggregate is kept, and nothing is given up: the producer is idempotent and never stops
  trying, one task reads the slot, and an event that cannot be sent ends the task instead of being skipped.
- The password is what the caller passes: for a file or Connect's REST, a reference that a worker resolves.
- What the router cannot make equal is refused, with the setting to change: it is never published differently.
- The payload is the text that PostgreSQL prints, unchanged: it is not parsed and printed again.
"""

from __future__ import annotations

import hashlib
import re
import string
from typing import Any, Final

from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from outbox_pipelines.config import parsed
from outbox_pipelines.config.message_names import METADATA
from outbox_pipelines.config.rules import has_rules
from outbox_pipelines.config.table_mapping import REQUIRED, Mapping
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import MessageSettings, OutboxSettings, RelaySettings

CLASS: Final = "io.debezium.connector.postgresql.PostgresConnector"
HEARTBEAT_MS: Final = 10_000
"""How often a connector without events confirms the log."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_]+")
# How libpq's names are called in Debezium.
_SSL: Final = {
    "sslmode": "database.sslmode",
    "sslrootcert": "database.sslrootcert",
    "sslcert": "database.sslcert",
    "sslkey": "database.sslkey",
}
_FIXED: Final = {
    "connector.class": CLASS,
    "tasks.max": "1",
    "plugin.name": "pgoutput",
    "publication.autocreate.mode": "disabled",
    # From the slot's first position on; what is older concerns the owner of the slot.
    "snapshot.mode": "no_data",
    # Those who drop the slot know whether its events are published.
    "slot.drop.on.stop": "false",
    "tombstones.on.delete": "false",
    # Its own headers would be the only difference from the relay's messages.
    "extended.headers.enabled": "false",
    # A task that fails is seen; an event that is skipped is not.
    "errors.tolerance": "none",
    # A database without events on a busy server would keep the log of all others. The transaction has no
    # row, and moves the slot.
    "heartbeat.interval.ms": str(HEARTBEAT_MS),
    "heartbeat.action.query": "SELECT pg_logical_emit_message(true, 'outbox-heartbeat', '')",
    "message.prefix.exclude.list": "outbox-heartbeat",
    # 8,192 events of 1 MB would not fit into the heap.
    "max.queue.size.in.bytes": "67108864",
    "producer.override.acks": "all",
    "producer.override.enable.idempotence": "true",
    # The most with which an idempotent producer keeps the order.
    "producer.override.max.in.flight.requests.per.connection": "5",
    "producer.override.delivery.timeout.ms": "2147483647",
    "producer.override.max.block.ms": "9223372036854775807",
    # The topic's own limit decides, which can be raised while the connector runs.
    "producer.override.max.request.size": "16777216",
}
REFERENCE: Final = "${file:/secrets/outbox.properties:password}"
"""Where workers find the database's password, if nothing else is said."""
_REFERENCE: Final = re.compile(r"\$\{[^{}:]+:[^{}]+\}")
_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
_ROUTER: Final = "transforms.outbox."
_DROP: Final = "transforms.withoutId."
_STRING: Final = "org.apache.kafka.connect.storage.StringConverter"
# The router takes one column for the topic, and calls its value so.
_ROUTED: Final = "${routedByValue}"
_RELAY: Final = "or publish with the relay"
OUTBOX: Final = Mapping(
    schema=None,
    table="outbox",
    columns={name: name for name in (*REQUIRED, *(header.replace("-", "_") for header in METADATA))},
    states={},
)
"""The append-only outbox, described as an existing table is."""


def connector(
    settings: RelaySettings,
    *,
    slot: str,
    publication: str,
    password: str,
    host: str | None = None,
    port: int | None = None,
    user: str | None = None,
) -> dict[str, str]:
    """Return the configuration that makes the connector's messages equal to the relay's.

    Args:
        slot: the slot that it reads; also the prefix of its own topics.
        publication: with the table, for inserts, under the name of its root.
        password: the database's, or a reference to it such as `REFERENCE`; empty for none.
        host, port, user: where workers reach the database and as whom, if not as in OUTBOX_DSN.

    Raises:
        SetupError: the router cannot make equal messages, or OUTBOX_DSN does not say where the database is.
    """
    schema, name = table(settings)
    found = {
        **_FIXED,
        **_database(settings, host=host, port=port, user=user),
        **({"database.password": password} if password else {}),
        "topic.prefix": slot,
        "slot.name": slot,
        "publication.name": publication,
        "table.include.list": f"{_escaped(schema)}.{_escaped(name)}",
        **router(settings),
    }
    if settings.create_topics:
        found["topic.creation.default.partitions"] = str(settings.topic_partitions)
        found["topic.creation.default.replication.factor"] = str(settings.topic_replication)
    if settings.delivery == "exactly_once":
        # A cluster whose workers do not have it refuses the configuration.
        found["exactly.once.support"] = "required"
    return found


def database(settings: OutboxSettings) -> str:
    """Return the name of the database."""
    given = _given(settings)
    return str(given.get("dbname") or given["user"])


def _given(settings: OutboxSettings) -> dict[str, Any]:
    """Return OUTBOX_DSN, completed as libpq does."""
    return {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.get_defaults()
        if option.val is not None
    } | conninfo_to_dict(settings.require_dsn())


def _database(
    settings: OutboxSettings, *, host: str | None, port: int | None, user: str | None
) -> dict[str, str]:
    given = _given(settings)
    where = host or given.get("hostaddr") or given.get("host") or ""
    if not where or where.startswith(("/", "@")):
        raise SetupError(
            "OUTBOX_DSN names no host, and Kafka Connect reaches no socket: add --host with the name under "
            "which its workers reach the database"
        )
    ports = str(port or given.get("port") or 5432)
    if "," in where or "," in ports:
        raise SetupError(
            "OUTBOX_DSN names several hosts, and Debezium takes one: add --host (and --port) with a name "
            "that leads to the primary"
        )
    # libpq's default is the user of the operating system.
    who = str(user or given["user"])
    found = {
        "database.hostname": str(where),
        "database.port": ports,
        "database.user": who,
        "database.dbname": database(settings),
    }
    ssl = {theirs: str(given[ours]) for ours, theirs in _SSL.items() if given.get(ours)}
    # The driver of Java does not know it; it differs only for servers that refuse what is not encrypted.
    if ssl.get("database.sslmode") == "allow":
        ssl["database.sslmode"] = "prefer"
    return found | ssl


def _escaped(name: str) -> str:
    """Return a name for a list of patterns."""
    return name if _PLAIN.fullmatch(name) else re.escape(name)


def connector_name(settings: OutboxSettings) -> str:
    """Return the name of the connector in its cluster."""
    return settings.connector or settings.name


def slot_name(settings: OutboxSettings, database: str) -> str:
    """Return the name of the slot and the publication: readable, and no other outbox's of the server."""
    schema, name = table(settings)
    is_ours = mapping(settings) is OUTBOX
    parts = ("debezium", database, schema, *([] if is_ours else [name]))
    full = "_".join(parts)
    # Otherwise the parts could not be distinguished: not only the database may contain the separator.
    if _NAME.fullmatch(full) and is_ours and "_" not in schema:
        return full
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^a-z0-9_]', '_', full.lower())[:54]}_{digest}"


def reference(text: str) -> str:
    """Return the reference to a password, or the empty text for none.

    Raises:
        ValueError: it is something else. The message does not show it: it may be the password.
    """
    if text and not _REFERENCE.fullmatch(text):
        raise ValueError(
            f"write a reference that the workers resolve, such as '{REFERENCE}', in single quotes; the "
            "password itself would be readable in Kafka Connect"
        )
    return text


def mapping(settings: OutboxSettings) -> Mapping:
    """Return the description of the table that the connector publishes."""
    return parsed.mapping(settings) or OUTBOX


def table(settings: OutboxSettings) -> tuple[str, str]:
    """Return the schema and the name of the table."""
    found = mapping(settings)
    return found.schema or settings.db_schema, found.table


def router(settings: MessageSettings) -> dict[str, str]:
    """Return the settings of the router and of the converters.

    Raises:
        SetupError: its messages would differ from those of the relay.
    """
    _refuse(settings)
    named = mapping(settings).columns
    names = parsed.header_names(settings)
    field, topic = _topic(settings)
    headers = {
        header: name
        for header, name in names.items()
        if header != "id" and _column(header, named) is not None
    }
    placed = [f"{_column(header, named)}:header:{name}" for header, name in headers.items()]
    # The router names one header itself, always `id`.
    drops_id = names["id"] != "id"
    if drops_id:
        placed.insert(0, f"{named['id']}:header:{names['id']}")
    found = {
        "transforms": "outbox,withoutId" if drops_id else "outbox",
        _ROUTER + "type": "io.debezium.transforms.outbox.EventRouter",
        _ROUTER + "route.by.field": named[field],
        _ROUTER + "route.topic.replacement": topic,
        _ROUTER + "table.field.event.id": named["id"],
        _ROUTER + "table.field.event.key": named["aggregate_id"],
        _ROUTER + "table.field.event.payload": named["payload"],
        _ROUTER + "table.expand.json.payload": "false",
        "key.converter": _STRING,
        "value.converter": _STRING,
        "header.converter": _STRING,
    }
    if placed:
        found[_ROUTER + "table.fields.additional.placement"] = ",".join(placed)
    if drops_id:
        found[_DROP + "type"] = "org.apache.kafka.connect.transforms.DropHeaders"
        found[_DROP + "headers"] = "id"
    return found


def _topic(settings: MessageSettings) -> tuple[str, str]:
    """Return the column by which the router chooses the topic, and the topic with its value."""
    parts = list(string.Formatter().parse(settings.topic))
    fields = {field for _, field, _, _ in parts if field is not None}
    if len(fields) > 1 or any(spec for _, _, spec, _ in parts):
        raise SetupError(
            f"OUTBOX_TOPIC={settings.topic}: Debezium makes a topic of one column, as it is: write a "
            f"template with {{aggregate_type}} or {{event_type}} alone and without :lower, {_RELAY}"
        )
    topic = "".join(literal + (_ROUTED if field is not None else "") for literal, field, _, _ in parts)
    return next(iter(fields), "aggregate_type"), topic


def _refuse(settings: MessageSettings) -> None:
    if settings.value_format != "payload":
        raise SetupError(
            f"OUTBOX_VALUE_FORMAT={settings.value_format}: Debezium sends the payload as it is: set "
            f"OUTBOX_VALUE_FORMAT=payload, {_RELAY}"
        )
    if settings.format != "json":
        raise SetupError(
            f"OUTBOX_FORMAT={settings.format}: Debezium sends the payload without the id of a schema: set "
            f"OUTBOX_FORMAT=json, {_RELAY}"
        )
    if has_rules(settings):
        raise SetupError(
            "OUTBOX_EVENT_TYPES, OUTBOX_AGGREGATE_TYPES: Debezium has one rule for all types: unset them and "
            f"write OUTBOX_TOPIC, {_RELAY}"
        )
    if settings.tombstones:
        raise SetupError(
            f"OUTBOX_TOMBSTONES: Debezium sends a payload that is null as the text null: unset it, {_RELAY}"
        )
    names = parsed.header_names(settings)
    for header, name in names.items():
        if "," in name or ":" in name or name.strip() != name or (name == "id" and header != "id"):
            raise SetupError(
                f"OUTBOX_HEADER_NAMES: Debezium cannot call the header {header} {name!r}: choose another "
                f"name without a comma and a colon, {_RELAY}"
            )
    _refuse_table(mapping(settings))


def _refuse_table(mapping: Mapping) -> None:
    where = "OUTBOX_TABLE"
    if mapping.aggregate_type:
        raise SetupError(
            f"{where}: the table has no column for the aggregate type, and Debezium makes headers and topics "
            f"of columns: add such a column and name it in [table.columns], {_RELAY}"
        )
    for name in ("headers", "trace_id"):
        if name in mapping.columns:
            raise SetupError(
                f"{where}: Debezium makes no headers of {name} as the relay does: remove {name} from "
                f"[table.columns], {_RELAY}"
            )
    for name in (mapping.table, *mapping.columns.values()):
        if "," in name or ":" in name:
            raise SetupError(
                f"{where}: Debezium cannot be given the name {name!r}: rename it without comma and colon, "
                f"{_RELAY}"
            )


def _column(header: str, named: dict[str, str]) -> str | None:
    return named.get(header.replace("-", "_"))
