"""Wrap data keys with master keys: AES-256-GCM of this process, or a key management service.

Invariants:
- The first master key wraps; each is tried to unwrap, so that one can be replaced.
- A master key is in no message.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from outbox_pipelines.config.master_keys import SIZE, read_master_keys
from outbox_pipelines.core.secret import first_line, register
from outbox_pipelines.errors import SetupError
from outbox_pipelines.subject_keys.errors import KeyStoreError

_NONCE: Final = 12


class MasterKey(Protocol):
    """What wraps data keys: a key, or a hook of a key management service."""

    def wrap(self, key: bytes) -> bytes:
        """Return a data key, 32 bytes, encrypted."""

    def unwrap(self, wrapped: bytes) -> bytes:
        """Return what was wrapped; raise `ValueError` if this master key has not wrapped it."""


class _AesKey:
    def __init__(self, key: bytes) -> None:
        self._key = AESGCM(key)

    def wrap(self, key: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._key.encrypt(nonce, key, None)

    def unwrap(self, wrapped: bytes) -> bytes:
        try:
            return self._key.decrypt(wrapped[:_NONCE], wrapped[_NONCE:], None)
        except InvalidTag:
            raise ValueError("another master key has wrapped it") from None


class MasterKeys:
    """The master keys of a process.

    Args:
        given: base64 of 32 bytes, several with spaces between them; a `MasterKey`; or a list of these.

    Raises:
        SetupError: there is none, or one is invalid.
    """

    def __init__(self, given: str | MasterKey | Sequence[str | MasterKey]) -> None:
        self._keys: list[MasterKey] = []
        for each in given if isinstance(given, list | tuple) else [given]:
            if hasattr(each, "wrap") and hasattr(each, "unwrap"):
                self._keys.append(each)
                continue
            if not isinstance(each, str):
                raise SetupError(
                    f"master is a {type(each).__name__}: give base64 of 32 bytes as a str, an object with "
                    "wrap and unwrap, or a list of these"
                )
            register(*each.split())
            try:
                self._keys += map(_AesKey, read_master_keys(each))
            except ValueError as error:
                raise SetupError(f"master: {error}") from None
        if not self._keys:
            raise SetupError(NONE)

    def wrap(self, key: bytes) -> bytes:
        """Return a data key, wrapped by the current master key.

        Raises:
            KeyStoreError: the key management service is unavailable.
        """
        try:
            return self._keys[0].wrap(key)
        except Exception as error:  # noqa: BLE001 - whatever a service's client raises
            raise _unavailable(error) from None

    def unwrap(self, wrapped: bytes) -> bytes | None:
        """Return a data key; None if no master key has wrapped it.

        Raises:
            KeyStoreError: the key management service is unavailable.
        """
        for each in self._keys:
            try:
                return each.unwrap(wrapped)
            except ValueError:
                continue
            except Exception as error:  # noqa: BLE001 - whatever a service's client raises
                raise _unavailable(error) from None
        return None

    def require(self, key_id: str, wrapped: bytes) -> bytes:
        """Return a data key.

        Raises:
            KeyStoreError: as `unwrap`, or no master key has wrapped it.
        """
        if (key := self.unwrap(wrapped)) is None:
            raise KeyStoreError(
                f"the key {key_id} is wrapped by another master key: add the former one to "
                "OUTBOX_MASTER_KEY, behind the current one"
            )
        return key


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
