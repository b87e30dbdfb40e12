"""The schemas of the event catalog with their ids in the schema registry, which values are framed with.

Invariants:
- The relay registers nothing. An event has the id of its version's schema in the relay's own event catalog,
  so that the same event always gives the same message, whatever is registered later.
- All ids are asked for before the first event is framed, and kept: an outage later concerns only types whose
  schema is not registered. Those are asked for again when an event is tried alone.
- A call is answered in a limited time; what takes longer is continued by the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container
from typing import Final

from outbox_pipelines.catalog.document import require_catalog
from outbox_pipelines.catalog.subjects import Subjects
from outbox_pipelines.core.outages import REGISTRY
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.registry import Registry, Subject
from outbox_pipelines.relay.kafka.message import EncodingError, Schema, UnregisteredError
from outbox_pipelines.settings import MessageSettings

_CALL_SECONDS: Final = 3.0
_SECONDS: Final = 5.0
# Between two questions about a schema that is missing, or to a registry that has just not answered.
_AGAIN_SECONDS: Final = 1.0
# A subject and a document in it.
_Document = tuple[str, str]


class SchemaIds:
    """The ids, for all threads of a relay.

    Raises:
        SetupError: the event catalog cannot be read, or the registry's client is not installed.
    """

    def __init__(self, settings: MessageSettings) -> None:
        self._subjects = Subjects(require_catalog(settings), settings)
        self._registry = Registry(settings, seconds=_CALL_SECONDS)
        self._lock = threading.Lock()
        self._ids: dict[_Document, int] = {}
        self._asked_at: dict[_Document, float] = {}
        """Of those that have been answered."""
        self._failure: tuple[float, SetupError] | None = None

    @property
    def versioned(self) -> Container[str]:
        """The event types of which each version has a schema of its own."""
        return self._subjects.newest

    def connect(self) -> None:
        """Ask for all ids that have not been asked for.

        Raises:
            UnavailableError: the registry does not answer, or not soon enough.
            SetupError: what answers is no registry.
        """
        with self._lock:
            until = time.monotonic() + _SECONDS
            for subject in self._subjects.of_event_types.values():
                if _document(subject) not in self._asked_at:
                    if time.monotonic() > until:
                        raise UnavailableError(
                            f"{REGISTRY} has answered for {len(self._asked_at)} of "
                            f"{len(self._subjects.of_event_types)} schemas in {_SECONDS:.0f} s"
                        )
                    self._ask(subject)

    def answers(self) -> bool:
        """Return whether all ids have been asked for, now or before."""
        try:
            self.connect()
        except SetupError:
            return False
        return True

    def known(self, aggregate_type: str, event_type: str, version: str | None = None) -> Schema:
        """Return the schema of these types, and its id.

        Args:
            version: of events of a type that is `versioned`.

        Raises:
            EncodingError: it has none; `UnregisteredError` where it only has to be registered.
            UnavailableError: the registry has not answered yet.
        """
        name, subject = self._subject(aggregate_type, event_type, version)
        if _document(subject) not in self._asked_at:
            try:
                self.connect()
            except UnavailableError:
                raise
            except SetupError as error:
                # It was a registry when the relay started: what is there instead is no fault of an event.
                raise UnavailableError(str(error)) from None
        if (schema_id := self._ids.get(_document(subject))) is None:
            raise UnregisteredError(
                f"the schema of {name} is not registered under the subject {subject.name}: run `outbox "
                "catalog register`; the event is then published automatically"
            )
        return Schema(schema_id, subject.text, subject.all_imports(), subject.message)

    def asked(self, aggregate_type: str, event_type: str, version: str | None = None) -> Schema:
        """Return the same; ask again for a schema that was not registered."""
        _, subject = self._subject(aggregate_type, event_type, version)
        with self._lock:
            asked_at = self._asked_at.get(_document(subject))
            if (
                asked_at is not None
                and _document(subject) not in self._ids
                and time.monotonic() - asked_at > _AGAIN_SECONDS
            ):
                try:
                    self._ask(subject)
                except UnavailableError:
                    raise
                except SetupError as error:
                    raise UnavailableError(str(error)) from None
        return self.known(aggregate_type, event_type, version)

    def _subject(self, aggregate_type: str, event_type: str, version: str | None) -> tuple[str, Subject]:
        """Return the name of a version of an event type, and its subject."""
        newest = self._subjects.newest.get(event_type)
        name = event_type if version is None or version == str(newest) else f"{event_type}@{version}"
        subject = self._subjects.of_event_types.get(name)
        # A writer may give a type the name of another one's version.
        if subject is None or subject.event_type != event_type:
            unknown = "is not in the event catalog, or is retired there"
            if name != event_type:
                unknown = "is not in the event catalog: list the version there"
            why = self._subjects.missing.get(name, unknown)
            raise EncodingError(f"{name} {why}; its format needs a schema")
        own = self._subjects.name(aggregate_type, event_type)
        if own != subject.name:
            raise EncodingError(
                f"the subject of {event_type} of a {aggregate_type} would be {own}, and the schema in the "
                f"event catalog belongs under {subject.name}: correct aggregate_type there, or the topic"
            )
        return name, subject

    def _ask(self, subject: Subject) -> None:
        # Many events are encoded in a row: each of them would wait for the same silence.
        if self._failure is not None and time.monotonic() - self._failure[0] < _AGAIN_SECONDS:
            raise self._failure[1]
        try:
            schema_id = self._registry.find(subject)
        except SetupError as error:
            self._failure = time.monotonic(), error
            raise
        self._asked_at[_document(subject)] = time.monotonic()
        if schema_id is not None:
            self._ids[_document(subject)] = schema_id


def _document(subject: Subject) -> _Document:
    return subject.name, subject.text
