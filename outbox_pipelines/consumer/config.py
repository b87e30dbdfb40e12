"""The plan of a consumer, and checks of the arguments in it.

Invariants:
- A wrong argument is rejected by its name; so is a number given as text, as from the environment.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from outbox_pipelines.consumer.blocking_calls import Blocking, at_once
from outbox_pipelines.consumer.dedupe_table import DedupeTable
from outbox_pipelines.consumer.errors import Policy
from outbox_pipelines.consumer.kafka_clients import DeadLetterTopic
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer.references import Reference

# Bytes; the same as in sql/consumer.
_LONGEST_NAME: Final = 500


class Cache(Protocol):
    """A cache of handled events; see `cache`."""

    def known(self, source: str, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]: ...

    def remember(self, source: str, ids: Sequence[uuid.UUID]) -> None: ...


class BodyReader(Protocol):
    """What reads bodies of large payloads: `outbox_pipelines.bodies.Bodies`."""

    def get(self, reference: Reference) -> bytes: ...


# What reads the body of a framed value; None: it is JSON.
Read = Callable[[bytes], Any]


class SchemaReader(Protocol):
    """What reads framed values: `outbox_pipelines.registry.SchemaRegistry`."""

    def knows(self, frame: bytes) -> bool: ...

    def reader(self, frame: bytes) -> Read | None: ...


class PayloadReader(Protocol):
    """What decrypts payloads: `outbox_pipelines.subject_keys.SubjectKeys`."""

    def all_decrypted(self, payloads: Sequence[Any]) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a consumer; see `Consumer` for their meanings."""

    source: str
    group: str
    max_attempts: int
    retry_seconds: float
    blocks: bool
    by_key: bool
    limit: Callable[[], AbstractAsyncContextManager[object]]
    pause: Callable[[float], Awaitable[None]]
    is_stopped: Callable[[], bool]
    stay: Callable[[], Awaitable[None]]
    """Called between two calls of handlers: poll Kafka if it was not polled for a while."""
    blocking: Blocking = at_once
    """Calls what blocks: Kafka's clients, the cache."""
    waits: bool = True
    """Whether a start waits for a database that is unavailable."""
    shared_seconds: float = 1.0
    """How long calls that share a transaction may take before its events are handled one by one instead."""
    copies: DeadLetterTopic | None = None
    cache: Cache | None = None
    body_of: Callable[[Reference], Awaitable[bytes]] | None = None
    """Reads the body of a large payload; None: handlers get the reference."""
    schema_of: Callable[[bytes], Awaitable[Read | None]] | None = None
    """Asks the schema registry by the frame of a value; None: framed values are JSON."""
    decrypt: Callable[[Sequence[Any]], Awaitable[list[Any]]] | None = None
    """Decrypts payloads; None: members stay encrypted."""
    dedupe_table: DedupeTable | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    on_error: Mapping[type[BaseException], Policy] = field(default_factory=dict)
    outage_after: int = 0
    measures: bool = False
    """Whether metrics are read: only then is the inbox measured."""


def require_whole(name: str, given: Any, least: int, most: int | None = None, *, of: str = "") -> int:
    """Return a whole number from `least` to `most`; `of` says in the error what is counted.

    Raises:
        SetupError: it is not one.
    """
    fits = isinstance(given, int) and not isinstance(given, bool) and given >= least
    if not fits or (most is not None and given > most):
        asked = f"{least} or more" if most is None else f"{least} to {most:,}"
        raise SetupError(f"{name} is {given!r}: give {asked}{of and ' ' + of}, as an int")
    return int(given)


def require_number(name: str, given: Any) -> float:
    """Return a number.

    Raises:
        SetupError: it is not one.
    """
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise SetupError(f"{name} is {given!r}: give a number of seconds, as an int or a float")
    return given


def require_one_way(*ways: object) -> None:
    """Raise `SetupError` unless one way to the database is given."""
    if sum(way is not None for way in ways) != 1:
        raise SetupError("give exactly one of dsn, connect and session: the database of the handlers' tables")


def require_short(name: str, given: str) -> None:
    """Raise `SetupError` for a name that the indexes of the consumer's tables may have no room for."""
    if (size := len(given.encode(errors="replace"))) > _LONGEST_NAME:
        raise SetupError(f"{name} has {size} bytes, more than {_LONGEST_NAME}: give a shorter name")


def require_one_of(name: str, given: str | None, *allowed: str) -> str:
    """Return what is given, by default the first."""
    if given not in (None, *allowed):
        raise SetupError(f"{name} is {given!r}: give {' or '.join(allowed)}")
    return given or allowed[0]


def checked_policies(given: Mapping[type[BaseException], Policy]) -> Mapping[type[BaseException], Policy]:
    """Return `on_error`, or raise `SetupError`."""
    for error, policy in given.items():
        if not (isinstance(error, type) and issubclass(error, BaseException)):
            raise SetupError(f"on_error has {error!r}: give exception classes, such as ConnectionError")
        require_one_of(f"on_error of {error.__name__}", policy, "retry", "dead_letter", "outage")
    return given


def checked_table(given: DedupeTable | None) -> DedupeTable | None:
    """Return `dedupe_table`, or raise `SetupError`."""
    if given is not None and not isinstance(given, DedupeTable):
        raise SetupError(
            f'dedupe_table is {given!r}: write for example DedupeTable("public.processed_events")'
        )
    return given


def body_getter(
    given: BodyReader | None, *, is_asynchronous: bool
) -> Callable[[Reference], Awaitable[bytes]] | None:
    """Return what reads a body, in a thread if there is an event loop; or raise `SetupError`."""
    if given is None:
        return None
    if not hasattr(given, "large"):
        raise SetupError(f'bodies is {given!r}: write for example Bodies("s3://bucket/path")')
    blocking: Blocking = asyncio.to_thread if is_asynchronous else at_once
    return partial(blocking, given.get)


def schema_getter(
    given: SchemaReader | None, table: DedupeTable | None, *, is_asynchronous: bool
) -> Callable[[bytes], Awaitable[Read | None]] | None:
    """Return what asks for a schema, in a thread if there is an event loop; or raise `SetupError`."""
    if given is None:
        return None
    if not hasattr(given, "reader"):
        raise SetupError(f'registry is {given!r}: write for example SchemaRegistry("https://registry:8081")')
    if table is not None and table.needs_payload:
        raise SetupError(
            "dedupe_table uses the payload, which with a registry is read after that table: leave out one"
        )

    async def asked(frame: bytes) -> Read | None:
        if given.knows(frame) or not is_asynchronous:
            return given.reader(frame)
        return await asyncio.to_thread(given.reader, frame)

    return asked


def decrypter(
    given: PayloadReader | None, *, is_asynchronous: bool
) -> Callable[[Sequence[Any]], Awaitable[list[Any]]] | None:
    """Return what decrypts payloads, in a thread if there is an event loop; or raise `SetupError`."""
    if given is None:
        return None
    if not hasattr(given, "all_decrypted"):
        raise SetupError(f'keys is {given!r}: write for example SubjectKeys("postgresql://app@keys/keys")')
    blocking: Blocking = asyncio.to_thread if is_asynchronous else at_once
    return partial(blocking, given.all_decrypted)


def checked_origins(given: Mapping[str, str]) -> Mapping[str, str]:
    """Return `origins`, or raise `SetupError`."""
    if not isinstance(given, Mapping):
        raise SetupError(f'origins is {given!r}: write for example {{"order-events": "orders"}}')
    for topic, origin in given.items():
        if not isinstance(origin, str) or not origin:
            raise SetupError(f'origins has {origin!r} for {topic}: write for example {{"{topic}": "orders"}}')
    return given
