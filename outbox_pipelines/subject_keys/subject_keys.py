"""Encrypt members of payloads with a key per data subject, and decrypt them.

Invariants:
- Nothing is encrypted before the master key is known to be the store's own, and before it has unwrapped the
  subject's key.
- A forgotten subject never gets another key. Keys are kept in memory for `cache_seconds`: after that time,
  no process reads what was forgotten.
- What is not known to be erased is never taken for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Protocol
from uuid import UUID

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from outbox_pipelines.config.master_keys import SIZE
from outbox_pipelines.core.erased import ERASED
from outbox_pipelines.core.secret import check_dsn, register_dsn
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import ErasureSettings, load_settings
from outbox_pipelines.subject_keys import encrypted_text, member_paths
from outbox_pipelines.subject_keys.errors import (
    KeyStoreError,
    MissingMasterKeyError,
    SubjectForgottenError,
    SubjectKeyError,
)
from outbox_pipelines.subject_keys.key_store import KeyCache, KeyStore
from outbox_pipelines.subject_keys.wrapping import NONE, MasterKey, MasterKeys, read_file
from outbox_pipelines.writer.bytes_payload import BytesPayload
from outbox_pipelines.writer.errors import OutboxError
from outbox_pipelines.writer.json_text import to_json
from outbox_pipelines.writer.references import LargePayload

LONGEST_SUBJECT: Final = 500
MOST_SECONDS: Final = 60.0
AGGREGATE_ID: Final = "aggregate_id"
"""In the event catalog, in place of a path: the subject is the event's aggregate."""
_ERASED: Final = ("null", ERASED)
_LOG: Final = logging.getLogger(__name__)
# Reasons of values that stay encrypted, each reported once.
_MOST_REPORTED: Final = 5
_Key = tuple[str, AESGCM]
_Unusable = MissingMasterKeyError | SubjectKeyError


class _Documented(Protocol):
    @property
    def protected(self) -> Mapping[str, str]: ...


class EventCatalog(Protocol):
    """What `catalog.document.read_catalog` returns."""

    @property
    def events(self) -> Mapping[str, _Documented]: ...


class SubjectKeys:
    """The keys of data subjects, for writers, consumers and analysts; can be used by several threads.

    Args:
        dsn: the database of the keys, as a libpq connection string. What is not given has the value of
            its setting: OUTBOX_KEYS_DSN, and OUTBOX_MASTER_KEY or OUTBOX_MASTER_KEY_FILE.
        master_key: base64 of 32 bytes, or an object with `id`, `wrap` and `unwrap`; a list of these: the
            store names the one that wraps, the others can unwrap.
        cache_seconds: how long a key may be kept in memory, 0 to 60: so long after `outbox forget`, this
            process may still use it.
        cache_size: how many keys may be kept.
        timeout: seconds after which the database is taken for unavailable.

    Raises:
        SetupError: an argument is invalid, or none is given or set.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        master_key: str | MasterKey | Sequence[str | MasterKey] | None = None,
        cache_seconds: float = MOST_SECONDS,
        cache_size: int = 10_000,
        timeout: float = 5.0,
    ) -> None:
        if dsn is None or master_key is None:
            settings = load_settings()
            dsn = dsn or _dsn_of(settings)
            master_key = _master_of(settings) if master_key is None else master_key
        register_dsn(dsn)
        try:
            check_dsn(dsn)
        except ValueError as error:
            raise SetupError(f"dsn {error}") from None
        is_number = isinstance(cache_seconds, int | float) and not isinstance(cache_seconds, bool)
        if not is_number or not 0 <= cache_seconds <= MOST_SECONDS:
            raise SetupError(f"cache_seconds is {cache_seconds!r}: give 0 to {MOST_SECONDS:g} seconds")
        if not isinstance(cache_size, int) or cache_size < 1:
            raise SetupError(f"cache_size is {cache_size!r}: give 1 or more keys, as an int")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
            raise SetupError(f"timeout is {timeout!r}: give a number of seconds")
        self._masters = MasterKeys(master_key)
        self._store = KeyStore(dsn, timeout)
        self._current: str | None = None
        self._reported: set[str] = set()
        # By subject, those to encrypt with; by id, those to decrypt with, None if destroyed.
        self._of_subjects: KeyCache[_Key] = KeyCache(cache_seconds, cache_size)
        self._of_ids: KeyCache[AESGCM | None] = KeyCache(cache_seconds, cache_size)

    def protect(self, payload: object, members: Mapping[str, object]) -> Any:
        """Return a payload for `emit` with members encrypted, outside of the caller's transaction.

        Args:
            payload: what `emit` takes, but neither bytes nor `bodies.large(…)`, which goes around this call.
            members: for each path of a member, such as `customer.email` or `lines[].name`, the id of the
                subject: text, an integer or a UUID. A path that ends with `?` may lead nowhere. A member
                that is null stays null.

        Raises:
            OutboxError: a path leads nowhere, a subject is none, or the payload has no JSON form, or has
                encrypted text already.
            SubjectForgottenError: a subject was forgotten.
            SubjectKeyError: a subject's key is damaged in the database.
            KeyStoreError: the database is unavailable, or the master key is not its own.
        """
        if not isinstance(members, Mapping) or not members:
            raise OutboxError("no member is named: give paths of members, each with the id of its subject")
        content = _copied(payload)
        member_paths.refuse_overlap(members)
        return self._protected(
            content,
            [
                (place, subject)
                for path, subject in members.items()
                for place in member_paths.places(content, path)
            ],
        )

    async def protect_later(self, payload: object, members: Mapping[str, object]) -> Any:
        """As `protect`, without blocking the event loop."""
        return await asyncio.to_thread(self.protect, payload, members)

    def protect_by(
        self, catalog: EventCatalog, event_type: str, payload: object, *, aggregate_id: object = None
    ) -> Any:
        """As `protect`, with what the event catalog names for this type; a member that is missing is skipped.

        Args:
            catalog: what `outbox_pipelines.catalog.document.read_catalog` returns.
            aggregate_id: the subject where the catalog says `aggregate_id`.

        Raises:
            OutboxError: also if the catalog does not have the type, or a subject's member is missing.
        """
        if not hasattr(catalog, "events"):
            raise OutboxError(
                f"catalog is a {type(catalog).__name__}: give what read_catalog of "
                "outbox_pipelines.catalog.document returns"
            )
        documented = catalog.events.get(event_type)
        if documented is None:
            raise OutboxError(f"{event_type} is not in the event catalog: document it, or correct the name")
        if not documented.protected:
            return payload
        content = _copied(payload)
        found: list[tuple[member_paths.MemberPlace, object]] = []
        for path, subject in documented.protected.items():
            places = member_paths.places(content, path.removesuffix("?") + "?")
            if subject == AGGREGATE_ID:
                found += [(place, aggregate_id) for place in places]
                continue
            subjects = {
                place.items: place.container[place.name]
                for place in member_paths.places(content, f"{subject}?")
            }
            depth = subject.count(member_paths.ITEMS)
            for place in places:
                if place.items[:depth] not in subjects and place.container[place.name] is not None:
                    raise OutboxError(
                        f"the payload has no member {subject}, which names the subject of {path}: add it"
                    )
                found.append((place, subjects.get(place.items[:depth])))
        return self._protected(content, found)

    def decrypted(self, payload: Any) -> Any:
        """Return a payload with its members decrypted, and `ERASED` for what was erased.

        Raises:
            SubjectKeyError: a value is encrypted with a key that is not in the store or is damaged there, or
                was changed; also any other text that begins as an encrypted one.
            KeyStoreError: the database is unavailable, or a master key is missing.
        """
        [found] = self.all_decrypted([payload])
        return found

    def all_decrypted(self, payloads: Sequence[Any], *, is_strict: bool = True) -> list[Any]:
        """As `decrypted`, for several payloads, with one query for the keys of all.

        Args:
            is_strict: otherwise, what cannot be decrypted stays encrypted, and is a warning of the log.
        """
        texts: list[str] = []
        for each in payloads:
            encrypted_text.replaced(each, _noting(texts))
        if not texts:
            return list(payloads)
        keys = self._keys_of_texts(texts)

        def replace(text: str) -> Any:
            found = self._opened(text, keys, is_strict=is_strict)
            return text if found is None else found[1]

        return [encrypted_text.replaced(each, replace) for each in payloads]

    def json_decrypted(self, texts: Sequence[str | None]) -> list[str | None]:
        """Return JSON texts with their members decrypted, and null for what was erased.

        What cannot be decrypted stays encrypted, and is a warning of the log. Numbers keep their digits.

        Raises:
            KeyStoreError: the database is unavailable, or the master key is not its own.
        """
        found: list[str] = []
        for text in texts:
            if text and encrypted_text.COMMON in text:
                encrypted_text.replaced_in_json(text, _noting(found))
        if not found:
            return list(texts)
        keys = self._keys_of_texts(found)

        def replace(text: str) -> str:
            found = self._opened(text, keys, is_strict=False)
            return f'"{text}"' if found is None else found[0]

        return [text and encrypted_text.replaced_in_json(text, replace) for text in texts]

    def close(self) -> None:
        """Close the connection to the database; the next call opens another one."""
        self._store.close()

    def _opened(
        self, text: str, keys: Mapping[str, AESGCM | _Unusable | None], *, is_strict: bool
    ) -> tuple[str, Any] | None:
        """Return a value as JSON text and as it is; None for a text that stays."""
        if text == ERASED:
            return _ERASED
        key_id = encrypted_text.key_id_of(text)
        error: _Unusable
        if key_id is None:
            if not text.startswith(encrypted_text.PREFIX):
                return None
            error = _refused("in another form than this version's, or was changed since: correct its writer")
        elif key_id not in keys:
            error = _refused(
                f"with the key {key_id}, which the key store does not have: name the store of its writer"
            )
        elif (key := keys[key_id]) is None:
            return _ERASED
        elif isinstance(key, _Unusable):
            error = key
        elif (found := encrypted_text.opened(text, key)) is not None:
            return found
        else:
            error = _refused(
                f"with the key {key_id}, and was changed since, is no JSON, or the key store has another key "
                "there: correct its writer, or restore the row"
            )
        if is_strict:
            raise error
        self._report(str(error))
        return None

    def _report(self, why: str) -> None:
        """Warn that a value stays encrypted, once for each reason."""
        if why not in self._reported and len(self._reported) < _MOST_REPORTED:
            self._reported.add(why)
            last = "; other reasons are not reported" if len(self._reported) == _MOST_REPORTED else ""
            _LOG.warning("values stay encrypted: %s%s", why, last)

    def _protected(self, content: Any, members: Sequence[tuple[member_paths.MemberPlace, object]]) -> Any:
        """Encrypt members of a payload in place, and return it."""
        some = [(place, _subject(one)) for place, one in members if place.container[place.name] is not None]
        keys = self._keys_of_subjects(dict.fromkeys(subject for _, subject in some))
        for (_, container, name), subject in some:
            container[name] = encrypted_text.sealed(*keys[subject], container[name])
        return content

    def _keys_of_subjects(self, subjects: Iterable[str]) -> dict[str, _Key]:
        keys, missing = self._of_subjects.known(subjects)
        if not missing:
            return keys
        self._require_store()
        asked = time.monotonic()
        rows = self._store.find(missing)
        while new := [each for each in missing if each not in rows]:
            current = self._require_store()
            proposed = {each: self._masters.wrap(os.urandom(SIZE), current) for each in new}
            if added := self._store.add(proposed, current):
                rows |= added
            else:
                # `keys rewrap` has made another master key the current one.
                self._current = None
        for subject, row in rows.items():
            if row.wrapped is None:
                raise SubjectForgottenError(
                    f"the subject {subject} was forgotten, and never gets another key: a person who returns "
                    "needs a new id"
                )
            keys[subject] = row.key_id, AESGCM(self._masters.unwrap(row))
            self._of_subjects.put(subject, keys[subject], asked)
        return keys

    def _keys_of_texts(self, texts: Iterable[str]) -> dict[str, AESGCM | _Unusable | None]:
        """Return the keys of encrypted texts by their ids.

        None: destroyed. An error: of this key alone, the others can be used. Unknown ones are missing.
        """
        keys: dict[str, AESGCM | _Unusable | None] = {}
        known, missing = self._of_ids.known({each for each in map(encrypted_text.key_id_of, texts) if each})
        keys |= known
        if not missing:
            return keys
        self._require_store()
        asked = time.monotonic()
        for row in self._store.read(missing):
            try:
                key = None if row.wrapped is None else AESGCM(self._masters.unwrap(row))
            except (MissingMasterKeyError, SubjectKeyError) as error:
                keys[row.key_id] = error
                continue
            keys[row.key_id] = key
            self._of_ids.put(row.key_id, key, asked)
        return keys

    def _require_store(self) -> str:
        """Return the id of the store's current master key, asked once; raise `KeyStoreError` without it."""
        if self._current is None:
            self._current = require_master(self._store, self._masters)
        return self._current


def require_master(store: KeyStore, masters: MasterKeys) -> str:
    """Return the id of a store's current master key.

    Raises:
        KeyStoreError: it is none of these master keys, or the store has none yet.
    """
    current = store.master_key()
    if current is None:
        raise KeyStoreError("the key store has no master key: run `outbox keys migrate` to the end")
    if current not in masters.ids:
        raise KeyStoreError(
            f"the master key is not that of the key store (given {', '.join(masters.ids)}, its own "
            f"{current}): set OUTBOX_MASTER_KEY to the one that `outbox keys migrate` or `rewrap` had, or "
            "correct OUTBOX_KEYS_DSN; nothing was encrypted"
        )
    return current


def subject_keys_of(settings: ErasureSettings) -> SubjectKeys:
    """Return the keys that the settings name; raise `SetupError` if they name none, or no master key."""
    return SubjectKeys(_dsn_of(settings), master_key=_master_of(settings))


def store_of(settings: ErasureSettings) -> KeyStore:
    """Return the store that OUTBOX_KEYS_DSN names; raise `SetupError` if it is not set."""
    return KeyStore(_dsn_of(settings), 5.0)


def masters_of(settings: ErasureSettings) -> MasterKeys:
    """Return the master keys of the settings; raise `SetupError` if there are none."""
    return MasterKeys(_master_of(settings))


def _refused(why: str) -> SubjectKeyError:
    return SubjectKeyError(f"a member is encrypted {why}")


def _noting(texts: list[str]) -> Callable[[str], str]:
    """Return what adds each text to a list, and replaces none."""

    def note(text: str) -> str:
        texts.append(text)
        return text

    return note


def _copied(payload: object) -> Any:
    """Return what the JSON of a payload means, for changes."""
    if isinstance(payload, LargePayload | BytesPayload):
        raise OutboxError(
            f"the payload is a {type(payload).__name__}: protect it first, as "
            "bodies.large(keys.protect(payload, …)); bytes have no members"
        )
    text = to_json("payload", payload)
    if encrypted_text.has_any(text):
        raise OutboxError(
            f"the payload has a text that begins with {encrypted_text.PREFIX}: it is encrypted already, or "
            "looks as if it were; name all members in one call"
        )
    return json.loads(text)


def _subject(value: object) -> str:
    """Return the id of a subject as text."""
    if isinstance(value, Enum):
        value = value.value
    is_id = isinstance(value, str | int | UUID) and not isinstance(value, bool)
    text = str(value) if is_id else ""
    if not text.strip():
        said = "is empty" if isinstance(value, str) else f"is of type {type(value).__name__}"
        raise OutboxError(f"a subject {said}: give its id, as text, an integer or a UUID")
    encoded = text.encode(errors="ignore")
    if "\0" in text or encoded.decode() != text or len(encoded) > LONGEST_SUBJECT:
        raise OutboxError(
            f"a subject has a NUL, half of a surrogate pair, or more than {LONGEST_SUBJECT} bytes: give an id"
        )
    return text


def _dsn_of(settings: ErasureSettings) -> str:
    if not settings.keys_dsn:
        raise SetupError(
            "no key store is named: set OUTBOX_KEYS_DSN to a database apart from the outbox, for example "
            "postgresql://user@host/keys"
        )
    return settings.keys_dsn.reveal()


def _master_of(settings: ErasureSettings) -> str:
    if settings.master_key and settings.master_key_file is not None:
        raise SetupError("both OUTBOX_MASTER_KEY and OUTBOX_MASTER_KEY_FILE are set: unset one")
    if settings.master_key_file is not None:
        return read_file(settings.master_key_file)
    if not settings.master_key:
        raise SetupError(NONE)
    return settings.master_key.reveal()
