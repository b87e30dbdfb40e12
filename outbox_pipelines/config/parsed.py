"""What the tables of the settings say: each is parsed here, for all who use it."""

from __future__ import annotations

from typing import Any

from outbox_pipelines.config import fields
from outbox_pipelines.config.consumers import Consumer, read_consumers
from outbox_pipelines.config.file import KeyPath
from outbox_pipelines.config.kafka_config import read_config
from outbox_pipelines.config.message_names import read_headers, read_members
from outbox_pipelines.config.table_mapping import Mapping, read_mapping
from outbox_pipelines.config.tables import EntriesError
from outbox_pipelines.config.thresholds import read_retention, read_thresholds
from outbox_pipelines.errors import SetupError


def mapping(settings: fields.Outbox) -> Mapping | None:
    """Return the description of the existing table; None for the append-only outbox."""
    return read_mapping(settings.table) if settings.table else None


def table_named(settings: fields.Outbox, name: str) -> dict[str, Any]:
    """Return the description of the existing table under another name."""
    return {**settings.table, "name": name}


def refuse_existing_table(settings: fields.Outbox) -> None:
    """Raise `SetupError` if the settings are those of an existing table.

    Its schema may have the append-only outbox of other settings, whose days and shards are not its own.
    """
    if settings.table:
        raise SetupError(
            "this is for the append-only outbox, and OUTBOX_TABLE names the existing table "
            f"{mapping(settings)}: name another outbox, or see docs/existing-tables.md"
        )


def kafka_config(settings: fields.Outbox) -> dict[str, Any]:
    """Return the user's own settings of Kafka's client.

    Raises:
        SetupError: the variable or the file of a secret is not there.
    """
    try:
        return read_config(settings.kafka_config)
    except ValueError as error:
        raise SetupError(f"OUTBOX_KAFKA_CONFIG {error}") from None


def mistakes_of_kafka_config(settings: fields.Outbox) -> list[tuple[KeyPath, str]]:
    """Return what `kafka_config` would raise, each with its place in the table."""
    try:
        read_config(settings.kafka_config)
    except EntriesError as error:
        return [*error.each]
    return []


def archive_retention(settings: fields.Days) -> dict[str, int]:
    """Return the days after which archived events expire, by aggregate type.

    Raises:
        SetupError: an entry is not a number of days, or less than OUTBOX_RETENTION_DAYS.
    """
    try:
        return read_retention(settings.archive_retention_days, settings.retention_days)
    except ValueError as error:
        raise SetupError(f"OUTBOX_ARCHIVE_RETENTION_DAYS {error}") from None


def mistakes_of_archive_retention(settings: fields.Days) -> list[tuple[KeyPath, str]]:
    """Return what `archive_retention` would raise, each with its place in the table."""
    try:
        read_retention(settings.archive_retention_days, settings.retention_days)
    except EntriesError as error:
        return [*error.each]
    except ValueError as error:
        return [((), str(error))]
    return []


def consumers(settings: fields.Consumer) -> dict[str, Consumer]:
    """Return the consumers to reconcile, by name."""
    return read_consumers(settings.consumers)


def header_names(settings: fields.Messages) -> dict[str, str]:
    """Return the name of each header in Kafka, by ours."""
    return read_headers(settings.header_names)


def flat_members(settings: fields.Messages) -> dict[str, str]:
    """Return the name of each member that `flat` adds, by ours."""
    return read_members(settings.flat_members)


def thresholds(settings: fields.Checks) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return the limits for a warning and for an error, by check; None for off."""
    return read_thresholds(settings.warn_at), read_thresholds(settings.error_at)
