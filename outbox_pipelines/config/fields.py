"""The fields of the settings: of each the name, the type, the default, and what the documentation says.

Invariants:
- A setting is named ``OUTBOX_<FIELD>``. What holds a password or a token is a `Secret`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field

from outbox_pipelines.config.types import (
    ANY_CASE,
    AlertAddresses,
    ArchivePlace,
    Brokers,
    ConnectorName,
    ConnectUrls,
    Consumers,
    DrainConsumers,
    Dsn,
    ExistingTable,
    FlatMembers,
    HeaderNames,
    KafkaConfig,
    Limits,
    Link,
    OutboxName,
    Replicas,
    SchemaName,
    SecretCommand,
    Topic,
    TopicMap,
    TopicPatterns,
    UriReference,
)
from outbox_pipelines.core.secret import Secret

Readers = Literal["owner", "group", "everyone"]


class Outbox(BaseModel):
    """The outbox and its servers."""

    name: OutboxName = Field(
        default="outbox",
        description="Name of the outbox in Dagster, metrics, logs and alerts: lower-case letters, digits and "
        "`_`.",
    )
    dsn: Dsn = Field(
        default=Secret(), description="Connection string or URL of the database, in the format of libpq."
    )
    kafka: Brokers = Field(default="", description="Bootstrap servers as `host:port`, separated by commas.")
    kafka_config: KafkaConfig = Field(
        default={},
        description="Settings of librdkafka (`security.protocol=SASL_SSL`); in the file the section "
        "`[kafka]`. The relay refuses those that would break a guarantee.",
    )
    # Not `schema`: that name belongs to pydantic.
    db_schema: SchemaName = Field(
        default="public", alias="OUTBOX_SCHEMA", description="Schema of the outbox tables."
    )
    table: ExistingTable = Field(
        default={},
        description="An [existing outbox table](existing-tables.md), which the relay publishes as it is; in "
        "the file the section `[table]`.",
    )
    connect: ConnectUrls = Field(
        default=Secret(),
        description="Address of a Kafka Connect cluster, as `http://host:8083`, of several workers separated "
        "by commas: for [Debezium on Kafka Connect](debezium-on-connect.md).",
    )
    connector: ConnectorName = Field(
        default="",
        description="Name of Debezium's connector for this outbox in the Kafka Connect cluster. If not set: "
        "the outbox's name.",
    )


class Topics(BaseModel):
    """Topics."""

    topic: Topic = Field(
        default="{aggregate_type}-events",
        description="Topic template. It may contain `{aggregate_type}` and `{event_type}`, each also with "
        "`:lower` (`domain-events.{aggregate_type:lower}`).",
    )
    topic_map: TopicMap = Field(
        default={},
        description="Topics of event types that have one of their own (`order.paid=payments`); a topic may "
        "be a template. All other types use `OUTBOX_TOPIC`.",
    )
    create_topics: bool = Field(
        default=False,
        description="Whether the relay creates missing topics. If not, each topic must exist or be created "
        "by the broker.",
    )
    create_topics_pattern: TopicPatterns = Field(
        default="",
        description="Names of topics that the relay may create, as shell patterns separated by spaces "
        "(`shop-*-events billing-*`). If not set: the names that `OUTBOX_TOPIC` and "
        "`OUTBOX_TOPIC_MAP` produce.",
    )
    create_topics_max: int = Field(
        default=50,
        ge=1,
        le=1_000_000,
        description="The relay creates a topic only while fewer topics of the cluster match the pattern.",
    )
    topic_partitions: int = Field(
        default=8,
        ge=1,
        le=1_000_000,
        description="Partitions of a topic that the relay creates. Partitions that are added later move "
        "keys: the order of an aggregate then holds before and after the change, not across it "
        "(the relay logs this).",
    )
    topic_replication: Replicas = Field(
        default=-1,
        ge=-1,
        le=32_767,
        description="Replicas of a topic that the relay creates; -1 is the default of the broker.",
    )


class Messages(BaseModel):
    """Messages."""

    value_format: Literal["payload", "flat", "envelope", "cloudevents"] = Field(
        default="payload", description="Shape of a message's value: see [Messages](messages.md#value)."
    )
    header_names: HeaderNames = Field(
        default={},
        description="Other names of headers, as `id=event-id,version=,aggregate-id=aggregate-id`: the first "
        "is renamed, the second is omitted, and the third adds a header that otherwise is only "
        "the key.",
    )
    flat_members: FlatMembers = Field(
        default={},
        description="Other names of the members that `flat` adds, as "
        "`event_type=type,idempotency_key=,event_id=id`: the first is renamed, the second is omitted, and "
        "the third is added. Also `aggregate_type` and `aggregate_id`.",
    )
    tombstones: bool = Field(
        default=False,
        description="Whether an event whose payload is `null` is published without a value, so that a "
        "compacted topic deletes its key.",
    )
    cloudevents_source: UriReference = Field(
        default="/outbox", description="The attribute `source` of CloudEvents, a URI reference."
    )
    # Not looked into here: a mistake in a text about events must not stop those who publish them.
    catalog_file: Path | None = Field(
        default=None, description="YAML file that documents the event types: see [the catalog](catalog.md)."
    )


class Lease(BaseModel):
    """Of the relay's fields the one that all sessions share: how long they wait for an answer."""

    lease_seconds: float = Field(
        default=5.0,
        ge=1.0,
        le=300.0,
        description="If a relay sends no heartbeat for this long, it loses its shard.",
    )


class Relay(Lease):
    """The relay."""

    delivery: Literal["at_least_once", "exactly_once"] = Field(
        default="at_least_once",
        description="`exactly_once` publishes in Kafka transactions, for consumers with "
        "`isolation.level=read_committed`.",
    )
    transaction_seconds: float = Field(
        default=10.0,
        ge=1.0,
        le=86_400.0,
        description="With `exactly_once`: how long the broker keeps the transaction of a relay that crashed.",
    )
    batch_events: int = Field(
        default=5000,
        ge=1,
        le=20_000,
        description="Maximum number of events that are read together as a batch.",
    )
    batch_bytes: int = Field(
        default=8_000_000,
        ge=1_000,
        le=1_000_000_000,
        description="Maximum payload bytes of a batch. A single event may exceed it.",
    )
    breaker_seconds: float = Field(
        default=5.0,
        ge=0.5,
        le=86_400.0,
        description="If Kafka acknowledges nothing for this long, the relay treats it as unavailable.",
    )

    max_attempts: int = Field(
        default=5,
        ge=1,
        le=1_000_000,
        description="Number of rejections after which an event becomes a dead letter. Outages do not count.",
    )
    retry_seconds: float = Field(
        default=10.0,
        gt=0.0,
        le=86_400.0,
        description="Pause after the first rejection of an event. It doubles with each rejection, up to 300 "
        "s.",
    )
    on_dead_letter: Literal["continue", "block"] = Field(
        default="continue",
        description="Whether an aggregate continues after its dead letter, or stays blocked until the dead "
        "letter is published or discarded.",
    )
    dead_letter_topics: bool = Field(
        default=False, description="Whether dead letters are also copied to `<topic>.dlq`."
    )
    dead_letter_command: SecretCommand = Field(
        default=Secret(),
        description="Command that runs for each dead letter, with a JSON object on its standard input: at "
        "most four at a time, at most 30 s each, at least once (again if the relay crashes "
        "while it runs). Of the relay's environment it gets only `PATH`, `HOME`, `TZ`, the "
        "locale and similar variables: no settings and no secrets.",
    )


class Telemetry(BaseModel):
    """Metrics, logs and traces."""

    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port on which `outbox relay` serves Prometheus metrics, like `--metrics-port`; 0 is "
        "any free port.",
    )
    metrics_address: str = Field(
        default="127.0.0.1",
        description="Address of the metrics port. `0.0.0.0` opens it to other machines, without a password.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], ANY_CASE] = Field(
        default="warning",
        description="Lowest level that the command `outbox` logs on standard error; `debug` logs a line for "
        "each event. In Dagster, the settings of Dagster apply.",
    )
    log_format: Annotated[Literal["text", "json"], ANY_CASE] = Field(
        default="text",
        description="`json` logs an object a line with `time`, `level`, `logger`, `message`, and fields "
        "such as `id` and `shard`. The last line of a command that fails is `outbox: …` with "
        "both values.",
    )
    tracing: bool = Field(
        default=False,
        description="Whether events with a sampled `traceparent` get a span. If not, the header passes "
        "unchanged. The standard variables `OTEL_…` say where spans go: see "
        "[Traces](metrics.md#traces).",
    )


class Days(BaseModel):
    """Days and the archive."""

    partitions_ahead: int = Field(
        default=14,
        ge=8,
        le=400,
        description="Number of days in the future that have a partition. Fewer than 7 raise an alert.",
    )
    close_after_minutes: float = Field(
        default=60.0,
        ge=0.0,
        le=1_000_000.0,
        description="How long after its end a day still accepts inserts.",
    )
    archive: ArchivePlace = Field(
        default="",
        description="Where closed days are archived: a directory, or `s3://bucket/path`, "
        "`gs://bucket/path`, `az://container/path`. With `none`, days are dropped without an "
        "archive.",
    )
    archive_readers: Readers = Field(
        default="owner",
        description="Who may read archive files in a directory: `owner` (modes 0600 and 0700), `group` "
        "(0640 and 0750), `everyone` (0644 and 0755).",
    )
    retention_days: int = Field(
        default=30,
        ge=0,
        le=36_500,
        description="Number of days that stay in the table; with 0, a day stays only until it is closed and "
        "proven.",
    )
    key_retention_days: int = Field(
        default=30, ge=1, le=36_500, description="How long an idempotency key is remembered, in days."
    )
    clean_after_hours: float | None = Field(
        default=None,
        ge=0.0,
        le=1_000_000.0,
        description="For an existing table: hours after which published rows are removed by `outbox table "
        "clean` and Dagster, after they were archived in `OUTBOX_ARCHIVE`. If not set, none are.",
    )
    months_ahead: int | None = Field(
        default=None,
        ge=1,
        le=120,
        description="For an existing table with monthly partitions: number of months after the current one "
        "that `outbox table months` and Dagster make. If not set, none are: the application or pg_partman "
        "does.",
    )
    expectations: Path | None = Field(
        default=None,
        description="Directory of a Great Expectations project, which gets the results of archived days and "
        "may add expectations: see [Data quality](days.md#data-quality).",
    )


class Checks(BaseModel):
    """Checks and alerts."""

    warn_at: Limits = Field(
        default={},
        description="Limits of checks for a warning that differ from [the "
        "defaults](operating.md#the-checks), as `lag=30,backlog=off`.",
    )
    error_at: Limits = Field(
        default={},
        description="Limits of checks for an error, which is an alert, that differ from [the "
        "defaults](operating.md#the-checks), as `lag=120,keys=off`.",
    )
    alerts: AlertAddresses = Field(
        default=Secret(),
        description="Who is notified when a check fails and when it recovers: addresses of "
        "[apprise](https://appriseit.com/services/), separated by spaces.",
    )
    alert_after_seconds: float = Field(
        default=30.0,
        ge=0.0,
        le=1_000_000.0,
        description="How long a problem must last, or be gone, before a notification is sent.",
    )
    ui_url: Link = Field(default="", description="Address of Dagster's pages, for links in messages.")
    runbook_url: Link = Field(
        default="",
        description="Address of the page [Operating](operating.md), for links in messages and checks. If it "
        "is not set, failing checks in Dagster contain the chapter.",
    )


class Consumer(BaseModel):
    """Consumers."""

    consumers: Consumers = Field(
        default={},
        description="Consumers that `outbox reconcile` compares; in the file sections `[consumers.NAME]`: "
        "see [reconciliation](reconciliation.md).",
    )
    consumer_dsn: Dsn = Field(
        default=Secret(),
        description="Connection string or URL of a consumer's database, for `outbox consumer …`.",
    )
    consumer_schema: str = Field(
        default="public", description="Schema of a consumer's tables, for `outbox consumer …`."
    )
    drain_consumers: DrainConsumers = Field(
        default="",
        description="Consumers whose inboxes Dagster drains, as `module:name` separated by spaces "
        "(`billing.events:consumer`): see [Slow "
        "handlers](consuming-tuning.md#slow-handlers-receive-then-process).",
    )


class Dagster(BaseModel):
    """Dagster."""

    session_seconds: float = Field(
        default=600.0,
        ge=1.0,
        le=1_000_000.0,
        description="Length of a relay session in Dagster before it hands over to its successor.",
    )
    run_retention_days: int = Field(
        default=14,
        ge=1,
        le=36_500,
        description="How long Dagster keeps finished relay sessions and other runs that recur all day, in "
        "days. Runs of days, and the newest run of each job, always stay.",
    )


class Local(BaseModel):
    """The local stack."""

    local_dir: Path = Field(
        default=Path("~/.cache/outbox-pipelines/local"), description="Data and logs of the local stack."
    )
    local_jars: Path = Field(
        default=Path("~/.cache/outbox-pipelines/jars"),
        description="Kafka's jars, shared by all local stacks.",
    )
    local_postgres: Path | None = Field(
        default=None,
        description="Directory of PostgreSQL programs (with `initdb`) for the local stack. If not set: "
        "those of the Python package.",
    )
    local_grace_seconds: float = Field(
        default=60.0,
        ge=0.0,
        le=1_000_000.0,
        description="The local stack stops when it has not been used for this long.",
    )


SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "outbox": Outbox,
    "topics": Topics,
    "messages": Messages,
    "relay": Relay,
    "telemetry": Telemetry,
    "days": Days,
    "checks": Checks,
    "consumer": Consumer,
    "dagster": Dagster,
    "local": Local,
}
"""The sections of `outbox.toml`, in the order of its documentation, and their fields."""
WHOLE: Final = {"kafka": "kafka_config", "table": "table", "consumers": "consumers"}
"""Sections that are the value of one field."""
