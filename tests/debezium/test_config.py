"""The connector's configuration: for our table, for an existing one, and what is refused."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from outbox_pipelines.debezium.connector_config import connector, slot_name
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import load_settings

ROUTER = "transforms.outbox."
TEXTBOOK = """\
name = "shop.domain_events"
order = "created_at"
[columns]
id = "event_id"
payload = "body"
aggregate_type = "aggregatetype"
aggregate_id = "aggregateid"
event_type = "type"
published_at = "published_at"
"""


def _config(dsn: str = "postgresql://relay@db:5433/shop", **given: Any) -> dict[str, str]:
    settings = load_settings(dsn=dsn, **given)
    return connector(settings, slot="debezium_shop", publication="pub", password="${env:PASSWORD}")


def test_our_table() -> None:
    found = _config()
    assert found["table.include.list"] == "public.outbox"
    assert (found["database.hostname"], found["database.port"]) == ("db", "5433")
    assert found["database.password"] == "${env:PASSWORD}"
    assert (found["slot.name"], found["publication.name"]) == ("debezium_shop", "pub")
    assert found[ROUTER + "route.topic.replacement"] == "${routedByValue}-events"
    assert found[ROUTER + "table.fields.additional.placement"] == (
        "event_type:header:event-type,aggregate_type:header:aggregate-type,"
        "idempotency_key:header:idempotency-key,correlation_id:header:correlation-id,"
        "causation_id:header:causation-id,traceparent:header:traceparent,version:header:version"
    )
    assert all(isinstance(value, str) for value in found.values())


def test_a_textbook_table() -> None:
    """Guards against columns by our names in a table that calls them otherwise."""
    found = _config(
        table=tomllib.loads(TEXTBOOK),
        topic="domain.{event_type}",
        header_names="id=event-id,aggregate-type=,aggregate-id=key",
    )
    assert found["table.include.list"] == "shop.domain_events"
    routed = {name.removeprefix(ROUTER): value for name, value in found.items() if name.startswith(ROUTER)}
    assert routed == {
        "type": "io.debezium.transforms.outbox.EventRouter",
        "route.by.field": "type",
        "route.topic.replacement": "domain.${routedByValue}",
        "table.field.event.id": "event_id",
        "table.field.event.key": "aggregateid",
        "table.field.event.payload": "body",
        "table.expand.json.payload": "false",
        "table.fields.additional.placement": "event_id:header:event-id,type:header:event-type,"
        "aggregateid:header:key",
    }
    # The router calls one header `id`, whatever it is told.
    assert found["transforms"] == "outbox,withoutId"
    assert found["transforms.withoutId.headers"] == "id"


def test_names_of_slots_are_readable_and_unique() -> None:
    """Guards against two connectors that share a slot."""
    described = tomllib.loads(TEXTBOOK.replace("shop.domain_events", "b.c"))
    own, table = load_settings(db_schema="c"), load_settings(table=described)
    assert slot_name(own, "shop") == "debezium_shop_c"
    names = {
        slot_name(own, "a_b"),
        slot_name(load_settings(db_schema="b_c"), "a"),
        slot_name(table, "a"),
        slot_name(load_settings(db_schema="Größe " + "x" * 57), "a"),
        slot_name(load_settings(db_schema="größe " + "x" * 57), "a"),
    }
    assert len(names) == 5
    assert all(len(name) <= 63 and name.isascii() and name.islower() for name in names)


def test_other_places_of_the_database() -> None:
    settings = load_settings(
        dsn="host=/run/postgresql dbname='the shop' user=relay sslmode=verify-full sslrootcert=/ca",
        db_schema="a-b",
        delivery="exactly_once",
        create_topics=True,
    )
    found = connector(settings, slot="s", publication="p", password="", host="db", port=6000, user="cdc")
    assert "database.password" not in found
    assert found["table.include.list"] == r"a\-b.outbox"
    assert found["exactly.once.support"] == "required"
    assert found["topic.creation.default.partitions"] == "8"
    database = {name: value for name, value in found.items() if name.startswith("database.")}
    assert database == {
        "database.hostname": "db",
        "database.port": "6000",
        "database.user": "cdc",
        "database.dbname": "the shop",
        "database.sslmode": "verify-full",
        "database.sslrootcert": "/ca",
    }


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"value_format": "envelope"}, "set OUTBOX_VALUE_FORMAT=payload"),
        ({"tombstones": True}, "OUTBOX_TOMBSTONES"),
        ({"topic": "{aggregate_type:lower}-events"}, "without :lower"),
        ({"topic": "{aggregate_type}-{event_type}"}, "alone"),
        ({"header_names": "id=event-id,aggregate-id=id"}, "OUTBOX_HEADER_NAMES"),
        ({"header_names": "version=a:b"}, "without a comma and a colon"),
        ({"dsn": "host=/run/postgresql dbname=shop"}, "add --host"),
        ({"dsn": "postgresql://relay@a,b/shop"}, "add --host"),
    ],
    ids=str,
)
def test_what_debezium_cannot_make_equal_is_refused(given: dict[str, Any], remedy: str) -> None:
    """Guards against consumers that get other messages after a change of the engine."""
    with pytest.raises(SetupError, match=remedy) as refused:
        _config(**given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ('trace_id = "trace"', "remove trace_id from"),
        ('headers = "more"', "remove headers from"),
        ('correlation_id = "a,b"', "without comma"),
    ],
    ids=str,
)
def test_columns_that_the_router_cannot_take_are_refused(line: str, remedy: str) -> None:
    with pytest.raises(SetupError, match=remedy):
        _config(table=tomllib.loads(TEXTBOOK + line))


def test_a_table_without_aggregate_types_is_refused() -> None:
    text = TEXTBOOK.replace('aggregate_type = "aggregatetype"\n', "")
    with pytest.raises(SetupError, match="add such a column"):
        _config(table=tomllib.loads('aggregate_type = "order"\n' + text))


@pytest.mark.parametrize(
    "url",
    ["connect:8083", "ftp://connect", "http://", "http://a b", "http://u:xyzzy?y@connect", "http://a:x"],
)
def test_addresses_of_connect_are_checked(url: str) -> None:
    with pytest.raises(SetupError, match="OUTBOX_CONNECT_URL") as refused:
        load_settings(connect_url=url)
    assert "xyzzy" not in str(refused.value)
