"""The fields of the settings: of each the name, the type, the default, and what the documentation says.

Invariants:
- A setting is named ``OUTBOX_<FIELD>``. What holds a password or a token is a `Secret`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from outbox_pipelines.config import types
from outbox_pipelines.config.rules import Rule, Rules, check_format, check_formats, check_names
from outbox_pipelines.config.thresholds import check_order
from outbox_pipelines.core.secret import Secret


class Outbox(BaseModel):
    """The outbox and its servers."""

    name: types.OutboxName = Field(
        default="outbox",
        description="Name of the outbox in Dagster, metrics, logs and alerts: lower case, digits, `_`.",
    )
    dsn: types.Dsn = Field(default=Secret(), description="The database: a connection string or URL of libpq.")
    kafka: types.Brokers = Field(default="", description="Bootstrap servers: `host:port,host:port`.")
    kafka_config: types.KafkaConfig = Field(
        default={},
        description="Settings of librdkafka; in the file the section `[kafka]`. Those that would break a "
        "guarantee are refused.",
    )
    # Not `schema`: that name belongs to pydantic.
    db_schema: types.SchemaName = Field(
        default="public", alias="OUTBOX_SCHEMA", description="Schema of the outbox tables."
    )
    table: types.ExistingTable = Field(
        default={},
        description="An [existing outbox table](existing-tables.md); in the file the section `[table]`.",
    )
    connect_url: types.ConnectUrls = Field(
        default=Secret(),
        description="Workers `http://host:8083` of a Kafka Connect cluster with "
        "[Debezium](debezium-on-connect.md), separated by commas.",
    )
    connector: types.ConnectorName = Field(
        default="", description="Debezium's connector for this outbox there. If not set: the outbox's name."
    )


class Topics(BaseModel):
    """Topics."""

    topic: types.Topic = Field(
        default="{aggregate_type}-events",
        description="Topic template of `{aggregate_type}` and `{event_type}`, each also with `:lower` "
        "(`domain-events.{aggregate_type:lower}`).",
    )
    event_types: Rules = Field(
        default={},
        description="What [single event types](messages.md#types-with-rules-of-their-own) have of their own: "
        "a topic (`order.paid=payments`), or more, as sections `[event_types.NAME]` of the file.",
    )
    aggregate_types: Rules = Field(
        default={},
        description="The same of aggregate types: `[aggregate_types.NAME]`. An event type's rule wins.",
    )
    create_topics: bool = Field(default=False, description="The relay creates missing topics.")
    create_topics_pattern: types.TopicPatterns = Field(
        default="",
        description="Topics that the relay may create, as shell patterns separated by spaces "
        "(`shop-*-events billing-*`). If not set: those that the settings name.",
    )
    create_topics_max: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=50,
        description="The relay creates a topic only while fewer topics of the cluster match the pattern.",
    )
    topic_partitions: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=8,
        description="Partitions of a topic that the relay creates. Before you add some later, see "
        "[order](guarantees.md#g2-order).",
    )
    topic_replication: types.Replicas = Field(
        default=-1, description="Replicas of a topic that the relay creates; -1 is the default of the broker."
    )

    @field_validator("event_types", "aggregate_types")
    @classmethod
    def _names_differ(cls, value: dict[str, Rule], info: ValidationInfo) -> dict[str, Rule]:
        # `Messages` is validated before, and event types are before aggregate types: each pair is seen.
        others = info.data.get("event_types", {}) if info.field_name == "aggregate_types" else {}
        check_names(value, others, info.data)
        check_formats(value, others, info.data)
        return value


class Messages(BaseModel):
    """Messages."""

    value_format: types.ValueFormat = Field(
        default="payload", description="Shape of a message's value: see [Messages](messages.md#value)."
    )
    header_names: types.HeaderNames = Field(
        default={},
        description="Other names of headers: `id=event-id,version=,aggregate-id=aggregate-id` renames the "
        "first, omits the second, and adds the third, which otherwise is only the key.",
    )
    flat_members: types.FlatMembers = Field(
        default={},
        description="Other names of the members that `flat` adds: "
        "`event_type=type,idempotency_key=,event_id=id` renames the first, omits the second, and adds the "
        "third. Also `aggregate_type` and `aggregate_id`.",
    )
    tombstones: bool = Field(
        default=False,
        description="An event whose payload is `null` has no value in Kafka: a compacted topic deletes its "
        "key.",
    )
    cloudevents_source: types.UriReference = Field(
        default="/outbox", description="The attribute `source` of CloudEvents, a URI reference."
    )
    # Not looked into here: a mistake in a text about events must not stop those who publish them.
    catalog_file: types.HomePath | None = Field(
        default=None, description="The [event catalog](catalog.md), a YAML file."
    )
    format: types.Format = Field(
        default="json",
        description="All but `json` frame values, in JSON, [Avro](catalog.md#avro) or "
        "[Protobuf](catalog.md#protobuf), with the id of their schema in a [schema registry]"
        "(catalog.md#the-schema-registry).",
    )

    @field_validator("format")
    @classmethod
    def _can_be_written(cls, value: str, info: ValidationInfo) -> str:
        check_format({**info.data, "format": value})
        return value


class Registry(BaseModel):
    """The schema registry."""

    registry_url: types.RegistryUrls = Field(
        default="",
        description="Address of a [schema registry](catalog.md#the-schema-registry) with Confluent's API; "
        "several of one registry, separated by commas.",
    )
    registry_user_info: types.RegistryUserInfo = Field(
        default=Secret(), description="Its `user:password` (HTTP basic authentication)."
    )
    registry_token: types.SecretToken = Field(default=Secret(), description="Its bearer token.")
    registry_ca: types.HomePath | None = Field(
        default=None,
        description="Certificates (PEM) that verify its certificate. If not set: those of `SSL_CERT_FILE`, "
        "or certifi's.",
    )
    registry_certificate: types.HomePath | None = Field(
        default=None, description="Client certificate (PEM), for a registry that requires one."
    )
    registry_key: types.HomePath | None = Field(
        default=None,
        description="Its private key (PEM), not encrypted. If not set: in the file of the certificate.",
    )
    registry_subjects: Literal["topic_record", "topic", "record"] = Field(
        default="topic_record",
        description="Subject of a type: `<topic>-<event type>`, `<topic>-value` or `<event type>`.",
    )
    registry_compatibility: types.Compatibility = Field(
        default="BACKWARD",
        description="What `outbox catalog register` sets for a subject that has no level of its own.",
    )
    registry_framing: Literal["value", "header"] = Field(
        default="value",
        description="Where the id is: in 5 bytes before the value, or in the header `__value_schema_id`.",
    )

    @field_validator("registry_token")
    @classmethod
    def _is_alone(cls, value: Secret, info: ValidationInfo) -> Secret:
        if value and info.data.get("registry_user_info"):
            raise ValueError("is set beside OUTBOX_REGISTRY_USER_INFO: remove one of them")
        return value

    @field_validator("registry_key")
    @classmethod
    def _has_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("registry_certificate") is None:
            raise ValueError("is set without OUTBOX_REGISTRY_CERTIFICATE: set that, too")
        return value


class Lease(BaseModel):
    """Of the relay's fields the one that all sessions share: how long they wait for an answer."""

    lease_seconds: Annotated[float, Field(ge=1.0, le=300.0)] = Field(
        default=5.0, description="If a relay sends no heartbeat for this long, it loses its shard."
    )


class Relay(Lease):
    """The relay."""

    delivery: Literal["at_least_once", "exactly_once"] = Field(
        default="at_least_once",
        description="`exactly_once` publishes in Kafka transactions, for `read_committed` consumers.",
    )
    transaction_seconds: Annotated[float, Field(ge=1.0, le=86_400.0)] = Field(
        default=10.0,
        description="With `exactly_once`: how long the broker keeps a crashed relay's transaction.",
    )
    batch_events: Annotated[int, Field(ge=1, le=20_000)] = Field(
        default=5000, description="Maximum events of a batch."
    )
    batch_bytes: Annotated[int, Field(ge=1_000, le=1_000_000_000)] = Field(
        default=8_000_000, description="Maximum payload bytes of a batch. A single event may exceed it."
    )
    breaker_seconds: Annotated[float, Field(ge=0.5, le=86_400.0)] = Field(
        default=5.0,
        description="If Kafka acknowledges nothing for this long, the relay treats it as unavailable.",
    )
    max_attempts: types.Attempts = Field(
        default=5, description="Rejections after which an event becomes a dead letter."
    )
    retry_seconds: types.RetrySeconds = Field(
        default=10.0,
        description="Pause after the first rejection of an event. It doubles each time, up to 300 s.",
    )
    on_dead_letter: types.AfterDeadLetter = Field(
        default="continue",
        description="An aggregate continues after its dead letter, or stays blocked until it is published "
        "or discarded.",
    )
    dead_letter_topics: bool = Field(
        default=False, description="Dead letters are also copied to `<topic>.dlq`."
    )
    dead_letter_command: types.SecretCommand = Field(
        default=Secret(),
        description="Command that runs for each dead letter, with a JSON object on its standard input: at "
        "most four at a time, at most 30 s each, at least once. It gets only `PATH`, `HOME`, `TZ`, the "
        "locale and similar variables.",
    )


class Telemetry(BaseModel):
    """Metrics, logs and traces."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None, description="Port of Prometheus metrics of `outbox relay`; 0 is any free port."
    )
    metrics_address: str = Field(
        default="127.0.0.1",
        description="Address of the metrics port. `0.0.0.0` opens it to other machines, without a password.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], types.ANY_CASE] = Field(
        default="warning",
        description="Lowest level that the command `outbox` logs; `debug` logs a line for each event. In "
        "Dagster, its own settings apply.",
    )
    log_format: Annotated[Literal["text", "json"], types.ANY_CASE] = Field(
        default="text", description="`json` logs an [object](metrics.md#logs) a line."
    )
    tracing: bool = Field(
        default=False, description="Events with a sampled `traceparent` get a [span](metrics.md#traces)."
    )


class Days(BaseModel):
    """Days and the archive."""

    partitions_ahead: Annotated[int, Field(ge=8, le=400)] = Field(
        default=14, description="Future days that have a partition."
    )
    close_after_minutes: Annotated[float, Field(ge=0.0, le=1_000_000.0)] = Field(
        default=60.0, description="How long after its end a day still accepts inserts."
    )
    archive: types.StorePlace = Field(
        default="",
        description="Where closed days are archived: a directory, `s3://bucket/path`, `gs://…` or "
        "`az://…`. With `none`, days are dropped [without an archive](days.md#dropping).",
    )
    archive_readers: types.Readers = Field(
        default="owner",
        description="Who may read archive files in a directory: `owner` (mode 0600), `group` (0640), "
        "`everyone` (0644).",
    )
    iceberg: types.IcebergCatalog = Field(
        default=Secret(),
        description="Catalog of the [Iceberg table](days.md#an-iceberg-table): a PostgreSQL database, or the "
        "name of a catalog in pyiceberg's configuration.",
    )
    retention_days: Annotated[int, Field(ge=0, le=36_500)] = Field(
        default=30, description="Days that stay in the table; with 0, a day stays until it is archived."
    )
    # Not looked into here: a mistake in it must not stop those who publish, or read the archive.
    archive_retention_days: types.ArchiveRetention = Field(
        default={},
        description="Days after which archived events are [removed](retention.md#let-events-expire), by "
        "aggregate type; `*` is for all others: `order=2557,*=3653`. Without an entry, events stay.",
    )
    bodies: types.StorePlace = Field(
        default="",
        description="Store of [large payloads](writing-events.md#large-payloads), for [`outbox bodies`]"
        "(days.md#bodies-of-large-payloads).",
    )
    idempotency_key_retention_days: int = Field(
        default=30, ge=1, le=36_500, description="Days for which an idempotency key is remembered."
    )
    clean_after_hours: Annotated[float, Field(ge=0.0, le=1_000_000.0)] | None = Field(
        default=None,
        description="Existing table: hours after which published rows are archived and "
        "[removed](existing-tables.md#clean-up).",
    )
    months_ahead: Annotated[int, Field(ge=1, le=120)] | None = Field(
        default=None,
        description="Existing table partitioned by month: future months [made](existing-tables.md#clean-up).",
    )
    expectations: types.HomePath | None = Field(
        default=None,
        description="Directory of a Great Expectations project for [archived days](days.md#data-quality).",
    )


class Checks(BaseModel):
    """Checks and alerts."""

    error_at: types.Limits = Field(
        default={},
        description="Limits of [checks](operating.md#the-checks) for an error, which sends an "
        "alert, as `lag=120,kafka=off`.",
    )
    warn_at: types.Limits = Field(
        default={}, description="Limits of checks for a warning, as `lag=30,backlog=off`."
    )
    alerts: types.AlertAddresses = Field(
        default=Secret(),
        description="Addresses that are notified when a check fails and recovers, of "
        "[apprise](https://appriseit.com/services/), separated by spaces.",
    )
    alert_after_seconds: Annotated[float, Field(ge=0.0, le=1_000_000.0)] = Field(
        default=30.0, description="How long a problem must last, or be gone, before the notification."
    )
    ui_url: types.Link = Field(default="", description="Address of Dagster's pages, for links in messages.")
    runbook_url: types.Link = Field(
        default="",
        description="Address of the page [Operating](operating.md), for links. If not set, failing checks in "
        "Dagster contain the chapter.",
    )

    # After the other one's field, whose value it has.
    @field_validator("warn_at")
    @classmethod
    def _is_before_the_error(cls, value: dict[str, float | str], info: ValidationInfo) -> object:
        if "error_at" in info.data:
            check_order(value, info.data["error_at"])
        return value


class Consumer(BaseModel):
    """Consumers."""

    consumers: types.Consumers = Field(
        default={},
        description="Consumers that [`outbox reconcile`](reconciliation.md#name-your-consumers) compares; in "
        "the file sections `[consumers.NAME]`.",
    )
    consumer_dsn: types.Dsn = Field(
        default=Secret(), description="A consumer's database, for `outbox consumer …`."
    )
    consumer_schema: str = Field(
        default="public", description="Schema of a consumer's tables, for `outbox consumer …`."
    )
    drain_consumers: types.DrainConsumers = Field(
        default="",
        description="Consumers whose inboxes Dagster [drains]"
        "(consuming-tuning.md#slow-handlers-receive-then-process), as `module:name` separated by spaces.",
    )


class Erasure(BaseModel):
    """Erasure by subject."""

    keys_dsn: types.Dsn = Field(
        default=Secret(),
        description="Database of the [keys of data subjects](erasure.md), apart from the outbox.",
    )
    master_key: types.MasterKeyText = Field(
        default=Secret(),
        description="Master key that wraps these keys: base64 of 32 bytes, or a service's `module:name`; "
        "former ones behind it, separated by spaces.",
    )
    master_key_file: types.HomePath | None = Field(
        default=None, description="Instead of OUTBOX_MASTER_KEY, a file that contains it."
    )


class Dagster(BaseModel):
    """Dagster."""

    session_seconds: Annotated[float, Field(ge=1.0, le=1_000_000.0)] = Field(
        default=600.0, description="Length of a relay session in Dagster."
    )
    run_retention_days: Annotated[int, Field(ge=1, le=36_500)] = Field(
        default=14,
        description="Days for which Dagster keeps relay sessions and other runs that recur all day. Runs "
        "of days stay.",
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
        default=None, description="Directory of PostgreSQL's programs. If not set: the Python package's."
    )
    local_grace_seconds: Annotated[float, Field(ge=0.0, le=1_000_000.0)] = Field(
        default=60.0, description="The local stack stops when it was not used for this long."
    )
