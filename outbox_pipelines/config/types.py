"""What a setting takes, where its type alone does not say it.

Invariants:
- A value that does not fit is a `ValueError` that says what to write.
- What holds a password or a token is registered, so that no message shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from outbox_pipelines.config.consumers import read_consumers
from outbox_pipelines.config.kafka_config import read_config
from outbox_pipelines.config.master_keys import read_master_keys
from outbox_pipelines.config.message_names import read_headers, read_members
from outbox_pipelines.config.table_mapping import read_mapping
from outbox_pipelines.config.tables import as_table, expanded
from outbox_pipelines.config.thresholds import RETENTION_SCHEMA, read_thresholds
from outbox_pipelines.config.topics import TopicTemplate
from outbox_pipelines.core.secret import (
    Secret,
    check_dsn,
    register,
    register_addresses,
    register_dsn,
    register_urls,
)

_Value = TypeVar("_Value")

OUTBOX_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names of outboxes: what Dagster, Prometheus and file systems all accept."""
ICEBERG_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
"""Names of catalogs in pyiceberg's configuration; a connection string has another character."""
# What RFC 3986 allows in one, without its grammar.
_URI_REFERENCE: Final = re.compile(r"(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+\Z")
# A host, or [an address with colons], and a port; without one, it is Kafka's usual port.
_BROKER: Final = re.compile(r"(?:\[[^\[\]\s]+\]|[^:\[\]\s]+)(?::([0-9]{1,9}))?")
# Characters of topic names, and those of shell patterns.
_TOPIC_PATTERN: Final = re.compile(r"[A-Za-z0-9._*?\[\]!-]+\Z")
_CREDENTIALS: Final = re.compile(r"(?i)[?&](?:sig|[\w-]*(?:key|secret|token|password))=")


def _read_by(parse: Callable[[Any], object]) -> AfterValidator:
    """Return the check that `parse` can read the value; an empty one is not read."""

    def check(value: _Value) -> _Value:
        if value:
            parse(value)
        return value

    return AfterValidator(check)


def _drain_consumers(value: str) -> str:
    if "://" in value:
        raise ValueError("write module:name, such as billing.events:consumer; the consumer has the address")
    return value


def _name(value: str) -> str:
    # It must fit everywhere: in Dagster, metrics, logs.
    if not OUTBOX_NAME.fullmatch(value):
        raise ValueError("write lower-case letters, digits and _, such as orders_eu")
    return value


def _dsn(value: Secret) -> Secret:
    if value:
        register_dsn(value.reveal())
        check_dsn(value.reveal())
    return value


def _connect(value: Secret) -> Secret:
    if value:
        register_urls(value.reveal())
        connect_urls(value.reveal())
    return value


def _connector(value: str) -> str:
    if value != value.strip() or not value.isprintable() or "/" in value:
        raise ValueError("write a name without / and spaces around it, such as outbox-shop")
    return value


def _registry(value: str) -> str:
    if value:
        register_urls(value)
        registry_urls(value)
    return value


def _user_info(value: Secret) -> Secret:
    register(value.reveal(), value.reveal().partition(":")[2])
    if value and not value.reveal().partition(":")[2]:
        raise ValueError("has no password in it: write the user, a colon and the password")
    return value


def _master_keys(value: Secret) -> Secret:
    read_master_keys(value.reveal())
    return value


def _alerts(value: Secret) -> Secret:
    register_addresses(value.reveal())
    return value


def _schema(value: str) -> str:
    if "://" in value:
        raise ValueError("write the name of a schema; the address of the database belongs in OUTBOX_DSN")
    return value


def _command(value: Secret) -> Secret:
    register(value.reveal())
    return value


def _brokers(value: str) -> str:
    if "@" in value or "://" in value or "=" in value:
        raise ValueError(
            "write host:port, separated by commas; user and password belong in OUTBOX_KAFKA_CONFIG, which "
            "is the section [kafka] of outbox.toml"
        )
    for broker in value.split(",") if value else ():
        port = _BROKER.fullmatch(broker.strip())
        if port is None or not 0 < int(port[1] or 1) < 65_536:
            # What follows the colon may be a password.
            host = broker.strip().partition(":")[0]
            raise ValueError(f"{host!r} has no port from 1 to 65535: write host:port, separated by commas")
    return value


def _kafka_config(value: dict[str, Any]) -> dict[str, Any]:
    # A file of a secret may be kept from a role that needs no Kafka: who needs it reports that it cannot be
    # read.
    read_config(value, is_resolved=False)
    return value


def _topic(value: str) -> str:
    TopicTemplate(value)
    return value


def _topic_patterns(value: str) -> str:
    for pattern in value.split():
        if not _TOPIC_PATTERN.match(pattern):
            raise ValueError(f"{pattern!r} matches no topic: write names with * and ?, separated by spaces")
    return value


def _replicas(value: int) -> int:
    if value == 0:
        raise ValueError("write the number of replicas, or -1 for the broker's default")
    return value


def _limits(value: Any) -> dict[str, Any]:
    # YAML reads `off` as false, and pydantic false as 0.
    table = {name: "off" if limit is False else limit for name, limit in as_table(value).items()}
    if wrong := [name for name, limit in table.items() if limit is True]:
        raise ValueError(f"{wrong[0]} has no limit: write a number, or off")
    return table


def _place(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    if separator and (_CREDENTIALS.search(rest) or (scheme != "file" and "@" in rest.partition("/")[0])):
        raise ValueError(
            "has credentials in it: remove them, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or "
            "what gs:// and az:// take), or let the machine have an identity"
        )
    if separator and scheme not in ("file", "s3", "gs", "az"):
        raise ValueError("write a directory, or s3://bucket/path, gs://bucket/path, az://container/path")
    if separator and scheme != "file" and not re.match(r"[^\s/]+(/|\Z)", rest):
        raise ValueError(f"names no bucket: write {scheme}://bucket/path")
    return value


def _iceberg(value: Secret) -> Secret:
    if not value or ICEBERG_NAME.fullmatch(value.reveal()):
        return value
    register_dsn(value.reveal())
    if "://" in value.reveal() and not re.match(r"postgres(ql)?://", value.reveal()):
        raise ValueError(
            "write the database of an Iceberg catalog, such as postgresql://user@host/db, or the name of a "
            "catalog in pyiceberg's configuration, which has the addresses of others (REST)"
        )
    check_dsn(value.reveal())
    return value


def _link(value: str) -> str:
    if value and (not value.startswith(("http://", "https://")) or "@" in value):
        raise ValueError(
            "write the address as a browser takes it, without user and password, such as "
            "https://dagster.example.com"
        )
    return value


def _uri_reference(value: str) -> str:
    if not _URI_REFERENCE.match(value):
        raise ValueError("not a URI reference: write for example /shop or https://example.com/shop")
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Readers = Literal["owner", "group", "everyone"]
ValueFormat = Literal["payload", "flat", "envelope", "cloudevents"]
Format = Literal["json", "json_schema", "avro", "protobuf"]
Compatibility = Literal[
    "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE", "NONE"
]
AfterDeadLetter = Literal["continue", "block"]
Attempts = Annotated[int, Field(ge=1, le=1_000_000)]
RetrySeconds = Annotated[float, Field(gt=0.0, le=86_400.0)]
Table = dict[str, Any]
Names = dict[str, str]
OutboxName = Annotated[str, AfterValidator(_name)]
KafkaConfig = Annotated[Table, BeforeValidator(as_table), AfterValidator(_kafka_config)]
ExistingTable = Annotated[Table, BeforeValidator(as_table), _read_by(read_mapping)]
Consumers = Annotated[Table, BeforeValidator(as_table), _read_by(read_consumers)]
SchemaName = Annotated[str, AfterValidator(_schema)]
Dsn = Annotated[Secret, AfterValidator(_dsn)]
Brokers = Annotated[str, AfterValidator(_brokers)]
ConnectUrls = Annotated[Secret, AfterValidator(_connect)]
RegistryUrls = Annotated[str, AfterValidator(_registry)]
RegistryUserInfo = Annotated[Secret, AfterValidator(_user_info)]
ConnectorName = Annotated[str, AfterValidator(_connector)]
Topic = Annotated[str, AfterValidator(_topic)]
TopicPatterns = Annotated[str, AfterValidator(_topic_patterns)]
Replicas = Annotated[int, Field(ge=-1, le=32_767), AfterValidator(_replicas)]
DrainConsumers = Annotated[str, AfterValidator(_drain_consumers)]
HeaderNames = Annotated[Names, BeforeValidator(as_table), _read_by(read_headers)]
FlatMembers = Annotated[Names, BeforeValidator(as_table), _read_by(read_members)]
UriReference = Annotated[str, AfterValidator(_uri_reference)]
MasterKeyText = Annotated[Secret, AfterValidator(_master_keys)]
SecretCommand = Annotated[Secret, AfterValidator(_command)]
SecretToken = Annotated[Secret, AfterValidator(_command)]
HomePath = Annotated[Path, AfterValidator(expanded)]
StorePlace = Annotated[str, AfterValidator(_place)]
IcebergCatalog = Annotated[Secret, AfterValidator(_iceberg)]
Limits = Annotated[dict[str, float | str], BeforeValidator(_limits), _read_by(read_thresholds)]
ArchiveRetention = Annotated[Any, WithJsonSchema(RETENTION_SCHEMA)]
AlertAddresses = Annotated[Secret, AfterValidator(_alerts)]
Link = Annotated[str, AfterValidator(_link)]
ANY_CASE: Final = BeforeValidator(_lower)


def connect_urls(text: str) -> list[str]:
    """Return the addresses of the workers of Kafka Connect.

    Raises:
        ValueError: the text has something else; the message does not repeat it.
    """
    write = "write http://host:8083, for several workers separated by commas"
    no_address = (
        f"is not the address of Kafka Connect's REST: {write}. Special characters of a password "
        "are % and two hexadecimal digits (%2C for a comma, %40 for @)"
    )
    return [url for url, _ in _urls(text, write, no_address, "; %3F for ? and %23 for # in a password")]


def registry_urls(text: str) -> list[str]:
    """Return the addresses of a schema registry.

    Raises:
        ValueError: the text has something else; the message does not repeat it.
    """
    write = "write https://registry:8081, for several addresses of one registry separated by commas"
    found = [*_urls(text, write, f"is not the address of a schema registry: {write}")]
    if any("@" in parts.netloc for _, parts in found):
        raise ValueError("has a user in it: remove it, and write user:password to OUTBOX_REGISTRY_USER_INFO")
    return [url for url, _ in found]


def _urls(text: str, write: str, no_address: str, escapes: str = "") -> Iterator[tuple[str, SplitResult]]:
    urls = [part.strip() for part in text.split(",") if part.strip()]
    if not urls:
        raise ValueError(f"has no address: {write}")
    for url in urls:
        try:
            parts = urlsplit(url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_one = False
        if not is_one or any(ord(character) <= 32 for character in url):
            raise ValueError(no_address)
        if parts.query or parts.fragment:
            raise ValueError(f"has more than an address: {write}{escapes}")
        yield url, parts
