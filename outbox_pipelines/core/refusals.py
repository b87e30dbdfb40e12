"""The errors of a connection that waiting does not correct: a login, a database or a certificate.

Invariants:
- One rule for every program that waits for a server at its start: it ends with such an error, and only then.
  One that has worked before waits: someone may be about to change a password.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_pipelines.core.sqlstates import code_of

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

# libpq has no SQLSTATE of a connection that fails. A server in another language is waited for.
_TEXTS: Final = (
    "password authentication failed",
    "authentication failed for user",
    "no password supplied",
    "no pg_hba.conf entry",
    "pg_hba.conf rejects connection",
    "is not permitted to log in",
    "permission denied for database",
    '" does not exist',
    "certificate verify failed",
    "server does not support SSL",
    # pgbouncer's own
    "no such database",
    "no such user",
    "SASL authentication failed",
)
# Other drivers, such as asyncpg, have one: a refused login, and no such database.
_CODES: Final = ("28", "3D")
# Of Kafka's client, by name: importing the client takes long.
_CREDENTIALS: Final = (
    "_AUTHENTICATION",
    "SASL_AUTHENTICATION_FAILED",
    "UNSUPPORTED_SASL_MECHANISM",
    "ILLEGAL_SASL_STATE",
)


def is_refused(error: BaseException) -> bool:
    """Return whether a database, or a pooler before it, has refused a connection."""
    said = str(error)
    return code_of(error)[:2] in _CODES or any(each in said for each in _TEXTS)


def is_refused_by_kafka(error: KafkaError) -> bool:
    """Return whether an error of Kafka's client means that a broker refuses the credentials."""
    return error.name() in _CREDENTIALS
