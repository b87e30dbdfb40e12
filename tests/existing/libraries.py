"""Outbox tables of other libraries, with rows as their writers and publishers leave them.

Each has the columns of the version that `existing.known_tables` names. Of the rows, those with a body
`{"n": 1}` to `{"n": 3}` are pending, in this order; all others must stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class Library:
    """A table, its rows, and what its own publisher asks for."""

    name: str
    table: str
    """As a user writes it in a shell."""
    ddl: str
    rows: str
    """Statements: what is pending, and what its publisher has done with others."""
    asks: str
    """What its own publisher would take, each row's id as text."""
    keys: tuple[str, ...]
    """Of the three pending rows."""
    headers: dict[str, str | None]
    """Of the first message, among others."""
    topic_of: str = "event"
    """The aggregate type, which names the topic."""
    value: str = '{{"n": {n}}}'
    more: str = ""
    """The statement of a fourth event, `n` = 4, after the way back; its id is the last of `ids`."""
    says: str = ""
    """A part of its description."""
    back: str = ""
    """What must be done before the library publishes again."""


def printed(beginning: str) -> str:
    """The SQL of docs/existing-tables.md that begins so."""
    page = (Path(__file__).parents[2] / "docs" / "existing-tables.md").read_text()
    blocks: list[str] = re.findall(r"```sql\n(.*?)```", page, re.S)
    (block,) = (block for block in blocks if block.startswith(beginning))
    return block


_IDS: Final = [f"00000000-0000-4000-8000-00000000000{n}" for n in range(10)]
_SPRING: Final = """
CREATE TABLE event_publication (
    id uuid PRIMARY KEY, listener_id text NOT NULL, event_type text NOT NULL, serialized_event text NOT NULL,
    publication_date timestamptz NOT NULL, completion_date timestamptz{more});
CREATE INDEX ON event_publication (completion_date)"""
_SPRING_ROW: Final = (
    "INSERT INTO event_publication (id, listener_id, event_type, serialized_event, publication_date, "
    "completion_date{names}) SELECT id::uuid, 'o.s.m.EventExternalizer.externalize(java.lang.Object)', "
    "'shop.Orders$Placed', body, '2026-11-01Z'::timestamptz + at * interval '1 s', done::timestamptz{values} "
    "FROM (VALUES {rows}) AS r (id, body, at, done, state)"
)
_SPRING_ROWS: Final = (
    f"('{_IDS[9]}', '{{\"n\": 1}}', 1, NULL, 'PUBLISHED'), "
    f"('{_IDS[1]}', '{{\"n\": 2}}', 2, NULL, 'PUBLISHED'), "
    f"('{_IDS[2]}', '{{\"n\": 3}}', 3, NULL, 'PUBLISHED'), "
    f"('{_IDS[3]}', '{{\"n\": 0}}', 0, '2026-11-02Z', 'COMPLETED')"
)
_SPRING_MORE: Final = f"('{_IDS[4]}', '{{\"n\": 4}}', 4, NULL, 'PUBLISHED')"
_STATE: Final = {
    "names": ", status, completion_attempts, last_resubmission_date",
    "values": ", state, 1, now()",
}
_NO_STATE: Final = {"names": "", "values": ""}

SPRING_2: Final = Library(
    "Spring Modulith 2",
    "event_publication",
    _SPRING.format(more=", status text, completion_attempts int, last_resubmission_date timestamptz"),
    _SPRING_ROW.format(rows=f"{_SPRING_ROWS}, ('{_IDS[5]}', '0', 0, NULL, 'FAILED')", **_STATE),
    # What it starts again after a crash; a row that has failed is started again on demand.
    "SELECT id::text FROM event_publication WHERE completion_date IS NULL AND status <> 'FAILED'",
    (_IDS[9], _IDS[1], _IDS[2]),
    {"id": _IDS[9], "event-type": "shop.Orders$Placed", "aggregate-type": "event"},
    says="for each listener_id; found: o.s.m.EventExternalizer.externalize(java.lang.Object). The relay",
    more=_SPRING_ROW.format(rows=_SPRING_MORE, **_STATE),
)
SPRING_1: Final = Library(
    "Spring Modulith 1",
    "event_publication",
    _SPRING.format(more=""),
    _SPRING_ROW.format(rows=_SPRING_ROWS, **_NO_STATE),
    "SELECT id::text FROM event_publication WHERE completion_date IS NULL",
    SPRING_2.keys,
    SPRING_2.headers,
    more=_SPRING_ROW.format(rows=_SPRING_MORE, **_NO_STATE),
)
_NAMASTACK_ROW: Final = (
    "INSERT INTO outbox_record SELECT id, state, key, 'shop.Placed', body, '{{}}', "
    "now() + at * interval '1 s', done::timestamptz, 0, NULL, now(), 7, 'kafkaOutboxHandler' "
    "FROM (VALUES {rows}) AS r (id, state, key, body, at, done)"
)
NAMASTACK: Final = Library(
    "namastack-outbox 1",
    "outbox_record",
    """
CREATE TABLE outbox_record (
    id varchar(255) PRIMARY KEY, status varchar(20) NOT NULL, record_key varchar(255) NOT NULL,
    record_type varchar(255) NOT NULL, payload text NOT NULL, context text, created_at timestamptz NOT NULL,
    completed_at timestamptz, failure_count int NOT NULL, failure_reason varchar(1000),
    next_retry_at timestamptz NOT NULL, partition_no int NOT NULL, handler_id varchar(1000) NOT NULL);
CREATE INDEX ON outbox_record (record_key, created_at);
CREATE INDEX ON outbox_record (status, next_retry_at)""",
    _NAMASTACK_ROW.format(
        rows="('c', 'NEW', 'order-1', '{\"n\": 1}', -9, NULL), "
        "('a', 'NEW', 'order-1', '{\"n\": 2}', -8, NULL), "
        "('b', 'NEW', 'order-2', '{\"n\": 3}', -7, NULL), "
        "('d', 'COMPLETED', 'order-1', '0', -20, '2026-11-01Z'), "
        "('e', 'FAILED', 'order-3', '0', -6, NULL)"
    ),
    "SELECT id FROM outbox_record WHERE status = 'NEW' AND next_retry_at <= now()",
    ("order-1", "order-1", "order-2"),
    {"id": "c", "event-type": "shop.Placed"},
    more=_NAMASTACK_ROW.format(rows="('f', 'NEW', 'order-1', '{\"n\": 4}', -1, NULL)"),
)
_MASSTRANSIT_ROW: Final = (
    'INSERT INTO "OutboxMessage" ("SentTime", "Headers", "OutboxId", "MessageId", "ContentType", '
    '"MessageType", "Body", "CorrelationId", "DestinationAddress") SELECT now(), \'{{}}\', '
    f"'{_IDS[8]}', id::uuid, 'application/vnd.masstransit+json', 'urn:message:Shop:Placed', body, "
    f"'{_IDS[7]}', 'exchange:placed' FROM (VALUES {{rows}}) AS r (id, body)"
)
MASSTRANSIT_TABLE: Final = """
CREATE TABLE "OutboxMessage" (
    "SequenceNumber" bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, "EnqueueTime" timestamptz,
    "SentTime" timestamptz NOT NULL, "Headers" text, "Properties" text, "InboxMessageId" uuid,
    "InboxConsumerId" uuid, "OutboxId" uuid, "MessageId" uuid NOT NULL, "ContentType" varchar(256) NOT NULL,
    "MessageType" text NOT NULL, "Body" text NOT NULL, "ConversationId" uuid, "CorrelationId" uuid,
    "InitiatorId" uuid, "RequestId" uuid, "SourceAddress" varchar(256), "DestinationAddress" varchar(256),
    "ResponseAddress" varchar(256), "FaultAddress" varchar(256), "ExpirationTime" timestamptz);
CREATE UNIQUE INDEX ON "OutboxMessage" ("OutboxId", "SequenceNumber")"""
MASSTRANSIT: Final = Library(
    "MassTransit 8",
    "OutboxMessage",
    f'{MASSTRANSIT_TABLE}; ALTER TABLE "OutboxMessage" ADD COLUMN published_at timestamptz',
    # What it has published is deleted.
    _MASSTRANSIT_ROW.format(
        rows=f"('{_IDS[3]}', '{{\"n\": 1}}'), ('{_IDS[2]}', '{{\"n\": 2}}'), ('{_IDS[1]}', '{{\"n\": 3}}')"
    ),
    'SELECT "MessageId"::text FROM "OutboxMessage"',
    (_IDS[3], _IDS[2], _IDS[1]),
    {"id": _IDS[3], "event-type": "urn:message:Shop:Placed", "correlation-id": _IDS[7]},
    more=_MASSTRANSIT_ROW.format(rows=f"('{_IDS[4]}', '{{\"n\": 4}}')"),
    back='DELETE FROM "OutboxMessage" WHERE published_at IS NOT NULL',
)
_CAP_ROW: Final = (
    "INSERT INTO cap.published SELECT id, 'v1', 'order.placed', "
    '\'{{"Headers":{{"cap-msg-id":"\' || id || \'"}},"Value":{{"n":\' || n || \'}}}}\', 0, '
    "localtimestamp, done::timestamp, state FROM (VALUES {rows}) AS r (id, n, done, state)"
)
CAP: Final = Library(
    "CAP 10",
    "cap.published",
    """
CREATE SCHEMA cap;
CREATE TABLE cap.published (
    "Id" bigint PRIMARY KEY, "Version" varchar(20) NOT NULL, "Name" varchar(200) NOT NULL, "Content" text,
    "Retries" int NOT NULL, "Added" timestamp NOT NULL, "ExpiresAt" timestamp,
    "StatusName" varchar(50) NOT NULL);
CREATE INDEX ON cap.published ("Version", "ExpiresAt", "StatusName")""",
    _CAP_ROW.format(
        rows="(7001, 1, NULL, 'Scheduled'), (7002, 2, NULL, 'Scheduled'), (7003, 3, NULL, 'Scheduled'), "
        "(7000, 0, '2026-11-02', 'Succeeded'), (7004, 0, '2026-12-02', 'Delayed')"
    ),
    """SELECT "Id"::text FROM cap.published WHERE "StatusName" IN ('Failed', 'Scheduled')""",
    ("7001", "7002", "7003"),
    {"id": "7001", "event-type": "order.placed"},
    topic_of="order.placed",
    value='{{"Headers":{{"cap-msg-id":"700{n}"}},"Value":{{"n":{n}}}}}',
    more=_CAP_ROW.format(rows="(7009, 4, NULL, 'Scheduled')"),
)
_KEYED: Final = """jsonb_set("Content"::jsonb, '{Headers,cap-kafka-key}', '"order-1"')"""
CAP_AS_ITS_OWN: Final = replace(
    CAP,
    ddl=f"{CAP.ddl}; {printed('ALTER TABLE cap.published')}",
    rows=f"""{CAP.rows}; UPDATE cap.published SET "Content" = {_KEYED} WHERE "Id" <> 7003""",
    keys=("order-1", "order-1", "7003"),
    headers={"id": "7001", "cap-msg-id": "7001", "cap-kafka-key": "order-1"},
    value='{{"n": {n}}}',
)
_TRAM_COLUMNS: Final = """
    destination text NOT NULL, headers text NOT NULL, payload text NOT NULL, published smallint DEFAULT 0,
    message_partition smallint, creation_time bigint"""
TRAM_TABLE: Final = f"""
CREATE TABLE message (id varchar(255) PRIMARY KEY, {_TRAM_COLUMNS});
CREATE INDEX ON message (published, id)"""
_TRAM_ROW: Final = (
    "INSERT INTO message (id, destination, headers, payload, published, creation_time) "
    "SELECT {id}, 'shop.Order', '{{\"event-type\": \"shop.Placed\"}}', body, published, 0 "
    "FROM (VALUES {rows}) AS r (id, body, published)"
)
_TRAM_ROWS: Final = (
    "('0-1', '{\"n\": 1}', 0), ('0-2', '{\"n\": 2}', 0), ('0-3', '{\"n\": 3}', 0), ('0-0', '0', 1)"
)
_TRAM_MORE: Final = "('0-5', '{\"n\": 4}', 0)"
TRAM: Final = Library(
    "Eventuate Tram",
    "message",
    f"{TRAM_TABLE}; ALTER TABLE message ADD COLUMN created_at timestamptz NOT NULL DEFAULT now()",
    _TRAM_ROW.format(id="id", rows=_TRAM_ROWS),
    "SELECT id FROM message WHERE published = 0",
    ("0-1", "0-2", "0-3"),
    {"id": "0-1", "event-type": "shop.Order"},
    topic_of="shop.Order",
    more=_TRAM_ROW.format(id="id", rows=_TRAM_MORE),
)
TRAM_WITH_IDS: Final = Library(
    "Eventuate Tram with ids of the database",
    "message",
    f"CREATE TABLE message (id varchar(1000), dbid bigserial PRIMARY KEY, {_TRAM_COLUMNS})",
    _TRAM_ROW.format(id="''", rows=_TRAM_ROWS),
    "SELECT dbid::text FROM message WHERE published = 0",
    ("1", "2", "3"),
    {"id": "1", "event-type": "shop.Order"},
    topic_of="shop.Order",
    more=_TRAM_ROW.format(id="''", rows=_TRAM_MORE),
)
_DJANGO_ROW: Final = (
    "INSERT INTO published SELECT id::uuid, 'v1', '/topic/orders.v1', body::jsonb, "
    "now() + at * interval '1 s', now() + interval '1 d', 0, state, jsonb_build_object('dop-msg-id', id) "
    "FROM (VALUES {rows}) AS r (id, body, at, state)"
)
DJANGO: Final = Library(
    "django-outbox-pattern 3",
    "published",
    """
CREATE TABLE published (
    id uuid PRIMARY KEY, version varchar(100), destination varchar(255) NOT NULL, body jsonb NOT NULL,
    added timestamptz NOT NULL, expires_at timestamptz NOT NULL, retry int NOT NULL CHECK (retry >= 0),
    status int NOT NULL, headers jsonb NOT NULL);
CREATE INDEX ON published (status);
CREATE INDEX ON published (added)""",
    _DJANGO_ROW.format(
        rows=f"('{_IDS[3]}', '{{\"n\": 1}}', -3, 1), ('{_IDS[2]}', '{{\"n\": 2}}', -2, 1), "
        f"('{_IDS[1]}', '{{\"n\": 3}}', -1, 1), ('{_IDS[5]}', '0', -9, 2), ('{_IDS[6]}', '0', -8, -1)"
    ),
    "SELECT id::text FROM published WHERE status = 1 AND expires_at >= now()",
    (_IDS[3], _IDS[2], _IDS[1]),
    {"id": _IDS[3], "event-type": "/topic/orders.v1", "dop-msg-id": _IDS[3]},
    more=_DJANGO_ROW.format(rows=f"('{_IDS[4]}', '{{\"n\": 4}}', 0, 1)"),
)
ALL: Final = (
    *(NAMASTACK, SPRING_2, SPRING_1, MASSTRANSIT, CAP, CAP_AS_ITS_OWN, TRAM, TRAM_WITH_IDS, DJANGO),
)

# By name: a table that no relay can publish as it is, and a part of what is said about it.
REFUSED: Final = {
    "wolverine_outgoing_envelopes": (
        """
CREATE TABLE wolverine_outgoing_envelopes (
    id uuid PRIMARY KEY, owner_id int NOT NULL, destination varchar NOT NULL, deliver_by timestamptz,
    body bytea NOT NULL, attempts int DEFAULT 0, message_type varchar NOT NULL)""",
        "the table of Wolverine, whose bodies are binary envelopes",
    ),
    "OutboxData": (
        """
CREATE TABLE "OutboxData" (
    "MessageId" varchar(200) PRIMARY KEY, "Dispatched" boolean NOT NULL DEFAULT false,
    "DispatchedAt" timestamp, "PersistenceVersion" varchar(23), "Operations" jsonb NOT NULL)""",
        "the table of NServiceBus, in which one row has all messages of a handler",
    ),
    "OutboxMessage": (
        MASSTRANSIT_TABLE,
        'deletes what it has published, so that no row is marked: ALTER TABLE public."OutboxMessage" ADD '
        "COLUMN published_at timestamptz; then describe it again",
    ),
    "cap.received": (
        f'{CAP.ddl}; CREATE TABLE cap.received (LIKE cap.published, "Group" varchar(200))',
        "the table of CAP, with what it has received: describe its table published",
    ),
    "message": (
        TRAM_TABLE,
        "in which no column orders the rows: ALTER TABLE public.message ADD COLUMN created_at timestamptz "
        "NOT NULL DEFAULT now(); then describe it again",
    ),
    "changes": (
        """
CREATE TABLE changes (
    id bigserial PRIMARY KEY, seq bigint NOT NULL, source_database_id uuid NOT NULL,
    source_table_oid bigint NOT NULL, source_table_schema text NOT NULL, source_table_name text NOT NULL,
    record_pk text NOT NULL, record jsonb NOT NULL, changes jsonb, action text NOT NULL,
    committed_at timestamptz NOT NULL, inserted_at timestamptz NOT NULL DEFAULT now())""",
        "the table of Sequin, with changes of other tables, which it retains: describe the table that your",
    ),
    "event_publication": (
        f"{SPRING_2.ddl}; {SPRING_2.rows}; UPDATE event_publication SET "
        "listener_id = 'shop.Stock.on(Placed)' WHERE status = 'COMPLETED'",
        "with one row of an event for each listener_id (o.s.m.EventExternalizer.externalize(java.lang.Object)"
        ", shop.Stock.on(Placed)), and a relay would publish and complete all: move those of one, see",
    ),
}
