"""Erasure by data subject: members of payloads are encrypted with a key per subject, which can be destroyed.

    keys = SubjectKeys("postgresql://app@keys/keys")          # `pip install 'outbox-pipelines[erasure]'`
    emit(connection, "order", 1, "order.placed", keys.protect(order, {"customer.email": customer_id}))
    consumer = Consumer(…, keys=keys)

Invariants:
- The writer, the consumer and the archive import nothing of this package: they are given a `SubjectKeys`.
"""

from __future__ import annotations

from outbox_pipelines.core.erased import ERASED
from outbox_pipelines.subject_keys.errors import KeyStoreError, SubjectForgottenError, SubjectKeyError
from outbox_pipelines.subject_keys.subject_keys import SubjectKeys
from outbox_pipelines.subject_keys.wrapping import MasterKey

__all__ = ["ERASED", "KeyStoreError", "MasterKey", "SubjectForgottenError", "SubjectKeyError", "SubjectKeys"]
