"""What is expected of the events of an archived day, by check.

Invariants:
- What breaks the order or the days is an ERROR; what may make a consumer fail, or is unusual, is a WARN.
- A suite has expectations for the event types of its day only: it does not grow with the event catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.config.rules import of_types
from outbox_pipelines.quality.rules import Status, rules

if TYPE_CHECKING:
    from outbox_pipelines.catalog.document import Catalog, EventType
    from outbox_pipelines.quality.expectations.sample import Sample
    from outbox_pipelines.settings import CheckSettings, MessageSettings, ProcessSettings

CHECKS: Final = {
    "ids_unique": "Whether each event has an id and a `seq` of its own, and each idempotency key one event.",
    "times_within_day": "Whether the times of all events are within the day.",
    "types_known": "Whether no name is empty and, with an event catalog, types are documented.",
    "payloads_valid": "Whether each payload matches the JSON Schema of its type in the event catalog; "
    "without one, whether it is a JSON object.",
    "delivery_in_time": "Whether half of the events, and 99 of 100, were published within the limits of the "
    "check `lag` (OUTBOX_WARN_AT, OUTBOX_ERROR_AT), and 99 of 100 without a rejection.",
    "no_dead_letters": "Whether no event of the day is a dead letter that is neither replayed nor discarded.",
    "volume_as_usual": "Whether the day has a third to three times as many events as the median of the days "
    "before.",
}
"""The checks, and what each is about."""
OWN: Final = "own_expectations"
"""The check of the user's suite."""
_FEWEST_DAYS: Final = 3
_FACTOR: Final = 3.0


def expected(settings: ProcessSettings, sample: Sample, catalog: Catalog | None) -> list[Any]:
    """Return the expectations of a day; each has its check in `meta`."""
    return [
        *_ids(),
        *_times(sample),
        *_types(sample, catalog),
        *_payloads(settings, sample, catalog),
        *_delivery(settings),
        *_volume(sample),
    ]


def _ids() -> Iterator[Any]:
    from great_expectations import expectations as gxe

    error, warn = _said("ids_unique", Status.ERROR), _said("ids_unique", Status.WARN)
    yield gxe.ExpectColumnValuesToNotBeNull(column="id", **error)
    yield gxe.ExpectColumnValuesToBeUnique(column="id", **error)
    yield gxe.ExpectColumnValuesToBeUnique(column="seq", **error)
    yield gxe.ExpectColumnValuesToBeUnique(column="idempotency_key", **warn)


def _times(sample: Sample) -> Iterator[Any]:
    from great_expectations import expectations as gxe

    from outbox_pipelines.days.partitions.calendar import bounds_of

    start, stop = bounds_of(sample.day)
    yield gxe.ExpectColumnValuesToBeBetween(
        column="created_at",
        min_value=start,
        max_value=stop,
        strict_max=True,
        **_said("times_within_day", Status.ERROR),
    )


def _types(sample: Sample, catalog: Catalog | None) -> Iterator[Any]:
    from great_expectations import expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    said = _said("types_known", Status.WARN)
    for name in ("aggregate_type", "aggregate_id", "event_type", "idempotency_key"):
        yield gxe.ExpectColumnValueLengthsToBeBetween(column=name, min_value=1, **said)
    if catalog is not None:
        yield gxe.ExpectColumnValuesToBeInSet(column="event_type", value_set=list(catalog.events), **said)
        event_type: Any = Column("event_type")
        for name, each in _documented(sample, catalog).items():
            if each.aggregate_type is not None:
                yield gxe.ExpectColumnValuesToBeInSet(
                    column="aggregate_type",
                    value_set=[each.aggregate_type],
                    row_condition=event_type == name,
                    **said,
                )


def _payloads(settings: MessageSettings, sample: Sample, catalog: Catalog | None) -> Iterator[Any]:
    from great_expectations.expectations.row_conditions import Column

    # Imported with the first suite: it defines a class of Great Expectations.
    from outbox_pipelines.quality.expectations.payload_schema import ExpectPayloadToMatchSchema

    said = _said("payloads_valid", Status.WARN)
    event_type: Any = Column("event_type")
    version: Any = Column("version")
    documented = _documented(sample, catalog)
    schemas = {name: each.payload for name, each in documented.items() if each.payload is not None}
    for name, schema in schemas.items():
        where, earlier = event_type == name, documented[name].versions
        for number, its_own in earlier.items():
            yield ExpectPayloadToMatchSchema(
                column="payload", json_schema=its_own, row_condition=where & (version == number), **said
            )
        if earlier:
            where &= version.is_not_in([*earlier])
        yield ExpectPayloadToMatchSchema(column="payload", json_schema=schema, row_condition=where, **said)
    nullable = sorted(_with_tombstones(settings, sample) - schemas.keys())
    if nullable:
        kinds, where = ["object", "null"], event_type.is_in(nullable)
        yield ExpectPayloadToMatchSchema(
            column="payload", json_schema={"type": kinds}, row_condition=where, **said
        )
    others = {"row_condition": event_type.is_not_in([*schemas, *nullable])} if schemas or nullable else {}
    yield ExpectPayloadToMatchSchema(column="payload", json_schema={"type": ["object"]}, **others, **said)


def _with_tombstones(settings: MessageSettings, sample: Sample) -> set[str]:
    """Return the event types of the day whose payload may be null."""
    pairs = set(zip(sample.frame["aggregate_type"], sample.frame["event_type"], strict=True))
    return {event_type for kind, event_type in pairs if of_types(settings, kind, event_type).tombstones}


def _documented(sample: Sample, catalog: Catalog | None) -> dict[str, EventType]:
    """Return the documented types of the day."""
    found = set(sample.frame["event_type"])
    return {} if catalog is None else {name: each for name, each in catalog.events.items() if name in found}


def _delivery(settings: CheckSettings) -> Iterator[Any]:
    from great_expectations import expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    said = _said("delivery_in_time", Status.WARN)
    # What was added to the sample would distort it.
    weight: Any = Column("weight")
    at_random = {"row_condition": weight > 0}
    (lag,) = (rule for rule in rules(settings) if rule.name == "lag")
    limits = [("latency_seconds", lag.warn, 0.5), ("latency_seconds", lag.error, 0.99), ("attempts", 0, 0.99)]
    for column, most, share in limits:
        if most is not None:
            # Not the expectation of quantiles: with numpy 2 its results cannot be stored in a project.
            yield gxe.ExpectColumnValuesToBeBetween(
                column=column, max_value=most, mostly=share, **at_random, **said
            )
    yield gxe.ExpectColumnValuesToNotBeInSet(
        column="status", value_set=["FAILED"], **_said("no_dead_letters", Status.WARN)
    )


def _volume(sample: Sample) -> Iterator[Any]:
    from great_expectations import expectations as gxe

    if len(sample.before) >= _FEWEST_DAYS:
        usual = median(sample.before)
        yield gxe.ExpectColumnSumToBeBetween(
            column="weight",
            min_value=usual / _FACTOR,
            max_value=usual * _FACTOR,
            **_said("volume_as_usual", Status.WARN),
        )


def _said(check: str, status: Status) -> dict[str, Any]:
    """Return the severity of an expectation, and the check that it belongs to."""
    severity = "critical" if status is Status.ERROR else "warning"
    return {"severity": severity, "meta": {"check": check}}
