"""Every setting of the pipelines, in one place.

Invariants:
- A setting is named ``OUTBOX_<FIELD>``, in the environment or in the file that ``OUTBOX_SETTINGS`` names
  (lines ``NAME=value``); the environment wins.
- Values are checked here, once; a wrong one is a `SetupError` that names the setting and the remedy.
- What holds a password or a token is a `Secret`. No other setting may: credentials in one are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outbox_pipelines.errors import SetupError
from outbox_pipelines.secret import Secret, check_dsn, register, register_dsn, register_variables

# What RFC 3986 allows in one, without its grammar.
_URI_REFERENCE = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+\Z")


# Characters of topic names, and those of shell patterns.
_TOPIC_PATTERN = re.compile(r"[A-Za-z0-9._*?\[\]!-]+\Z")
SECRET: Final = frozenset({"dsn", "alerts", "dead_letter_command"})
_CREDENTIALS: Final = re.compile(r"(?i)[?&](?:sig|[\w-]*(?:key|secret|token|password))=")
Readers = Literal["owner", "group", "everyone"]


class Settings(BaseSettings):
    """What the commands, the relay and Dagster's definitions are told from outside."""

    model_config = SettingsConfigDict(
        env_prefix="OUTBOX_", frozen=True, extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    dsn: Secret = Field(default=Secret(), description="libpq connection string or URL of the database")
    kafka: str = Field(default="", description="bootstrap servers, host:port, separated by commas")
    kafka_config: Path | None = Field(
        default=None, description="file of librdkafka settings (name=value), for TLS and SASL"
    )
    # Not `schema`: that name belongs to pydantic.
    db_schema: str = Field(default="public", alias="OUTBOX_SCHEMA", description="schema of the outbox tables")
    table: Path | None = Field(
        default=None,
        description="TOML file that describes an existing outbox table, to be relayed as it is",
    )
    topic: str = Field(
        default="{aggregate_type}-events",
        description="topic template; may use {aggregate_type} and {event_type}, each also with :lower",
    )
    topic_map: Path | None = Field(
        default=None, description="file of lines event_type=topic, for event types with a topic of their own"
    )
    create_topics: bool = Field(
        default=False, description="whether the relay creates topics that are missing"
    )
    create_topics_pattern: str = Field(
        default="",
        description="names of topics that the relay may create, as shell patterns separated by spaces; "
        "default: those that OUTBOX_TOPIC and OUTBOX_TOPIC_MAP make",
    )
    create_topics_max: int = Field(
        default=50, ge=1, description="the relay creates a topic only while fewer match the pattern"
    )
    topic_partitions: int = Field(default=8, ge=1, description="partitions of a topic that the relay creates")
    topic_replication: int = Field(
        default=-1, ge=-1, description="replicas of a topic that the relay creates; -1: the broker's default"
    )
    value: Literal["payload", "flat", "envelope", "cloudevents"] = Field(
        default="payload", description="shape of a message's value"
    )
    header_names: str = Field(
        default="", description="other names of headers, as id=event-id,aggregate-type= (empty: left out)"
    )
    tombstones: bool = Field(
        default=False, description="an event whose payload is null is published without a value"
    )
    cloudevents_source: str = Field(
        default="/outbox", description="the attribute `source` of CloudEvents, a URI reference"
    )
    piece_events: int = Field(default=5000, ge=1, le=20_000, description="most events read at once")
    piece_bytes: int = Field(
        default=8_000_000, ge=1_000, description="most payload bytes read at once (one event may exceed it)"
    )
    lease_seconds: float = Field(
        default=5.0, ge=1.0, le=300.0, description="a relay silent for so long loses its shard"
    )
    delivery: Literal["at_least_once", "exactly_once"] = Field(
        default="at_least_once", description="exactly_once: Kafka transactions, for read_committed consumers"
    )
    transaction_seconds: float = Field(
        default=10.0, ge=1.0, description="how long the broker keeps the transaction of a relay that died"
    )
    breaker_seconds: float = Field(
        default=5.0, ge=0.5, description="Kafka is away when it acknowledges nothing for so long"
    )
    max_attempts: int = Field(
        default=5, ge=1, description="refusals of one event until it is a dead letter; outages do not count"
    )
    retry_seconds: float = Field(
        default=10.0, gt=0.0, description="pause after the first refusal; doubles with each, up to 300 s"
    )
    on_dead_letter: Literal["continue", "block"] = Field(
        default="continue", description="whether an aggregate goes on past its dead letter"
    )
    dead_letter_topics: bool = Field(
        default=False, description="whether dead letters are also copied to <topic>.dlq"
    )
    dead_letter_command: Secret = Field(
        default=Secret(),
        description="command run for each dead letter, with a JSON object on its standard input",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="where `outbox relay` serves Prometheus metrics; 0: any free port",
    )
    metrics_address: str = Field(
        default="127.0.0.1", description="address of that port; metrics are open to whoever reaches it"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning",
        description="least level of what the commands log on stderr; debug has a line for each event",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="lines for people, or one JSON object a line"
    )
    tracing: bool = Field(
        default=False,
        description="whether events that carry a sampled trace get a span; OTEL_… variables say where to",
    )
    partitions_ahead: int = Field(
        default=14, ge=8, le=400, description="days ahead that have a partition; fewer than 7 are an alarm"
    )
    close_after_minutes: float = Field(
        default=60.0, ge=0.0, description="how long after its end a day takes no more inserts"
    )
    archive: str = Field(
        default="",
        description="where closed days go: a directory, or a URL (s3://bucket/path, gs://, az://); "
        "none: days are dropped without an archive",
    )
    archive_readers: Readers = Field(
        default="owner", description="who may read the files of an archive in a directory"
    )
    retention_days: int = Field(
        default=30, ge=0, description="days that stay in the table; 0: until a day is closed and proven"
    )
    # Not looked into here: a mistake in a text about events must not stop those who publish them.
    catalog: Path | None = Field(
        default=None, description="YAML file that documents the event types, for `outbox catalog`"
    )
    consumers: Path | None = Field(
        default=None, description="TOML file of the consumers whose records `outbox reconcile` compares"
    )
    keys_days: int = Field(default=30, ge=1, description="how long an idempotency key is remembered, in days")
    warn_at: str = Field(
        default="", description="limits of checks for a warning, instead of the defaults: lag=30,backlog=off"
    )
    error_at: str = Field(
        default="",
        description="limits of checks for an error, which is an alert: lag=120,keys=off",
    )
    alerts: Secret = Field(
        default=Secret(),
        description="who is told when a check fails: addresses of apprise, separated by spaces",
    )
    alert_after_seconds: float = Field(
        default=30.0, ge=0.0, description="how long a problem lasts, or is gone, until it is told"
    )
    ui_url: str = Field(default="", description="address of Dagster's pages, for links in messages")
    runbook_url: str = Field(
        default="",
        description="address of docs/operating.md, for links in messages and checks",
    )
    drain: str = Field(
        default="",
        description="consumers whose inboxes Dagster drains: module:name, separated by spaces",
    )
    session_seconds: float = Field(
        default=600.0, ge=1.0, description="length of a relay session in Dagster before it hands over"
    )
    history_days: int = Field(
        default=14, ge=1, description="how long Dagster remembers runs and verdicts that are over, in days"
    )

    local_dir: Path = Field(
        default=Path("~/.cache/outbox-pipelines/local"), description="data and logs of the local stack"
    )
    local_jars: Path = Field(
        default=Path("~/.cache/outbox-pipelines/jars"), description="Kafka's jars, shared by all local stacks"
    )
    local_postgres: Path | None = Field(
        default=None, description="directory of PostgreSQL binaries (with initdb) for the local stack"
    )
    local_grace_seconds: float = Field(
        default=60.0, ge=0.0, description="the local stack stops when nobody used it for so long"
    )

    @field_validator("dsn")
    @classmethod
    def _dsn_is_understood(cls, value: Secret) -> Secret:
        if value:
            register_dsn(value.reveal())
            check_dsn(value.reveal())
        return value

    @field_validator("alerts")
    @classmethod
    def _addresses_are_known_as_secrets(cls, value: Secret) -> Secret:
        for address in value.reveal().split():
            register(address, *re.split(r"[/:@?&=]+", address.partition("://")[2] or address))
        return value

    @field_validator("dead_letter_command")
    @classmethod
    def _command_is_known_as_a_secret(cls, value: Secret) -> Secret:
        register(value.reveal())
        return value

    @field_validator("kafka")
    @classmethod
    def _brokers_have_no_credentials(cls, value: str) -> str:
        if "@" in value or "://" in value:
            raise ValueError(
                "write host:port, separated by commas; user and password belong in the file of "
                "OUTBOX_KAFKA_CONFIG"
            )
        return value

    @field_validator("topic")
    @classmethod
    def _topic_is_a_template(cls, value: str) -> str:
        from outbox_pipelines.relay.routing import TopicTemplate

        TopicTemplate(value)
        return value

    @field_validator("topic_map")
    @classmethod
    def _topic_map_is_a_map(cls, value: Path | None) -> Path | None:
        from outbox_pipelines.relay.routing import read_map

        if value is not None:
            read_map(value)
        return value

    @field_validator("create_topics_pattern")
    @classmethod
    def _patterns_can_match(cls, value: str) -> str:
        for pattern in value.split():
            if not _TOPIC_PATTERN.match(pattern):
                raise ValueError(
                    f"{pattern!r} matches no topic: write names with * and ?, separated by spaces"
                )
        return value

    @field_validator("table")
    @classmethod
    def _table_is_described(cls, value: Path | None) -> Path | None:
        from outbox_pipelines.relay.claims.mapping import read_mapping

        if value is not None:
            read_mapping(value)
        return value

    @field_validator("consumers")
    @classmethod
    def _consumers_are_named(cls, value: Path | None) -> Path | None:
        from outbox_pipelines.reconciliation.consumers import read_consumers

        if value is not None:
            read_consumers(value)
        return value

    @field_validator("topic_replication")
    @classmethod
    def _replication_is_a_number_of_copies(cls, value: int) -> int:
        if value == 0:
            raise ValueError("write the number of replicas, or -1 for the broker's default")
        return value

    @field_validator("archive")
    @classmethod
    def _archive_is_a_place(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if separator and (_CREDENTIALS.search(rest) or (scheme != "file" and "@" in rest.partition("/")[0])):
            raise ValueError(
                "has credentials in it: remove them, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or "
                "what gs:// and az:// take), or let the machine have an identity"
            )
        if separator and scheme not in ("file", "s3", "gs", "az"):
            raise ValueError("write a directory, or s3://bucket/path, gs://bucket/path, az://container/path")
        return value

    @field_validator("header_names")
    @classmethod
    def _header_names_can_be(cls, value: str) -> str:
        from outbox_pipelines.relay.encoding import header_names

        header_names(value)
        return value

    @field_validator("ui_url", "runbook_url")
    @classmethod
    def _links_are_addresses(cls, value: str) -> str:
        if value and (not value.startswith(("http://", "https://")) or "@" in value):
            raise ValueError(
                "write the address as a browser takes it, without user and password, such as "
                "https://dagster.example.com"
            )
        return value

    @field_validator("warn_at", "error_at")
    @classmethod
    def _limits_can_be_read(cls, value: str) -> str:
        from outbox_pipelines.quality.rules import read_limits

        if value:
            read_limits(value)
        return value

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _case_does_not_matter(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("cloudevents_source")
    @classmethod
    def _source_is_a_uri_reference(cls, value: str) -> str:
        if not _URI_REFERENCE.match(value):
            raise ValueError("not a URI reference: write for example /shop or https://example.com/shop")
        return value

    @property
    def archives(self) -> bool:
        """Whether closed days are archived at all."""
        return self.archive not in ("", "none")

    def require_dsn(self) -> str:
        """The database's connection string; `SetupError` where none was given."""
        if not self.dsn:
            raise SetupError(
                "no database is named: set OUTBOX_DSN, for example postgresql://user@host/db, "
                "or start a local one with `outbox local run -- COMMAND`"
            )
        return self.dsn.reveal()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Settings:
        """The same with other values, which are not checked; secrets stay secrets."""
        given = dict(update or {})
        for name in SECRET & given.keys():
            given[name] = Secret(given[name])
            register(given[name].reveal())
        if "dsn" in given:
            register_dsn(given["dsn"].reveal())
        return super().model_copy(update=given, deep=deep)

    def require_kafka(self) -> str:
        """The bootstrap servers; `SetupError` where none were given."""
        if not self.kafka:
            raise SetupError(
                "no Kafka is named: set OUTBOX_KAFKA, for example broker:9092, "
                "or start a local one with `outbox local run -- COMMAND`"
            )
        return self.kafka


def load_settings(**overrides: Any) -> Settings:
    """The settings from the environment and the file of ``OUTBOX_SETTINGS``; overrides by field name win.

    Raises:
        SetupError: a value does not fit; the message names the setting.
    """
    register_variables()
    path = os.environ.get("OUTBOX_SETTINGS")
    if path and not Path(path).is_file():
        raise SetupError(f"OUTBOX_SETTINGS names {path}, which is not a file: correct the path or unset it")
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(_env_file=path, **given)
    except ValidationError as error:
        raise SetupError("; ".join(_one_line(problem) for problem in error.errors())) from None


def _one_line(problem: Any) -> str:
    field = str(problem["loc"][0]) if problem["loc"] else "settings"
    name = field if field.startswith("OUTBOX_") else f"OUTBOX_{field.upper()}"
    # A secret that stands in the wrong place of one of these is not shown either.
    is_shown = name.removeprefix("OUTBOX_").lower() not in {
        *SECRET,
        "archive",
        "kafka",
        "ui_url",
        "runbook_url",
    }
    value = f"={problem['input']}:" if is_shown else ""
    return f"{name}{value} {problem['msg'].removeprefix('Value error, ')}"
