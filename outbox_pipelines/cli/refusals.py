"""What commands refuse at their start although each setting fits, found by the parts that refuse it.

Invariants:
- Settings alone decide, and the files that they name: neither a database nor Kafka is asked.
- Everything is found at once, each with the place of a setting.
- A part that is not installed is left out: its commands say what to install.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from outbox_pipelines.config import parsed
from outbox_pipelines.config.file import KeyPath
from outbox_pipelines.config.registry_files import unusable_files
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import Settings, Values

Refusals = Iterator[tuple[KeyPath, str]]


def find(outbox: str | None, values: Values) -> list[str]:
    """Return a line for each refusal.

    Args:
        outbox: the name of one of several; None for the only one.
    """
    settings = values.without_mistakes()
    lines = _of_database(outbox, values, settings)
    # A secret that the file may not have would be named a second time.
    for check in _CHECKS if values.mistakes else (*_CHECKS, _of_client):
        with suppress(ImportError):
            lines += [f"{values.where(name, tuple(rest))}: {why}" for (name, *rest), why in check(settings)]
    return lines


def lacks_kafka(values: Values) -> bool:
    """Return whether no relay can start. No mistake: it may run elsewhere, or Debezium may publish."""
    settings = values.without_mistakes()
    return bool(settings.dsn and not settings.kafka and not settings.connect_url)


def _said(check: Callable[..., object], *given: Any) -> list[str]:
    """Return what a check raises."""
    try:
        check(*given)
    except (SetupError, ValueError) as error:
        return [str(error)]
    return []


def _of_database(outbox: str | None, values: Values, settings: Settings) -> list[str]:
    # A DSN that the file may not have is a mistake already.
    if values.values.get("dsn") or ("dsn" in values.places and "dsn" not in values.values):
        return []
    if outbox is not None and values.config is not None:
        # A name that cannot be one is a mistake already.
        if "name" not in values.values:
            return []
        where = values.config.at(("outboxes", outbox))
        return [f'{where} names no database: add dsn = {{ env = "{outbox.upper()}_DSN" }}']
    # Commands about these need no database of an outbox.
    if not settings.kafka and (settings.consumer_dsn or settings.archives or settings.catalog_file):
        return []
    return _said(settings.require_dsn)


def _of_existing_table(settings: Settings) -> Refusals:
    from outbox_pipelines.existing import check
    from outbox_pipelines.existing.cleaning import target

    if (mapping := parsed.mapping(settings)) is None:
        return
    if mapping.slot is None:
        for place, finding in check.conflicts(settings, mapping):
            yield place, finding.text
    for name in ("clean_after_hours", "months_ahead"):
        if getattr(settings, name) is not None:
            for why in _said(check.open_mapping, settings):
                yield (name,), why
    if settings.clean_after_hours is not None and mapping.slot is None:
        for why in target.problems(settings, mapping):
            yield ("clean_after_hours",), why


def _of_catalog(settings: Settings) -> Refusals:
    from outbox_pipelines.catalog.document import read_catalog

    if settings.catalog_file is not None:
        for why in _said(read_catalog, settings.catalog_file):
            yield ("catalog_file",), f"{settings.catalog_file} {why}"


def _of_registry(settings: Settings) -> Refusals:
    for name, why in unusable_files(settings):
        yield (name,), why


def _of_directories(settings: Settings) -> Refusals:
    """Of those that the first use makes."""
    is_local = "://" not in settings.archive or settings.archive.startswith("file://")
    archive = settings.archive.removeprefix("file://") if settings.archives and is_local else None
    for name, path in (
        ("archive", archive and Path(archive).expanduser()),
        ("expectations", settings.expectations),
        ("local_dir", settings.local_dir.expanduser()),
        ("local_jars", settings.local_jars.expanduser()),
    ):
        if not path:
            continue
        first = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
        if not first.is_dir():
            yield (name,), f"{first} is not a directory: name another one"
        elif first == path.absolute() and not os.access(first, os.R_OK | os.X_OK):
            yield (name,), f"{first} cannot be read: name another directory, or change its rights"


def _of_archive_retention(settings: Settings) -> Refusals:
    for place, why in parsed.mistakes_of_archive_retention(settings):
        yield ("archive_retention_days", *place), why


def _of_bodies(settings: Settings) -> Refusals:
    """Of the store of large payloads, which must be there; a bucket is not asked for."""
    from outbox_pipelines.bodies import Bodies

    if settings.bodies:
        for why in _said(Bodies, settings.bodies):
            yield ("bodies",), why


def _of_master_key(settings: Settings) -> Refusals:
    """Of a file that is read when a key is needed."""
    from outbox_pipelines.subject_keys.subject_keys import masters_of

    if settings.master_key_file is not None:
        for why in _said(masters_of, settings):
            yield ("master_key_file",), why


def _of_local_stack(settings: Settings) -> Refusals:
    from outbox_pipelines.local.postgres import find_programs

    if settings.local_postgres is not None:
        for why in _said(find_programs, settings.local_postgres):
            yield ("local_postgres",), why


def _of_alerts(settings: Settings) -> Refusals:
    from outbox_pipelines.quality import alerts

    if settings.alerts:
        for why in _said(alerts.channels, settings):
            yield ("alerts",), why


def _of_inboxes(settings: Settings) -> Refusals:
    from outbox_pipelines.consumer import loading

    for each in settings.drain_consumers.split():
        for why in _said(loading.parts, each):
            yield ("drain_consumers",), why


def _of_client(settings: Settings) -> Refusals:
    """Yield what Kafka's client does not accept, which knows its names and values; it connects to none."""
    from outbox_pipelines.relay.kafka import client, transactional_producer

    if mistakes := parsed.mistakes_of_kafka_config(settings):
        for place, why in mistakes:
            yield ("kafka_config", *place), why
        return
    settings = settings.model_copy(update={"kafka": "none"})
    kinds: list[dict[str, Any]] = [{}]
    if settings.delivery == "exactly_once" and parsed.mapping(settings) is None:
        kinds.append(transactional_producer.options(settings, "none"))
    for own in kinds:
        for why in _said(partial(client.producer, settings, lambda _: None, bootstrap_servers="", **own)):
            yield ("kafka_config",), why
            return


_CHECKS: Final = (
    _of_existing_table,
    _of_catalog,
    _of_registry,
    _of_directories,
    _of_archive_retention,
    _of_bodies,
    _of_master_key,
    _of_local_stack,
    _of_alerts,
    _of_inboxes,
)
