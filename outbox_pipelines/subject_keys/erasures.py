"""What an operator does with the keys of subjects: create the store, forget, list, and wrap keys again.

Invariants:
- Who forgets needs no master key.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import Final

import psycopg

from outbox_pipelines.config.master_keys import SIZE
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import ErasureSettings
from outbox_pipelines.subject_keys.key_store import Erasure
from outbox_pipelines.subject_keys.subject_keys import masters_of, require_master, store_of

_UNKNOWN: Final = "it is not known whether the keys are in another server than the outbox"
_SERVER: Final = "SELECT system_identifier::text FROM pg_control_system()"


def migrate(settings: ErasureSettings) -> str:
    """Create the tables of the key store if they are missing; return a warning about its place, or nothing.

    Raises:
        SetupError: the settings name no store, or no master key.
        KeyStoreError: the store is unavailable, or the master key is not its own.
    """
    masters = masters_of(settings)
    with closing(store_of(settings)) as store:
        store.migrate(masters.wrap(os.urandom(SIZE)))
        require_master(store, masters)
        server = store.server()
    if not settings.dsn:
        return f"OUTBOX_DSN is not set: {_UNKNOWN}"
    try:
        with connect(settings, name="outbox keys") as connection:
            [(outbox,)] = connection.execute(_SERVER).fetchall()
    except (SetupError, psycopg.Error) as error:
        return f"{first_line(error)}: {_UNKNOWN}"
    if outbox != server:
        return ""
    return (
        "the keys are in the same server as the outbox: its backups and its WAL have both, so an erasure "
        "holds only when the last backup with the key has expired. Move the keys to another server"
    )


def forget(
    settings: ErasureSettings, subject: str, *, actor: str, reason: str
) -> tuple[Erasure, bool, str] | None:
    """Destroy the key of a subject.

    Returns:
        The erasure, whether it was now, and why the table was not vacuumed; None for a subject without a key.

    Raises:
        KeyStoreError: the store is unavailable.
    """
    with closing(store_of(settings)) as store:
        found = store.forget(subject, actor=actor, reason=reason)
        # Also for one that was forgotten before: the first attempt may have ended here.
        return None if found is None else (*found, store.vacuum())


def erasures(settings: ErasureSettings, limit: int) -> list[Erasure]:
    """Return the subjects that were forgotten, the newest first."""
    with closing(store_of(settings)) as store:
        return store.erasures(limit)


def rewrap(settings: ErasureSettings) -> int:
    """Wrap all keys with the current master key; return how many.

    Raises:
        KeyStoreError: a key is wrapped by a master key that is not given; keys before it are wrapped again.
    """
    masters = masters_of(settings)
    count = 0
    with closing(store_of(settings)) as store:
        require_master(store, masters)
        for keys in store.wrapped():
            renewed = [(key_id, old, masters.wrap(masters.require(key_id, old))) for key_id, old in keys]
            count += store.rewrap(renewed)
        # Last: until all keys are, the former master key is still needed.
        store.rewrap_canary(masters.wrap(os.urandom(SIZE)))
    return count
