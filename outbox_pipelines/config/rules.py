"""The settings as they apply to a type of events: its own rule, its aggregate type's, the general ones.

Invariants:
- A rule replaces single settings. Of a table (names of headers, of members) it replaces single entries.
- What decides about an event knows only its two types: equal types, equal rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Protocol, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator

from outbox_pipelines.config.message_names import read_headers, read_members
from outbox_pipelines.config.tables import as_table
from outbox_pipelines.config.topics import IllegalTopicError, TopicTemplate
from outbox_pipelines.config.types import (
    AfterDeadLetter,
    Attempts,
    FlatMembers,
    Format,
    HeaderNames,
    RetrySeconds,
    Topic,
    UriReference,
    ValueFormat,
)
from outbox_pipelines.core.secret import has_password

_Settings = TypeVar("_Settings", bound="Ruled")


class Rule(BaseModel):
    """What an event type, or an aggregate type, has of its own; None: what all have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    topic: Topic | None = None
    value_format: ValueFormat | None = None
    format: Format | None = None
    header_names: HeaderNames | None = None
    flat_members: FlatMembers | None = None
    tombstones: bool | None = None
    cloudevents_source: UriReference | None = None
    max_attempts: Attempts | None = None
    retry_seconds: RetrySeconds | None = None
    on_dead_letter: AfterDeadLetter | None = None

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_topic(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | Rule):
            raise ValueError("write a topic, or a table of settings")
        return {"topic": value} if isinstance(value, str) else value

    @field_validator("cloudevents_source")
    @classmethod
    def _has_no_password(cls, value: str | None) -> str | None:
        if value is not None and has_password(value):
            raise ValueError("has a password in it: remove it")
        return value

    @model_validator(mode="after")
    def _keeps_what_readers_look_for(self) -> Rule:
        # Who reads a topic must find both before he knows the event type.
        if renamed := {"id", "event-type"} & (self.header_names or {}).keys():
            raise ValueError(
                f"header_names renames {min(renamed)}: readers need it before they know the type: rename it "
                "for all, in OUTBOX_HEADER_NAMES"
            )
        return self


Rules = Annotated[dict[str, Rule], BeforeValidator(as_table)]


class Ruled(Protocol):
    """Settings with rules."""

    @property
    def topic(self) -> str: ...
    @property
    def event_types(self) -> dict[str, Rule]: ...
    @property
    def aggregate_types(self) -> dict[str, Rule]: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...


def check_names(rules: dict[str, Rule], others: dict[str, Rule], general: Mapping[str, Any]) -> None:
    """Raise `ValueError` where names of headers or members, also with another type's rule, are not valid."""
    for name, read in (("header_names", read_headers), ("flat_members", read_members)):
        tables = [getattr(rule, name) for rule in others.values()]
        for types, rule in rules.items():
            # Names of types are printed.
            if has_password(types):
                raise ValueError("a type's name has a password in it: write the name of a type")
            for other in ({}, *filter(None, tables)):
                try:
                    read({**general.get(name, {}), **(getattr(rule, name) or {}), **other})
                except ValueError as error:
                    raise ValueError(f"[{types}] {name}: {error}") from None


def check_formats(rules: dict[str, Rule], others: dict[str, Rule], general: Mapping[str, Any]) -> None:
    """Raise `ValueError` where a format, also with another type's rule, cannot be written."""
    for types, rule in rules.items():
        for other in (Rule(), *others.values()):
            chosen = rule.model_dump(exclude_none=True) | other.model_dump(exclude_none=True)
            try:
                check_format({**general, **chosen})
            except ValueError as error:
                raise ValueError(f"[{types}]: {error}") from None


def check_format(settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` if values of this format cannot be written with these settings."""
    chosen, shape = settings.get("format"), settings.get("value_format", "payload")
    if chosen in (None, "json"):
        return
    if shape != "payload":
        raise ValueError(
            f"format {chosen} needs value_format payload, and it is {shape}: the schema of the event catalog "
            "describes the payload alone"
        )
    for needed in ("registry_url", "catalog_file"):
        if not settings.get(needed, True):
            raise ValueError(f"format {chosen} needs OUTBOX_{needed.upper()}: set it")


def has_rules(settings: Ruled) -> bool:
    """Return whether any type has a rule."""
    return bool(settings.event_types or settings.aggregate_types)


def of_types(settings: _Settings, aggregate_type: str, event_type: str) -> _Settings:
    """Return the settings as they apply to events of these types."""
    rules = settings.aggregate_types.get(aggregate_type), settings.event_types.get(event_type)
    return _with(settings, *(rule for rule in rules if rule is not None))


def own(settings: Ruled, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the value of a setting in the rules that have it: by event type, and by aggregate type."""
    return _own(settings.event_types, name), _own(settings.aggregate_types, name)


def _own(rules: dict[str, Rule], name: str) -> dict[str, Any]:
    return {each: value for each, rule in rules.items() if (value := getattr(rule, name)) is not None}


def _with(settings: _Settings, *rules: Rule) -> _Settings:
    update: dict[str, Any] = {}
    for rule in rules:
        for name, value in rule:
            if isinstance(value, dict):
                update[name] = {**(update.get(name) or getattr(settings, name)), **value}
            elif value is not None:
                update[name] = value
    return settings.model_copy(update=update) if update else settings


class Router:
    """Topics: of the event type, or of the aggregate type, or by the template for all others."""

    def __init__(self, settings: Ruled) -> None:
        self.types = {
            "aggregate_types": list(settings.aggregate_types),
            "event_types": list(settings.event_types),
        }
        """The types that have a rule, by setting."""
        self._default = TopicTemplate(settings.topic)
        self._by_event_type, self._by_aggregate_type = (
            {name: TopicTemplate(topic) for name, topic in rules.items()} for rules in own(settings, "topic")
        )

    def topic(self, aggregate_type: str, event_type: str) -> str:
        """Return the topic; raise `IllegalTopicError` if Kafka would refuse its name."""
        template = (
            self._by_event_type.get(event_type)
            or self._by_aggregate_type.get(aggregate_type)
            or self._default
        )
        return template.topic(aggregate_type, event_type)

    def topic_or_empty(self, aggregate_type: str, event_type: str) -> str:
        """Return the topic; empty if Kafka would refuse its name."""
        try:
            return self.topic(aggregate_type, event_type)
        except IllegalTopicError:
            return ""

    def topics(self, aggregate_types: Iterable[str], event_types: Iterable[str]) -> set[str]:
        """Return the topics of events of any two of these types; that of all events, if it is one."""
        ones, others = {"", *aggregate_types}, {"", *event_types}
        return {self.topic_or_empty(one, other) for one in ones for other in others} - {""}

    @property
    def patterns(self) -> list[str]:
        """Shell patterns, one of which every topic matches."""
        templates = (self._default, *self._by_event_type.values(), *self._by_aggregate_type.values())
        return sorted({template.pattern for template in templates})
