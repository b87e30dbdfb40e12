"""Wrap data keys with master keys: AES-256-GCM of this process, or a key management service.

Invariants:
- A wrapped key names its master key by an id. So a key of a master key that is missing here can wait, and
  one that its own does not unwrap is known to be damaged.
- A master key is in no message; its id can be.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from outbox_pipelines.config.master_keys import SIZE, read_master_keys
from outbox_pipelines.core.named_object import load_object
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.errors import SetupError
from outbox_pipelines.subject_keys.errors import KeyStoreError, MissingMasterKeyError, SubjectKeyError

_NONCE: Final = 12
_ID_OF: Final = b"outbox master key"
_ID_DIGITS: Final = 16


class WrappedKey(NamedTuple):
    """A data key as the store has it."""

    key_id: str
    wrapped: bytes | None
    """None: destroyed."""
    wrapped_by: str | None
    """The id of the master key."""


class MasterKey(Protocol):
    """What wraps data keys: a key, or a hook of a key management service.

    An error other than `SubjectKeyError` means that the service is unavailable: writers fail, consumers wait.
    """

    @property
    def id(self) -> str:
        """The name of the master key, such as its ARN; stored with each key that it wraps."""

    def wrap(self, key: bytes) -> bytes:
        """Return a data key, 32 bytes, encrypted."""

    def unwrap(self, wrapped: bytes) -> bytes:
        """Return what was wrapped; raise `SubjectKeyError` if this master key has not wrapped it."""


class _AesKey:
    def __init__(self, key: bytes) -> None:
        self._key = AESGCM(key)
        self.id = hmac.digest(key, _ID_OF, "sha256").hex()[:_ID_DIGITS]

    def wrap(self, key: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._key.encrypt(nonce, key, None)

    def unwrap(self, wrapped: bytes) -> bytes:
        try:
            return self._key.decrypt(wrapped[:_NONCE], wrapped[_NONCE:], None)
        except InvalidTag:
            raise SubjectKeyError("another master key has wrapped it") from None


class MasterKeys:
    """The master keys of a process.

    Args:
        given: base64 of 32 bytes, or `module:name` of a `MasterKey`, several with spaces between them; a
            `MasterKey`; or a list of these.

    Raises:
        SetupError: there is none, or one is invalid.
    """

    def __init__(self, given: str | MasterKey | Sequence[str | MasterKey]) -> None:
        self._keys: dict[str, MasterKey] = {}
        for each in given if isinstance(given, list | tuple) else [given]:
            for key in _keys_of(each):
                self._keys.setdefault(key.id, key)
        if not self._keys:
            raise SetupError(NONE)

    @property
    def ids(self) -> list[str]:
        """The ids of the master keys, in the order in which they are given."""
        return [*self._keys]

    def wrap(self, key: bytes, master_key: str) -> bytes:
        """Return a data key, wrapped by the master key of this id.

        Raises:
            KeyStoreError: the key management service is unavailable.
        """
        try:
            return self._keys[master_key].wrap(key)
        except Exception as error:  # noqa: BLE001 - whatever a service's client raises
            raise _unavailable(error) from None

    def unwrap(self, given: WrappedKey) -> bytes:
        """Return a data key that is not destroyed.

        Raises:
            KeyStoreError: the key management service is unavailable.
            MissingMasterKeyError: the process does not have its master key.
            SubjectKeyError: its master key has not wrapped it, so nothing was encrypted with it, or is lost.
        """
        assert given.wrapped is not None
        if (master_key := self._keys.get(given.wrapped_by or "")) is None:
            raise MissingMasterKeyError(
                f"the key {given.key_id} is wrapped by the master key {given.wrapped_by}, which this process "
                "does not have: add it to OUTBOX_MASTER_KEY"
            )
        try:
            key = master_key.unwrap(given.wrapped)
            is_whole = len(key) == SIZE
        except SubjectKeyError:
            is_whole = False
        # Also a ValueError, which a client can raise for an answer that it cannot parse.
        except Exception as error:  # noqa: BLE001 - whatever a service's client raises
            raise _unavailable(error) from None
        if not is_whole:
            raise SubjectKeyError(
                f"the key {given.key_id} is damaged in the key store: its master key {given.wrapped_by} does "
                "not unwrap it. Restore the row from a backup, or delete it: the subject then gets another "
                "key"
            )
        return key

    def require_first(self) -> str:
        """Return the id of the first master key, which has unwrapped what it has wrapped.

        Raises:
            KeyStoreError: it does not unwrap it, so all keys would be lost; or the service is unavailable.
        """
        first, key = self.ids[0], os.urandom(SIZE)
        with suppress(SubjectKeyError):
            if self.unwrap(WrappedKey("", self.wrap(key, first), first)) == key:
                return first
        raise KeyStoreError(f"the master key {first} does not unwrap what it has wrapped: correct its hook")


def _keys_of(argument: object) -> Sequence[MasterKey]:
    """Return the master keys of one argument."""
    if hasattr(argument, "wrap") and hasattr(argument, "unwrap"):
        if not isinstance(id := getattr(argument, "id", None), str) or not id.strip():
            raise SetupError(
                f"the master key {type(argument).__name__} has no id: give it a text that names its key and "
                "never changes, such as its ARN"
            )
        return [argument]  # type: ignore[list-item]
    if not isinstance(argument, str):
        raise SetupError(
            f"master_key is a {type(argument).__name__}: give base64 of 32 bytes as a str, an object with "
            "id, wrap and unwrap, or a list of these"
        )
    try:
        values = read_master_keys(argument)
    except ValueError as error:
        raise SetupError(f"master_key: {error}") from None
    return [_AesKey(value) if isinstance(value, bytes) else _hook(value) for value in values]


def _hook(name: str) -> MasterKey:
    hook = load_object(name)
    if isinstance(hook, str):
        raise SetupError(f"{name} is a str: give an object with id, wrap and unwrap")
    [found] = _keys_of(hook)
    return found


NONE: Final = (
    "no master key is given: set OUTBOX_MASTER_KEY or OUTBOX_MASTER_KEY_FILE; `outbox keys generate` prints "
    "a new one"
)


def read_file(path: Path) -> str:
    """Return the master keys in a file; raise `SetupError` if it cannot be read."""
    try:
        return path.read_text("utf-8").strip()
    except UnicodeDecodeError:
        raise SetupError(
            f"OUTBOX_MASTER_KEY_FILE={path} has bytes that are no text: write base64 of {SIZE} bytes, as "
            "`outbox keys generate` prints it"
        ) from None
    except OSError as error:
        raise SetupError(f"OUTBOX_MASTER_KEY_FILE={path} cannot be read: {first_line(error)}") from None


def _unavailable(error: Exception) -> KeyStoreError:
    return KeyStoreError(
        f"the master key's service is unavailable: {type(error).__name__}: {first_line(error)}"
    )
