"""What an operator does with the keys of subjects: create the store, forget, list, and wrap keys again.

Invariants:
- Who forgets needs no master key.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

import psycopg

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import ErasureSettings
from outbox_pipelines.subject_keys.errors import MissingMasterKeyError, SubjectKeyError
from outbox_pipelines.subject_keys.key_store import Erasure
from outbox_pipelines.subject_keys.subject_keys import masters_of, require_master, store_of

_UNKNOWN: Final = "it is not known whether the keys are in another server than the outbox"
_SERVER: Final = "SELECT system_identifier::text FROM pg_control_system()"


def migrate(settings: ErasureSettings) -> tuple[bool, str]:
    """Create the tables of the key store if they are missing.

    Returns:
        Whether they were, and a warning about the store's place, or an empty text.

    Raises:
        SetupError: the settings name no store, or no master key.
        KeyStoreError: the store is unavailable, or the master key is not its own.
    """
    masters = masters_of(settings)
    with closing(store_of(settings)) as store:
        is_new = store.migrate(masters.require_first())
        require_master(store, masters)
        server = store.server()
    if not settings.dsn:
        return is_new, f"OUTBOX_DSN is not set: {_UNKNOWN}"
    try:
        with connect(settings, name="outbox keys") as connection:
            [(outbox,)] = connection.execute(_SERVER).fetchall()
    except (SetupError, psycopg.Error) as error:
        return is_new, f"{first_line(error)}: {_UNKNOWN}"
    if outbox != server:
        return is_new, ""
    return is_new, (
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


def erasures(settings: ErasureSettings, limit: int | None) -> list[Erasure]:
    """Return the subjects that were forgotten, the newest first; all of them without a limit."""
    with closing(store_of(settings)) as store:
        return store.erasures(limit)


@dataclass(slots=True)
class Rewrapped:
    """What a rotation of the master key has done; the subjects and ids of keys that stay as they are."""

    count: int = 0
    missing: list[tuple[str, str]] = field(default_factory=list)
    """Those whose master key is not given."""
    damaged: list[tuple[str, str]] = field(default_factory=list)
    """Those that their own master key does not unwrap."""


def rewrap(settings: ErasureSettings) -> Rewrapped:
    """Make the first master key the current one, and wrap with it all keys that others have wrapped.

    Raises:
        KeyStoreError: the store is unavailable, none of the master keys is its own, or the first one does not
            unwrap what it has wrapped.
    """
    masters = masters_of(settings)
    current = masters.require_first()
    done = Rewrapped()
    with closing(store_of(settings)) as store:
        require_master(store, masters)
        store.make_current(current)
        for keys in store.wrapped():
            renewed = []
            for subject, key in keys:
                try:
                    content = masters.unwrap(key)
                except MissingMasterKeyError:
                    done.missing.append((subject, key.key_id))
                except SubjectKeyError:
                    done.damaged.append((subject, key.key_id))
                else:
                    if key.wrapped_by != current:
                        renewed.append((key, masters.wrap(content, current)))
            done.count += store.rewrap(renewed, current)
    return done
