"""The configuration of Debezium's PostgreSQL connector for an outbox.

Invariants:
- Every value is a text, as Kafka Connect stores it: two configurations are equal if their texts are.
- The order of each aggregate is kept, and nothing is given up: the producer is idempotent and never stops
  trying, one task reads the slot, and an event that cannot be sent ends the task instead of being skipped.
- The password is what the caller passes: for a file or Connect's REST, a reference that a worker resolves.
"""

from __future__ import annotations

import re
from typing import Any, Final

from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from outbox_pipelines.debezium.router import router, table
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings

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
    # From the slot's first position on; what is older is the matter of whoever made the slot.
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


def connector(
    settings: Settings,
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
        password: the database's, or a reference to it such as ``${file:/secrets/outbox:password}``; empty for
            none.
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


def database(settings: Settings) -> str:
    """Return the name of the database."""
    given = _given(settings)
    return str(given.get("dbname") or given["user"])


def _given(settings: Settings) -> dict[str, Any]:
    """Return OUTBOX_DSN, completed as libpq does."""
    return {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.get_defaults()
        if option.val is not None
    } | conninfo_to_dict(settings.require_dsn())


def _database(settings: Settings, *, host: str | None, port: int | None, user: str | None) -> dict[str, str]:
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
