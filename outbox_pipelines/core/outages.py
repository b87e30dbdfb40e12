"""Errors of a database that are an outage, by SQLSTATE; refused connections, which waiting does not correct.

Invariants:
- One table lists the classes and codes of outages. Any other code is an error of its statement or its values:
  the same statement would fail again, so it is not repeated until it succeeds.
- The class of the driver's exception decides only if there is no code: psycopg calls `OperationalError` also
  what a value (54), a trigger (2F, 38, 39) or a foreign table (HV) causes.
- A reason for not publishing says whose outage it is by how it begins: it is stored and shown as text.
- One rule for every program that waits for a server at its start: it ends if its login, its database or its
  certificate is refused, and only then. One that has worked before waits: someone may be about to change a
  password.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from confluent_kafka import KafkaError


# By the first two characters, the class, or by all five.
OUTAGES: Final = {
    "08": "no connection",
    "25006": "the server is a standby now, or read-only",
    "25P03": "the server ended the session, which was idle in a transaction",
    "25P04": "the server ended the session, whose transaction took too long",
    # These two come when a session begins, before any event is known.
    "28": "the server refuses the login",
    "3D000": "the database does not exist",
    "40": "another transaction was chosen to succeed",
    "53": "no memory, disk space or connections left",
    # Of class 55 only these: others, such as a partition that is closed, stay as they are.
    "55006": "another session uses the object",
    "55P03": "another session has the lock",
    "57": "the server stops or starts, or someone canceled the statement",
    "58": "an error of the server's disk or system",
}


REGISTRY: Final = "the schema registry"
"""How the reason of an outage begins that is not Kafka's, but the schema registry's."""


def server_of(reason: str | None) -> str:
    """Return whose outage a reason for not publishing describes."""
    return REGISTRY if reason and reason.startswith(REGISTRY) else "Kafka"


def described(reason: str | None) -> str:
    """Return the reason for not publishing as a sentence."""
    server = server_of(reason)
    return f"waiting for {server}: {reason}" if server == REGISTRY else f"{server} is unavailable: {reason}"


def code_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error, of any driver or SQLAlchemy; empty if it has none."""
    driver = getattr(error, "orig", None) or error
    return str(getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None) or "")


def is_outage(error: BaseException) -> bool:
    """Return whether an error is an outage of the database."""
    if code := code_of(error):
        return code in OUTAGES or code[:2] in OUTAGES
    # Without a code it is the driver's own, by the names of PEP 249, also in SQLAlchemy. asyncpg raises an
    # OSError if there is no connection; a pooler that loses its server can cause an InternalError of psycopg.
    names = {each.__name__ for each in type(error).__mro__}
    return isinstance(error, OSError) or bool(names & {"OperationalError", "InterfaceError", "InternalError"})


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
