"""Why a payload was not protected, or not decrypted."""

from __future__ import annotations

from outbox_pipelines import Error
from outbox_pipelines.core.secret import redacted
from outbox_pipelines.writer.errors import OutboxError


class KeyStoreError(OutboxError):
    """The key store cannot be used, or a master key is missing; nothing was written."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class MissingMasterKeyError(KeyStoreError):
    """A key is wrapped by a master key that this process does not have."""


class SubjectForgottenError(OutboxError):
    """The subject was forgotten, and never gets another key."""


class SubjectKeyError(Error):
    """A value is encrypted with a key that the store does not have or that is damaged there, or was changed.

    It is not erased.
    """
