"""What an event catalog may contain, and how errors in it are reported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outbox_pipelines.catalog.document import read_catalog, require_catalog
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import load_settings
from tests.catalog.conftest import CATALOG, Write

ENTRY = "events: {e: {description: d, producer: p, owner: o, %s}}"


def test_what_is_documented_is_read(write: Write) -> None:
    """Guards against an entry that is lost on the way, and wrong defaults."""
    placed, shipped = read_catalog(write(CATALOG)).events.values()
    assert (placed.topic, placed.consumers) == ("order-events", ("billing", "shipping"))
    assert (placed.payload or {})["required"] == ["total"]
    assert (shipped.topic, shipped.consumers, shipped.payload) == (None, (), None)
    assert (shipped.lifecycle, shipped.aggregate_type) == ("active", None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "documents no events: write events:"),
        ("events: [a]", "documents no events: write events:"),
        ("events: {e: {", r"is not YAML \(.*\): see docs/catalog.md"),
        ("x: 1\n" + ENTRY % "topic: t", "x is not known: the only top-level entry is events:"),
        ("events: {e: d}", "e is not a mapping: write entries below it: description, producer"),
        ("events: {e: {producer: p, owner: o}}", "e: description is missing: add it"),
        ("events: {e: {description: d, producer: '', owner: o}}", "e: producer is empty"),
        (ENTRY % "lifecycle: activ", "e: lifecycle is 'activ': input should be 'proposed', 'active'"),
        (ENTRY % "consumer: [a]", "e: consumer is not known: the entries are .*, schema$"),
        (ENTRY % "consumers: billing", r"e: consumers is not a list: write it as \[billing, shipping\]"),
        (ENTRY % "consumers: [1]", "e: consumers 0 is not a text: write it in quotes"),
        (ENTRY % "topic: a/b", "e: topic is 'a/b': a topic name consists of 1 to 249"),
        (ENTRY % "retired_on: 2026-11-01", "e: has retired_on, but its lifecycle is not retired"),
        (
            ENTRY % "lifecycle: retired, retired_on: soon",
            "e: retired_on is not a day: write a date such as 2026-11-21",
        ),
        (
            ENTRY % "aggregate_id: id",
            "e: aggregate_id is 'id': name a member that its schema lists as required",
        ),
        (ENTRY % "version: 0", "e: version is 0: input should be greater than or equal to 1"),
        (ENTRY % "versions: [1]", "e: versions is not a mapping: write 1: and the schema of that version"),
        (ENTRY % "version: 2, versions: {one: {}}", "e: versions one .*: input should be a valid integer"),
        (ENTRY % "version: true", "e: version is True: input should be a valid integer"),
        (ENTRY % "version: 2.0", "e: version is 2.0: input should be a valid integer"),
        (
            ENTRY % "version: 2, versions: {1.0: {}}",
            "e: versions 1.0 is '1.0': input should be a valid integer",
        ),
        (ENTRY % "version: 2, versions: {01: {}}", "e: versions 01 .*: input should be a valid integer"),
        (ENTRY % "version: 2, versions: {true: {}}", "e: versions true .*: input should be a valid integer"),
        (ENTRY % "version: 2, versions: {1: {type: x}}", "e: versions 1: type is not a JSON Schema"),
        (ENTRY % "version: 2, versions: {1: none.json}", "e: versions 1 none.json cannot be read"),
        (ENTRY % "versions: {1: {}}", "e: versions has 1, and version is None: give schema a higher one"),
        (ENTRY % "version: 2, versions: {2: {}}", "e: versions has 2, and version is 2: give schema"),
        (
            (ENTRY % "version: 2, versions: {1: {}}")[:-1]
            + ", e@1: {description: d, producer: p, owner: o}}",
            "e@1 is a version of e: rename this event type",
        ),
        (ENTRY % "deliver_after: true", "e: deliver_after is not a duration: write PT1H, or P2D"),
        (ENTRY % "deliver_after: 60", "e: deliver_after is not a duration: write PT1H, or P2D"),
        (ENTRY % "deliver_after: soon", "e: deliver_after is not a duration: write PT1H, or P2D"),
        (ENTRY % "deliver_after: PT0S", "e: deliver_after is .*: input should be greater than 0"),
        (ENTRY % "owner: a", "has owner twice, again in line 1: keep one of them"),
        (ENTRY % "schema: [a]", "e: schema is not a mapping: write a JSON Schema"),
        (ENTRY % "schema: {type: objekt}", "e: schema: type is not a JSON Schema: 'objekt' is not valid"),
        (ENTRY % "schema: {minimum: .nan}", "e: schema: is not JSON"),
        (
            ENTRY % 'schema: {$ref: "https://example.com/order.json"}',
            r"e: schema: refers to https://example.com/order.json, which is not in the schema: "
            r"put it under \$defs",
        ),
        (ENTRY % 'schema: {$ref: "#/$defs/none"}', r"e: schema: refers to #/\$defs/none"),
        (ENTRY % "schema: none.json", r"e: schema none.json cannot be read \(.*\): name a JSON file"),
    ],
)
def test_a_wrong_event_catalog_is_one_line_that_helps(write: Write, text: str, says: str) -> None:
    """Guards against mistakes that surface as a stack of pydantic's, or not at all."""
    path = write(text)
    with pytest.raises(SetupError, match=rf"^OUTBOX_CATALOG_FILE={re.escape(str(path))}: {says}") as refused:
        require_catalog(load_settings(catalog_file=path))
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Guards against checks that pass because there is nothing to check."""
    with pytest.raises(SetupError, match=r"^OUTBOX_CATALOG_FILE=.* cannot be read .*: name a YAML file"):
        require_catalog(load_settings(catalog_file=tmp_path / "none.yaml"))


def test_a_wrong_event_catalog_stops_no_other_command(write: Write) -> None:
    """Guards against a relay that ends because of a typo in a description."""
    assert load_settings(catalog_file=write("events: [")).catalog_file is not None


def test_a_schema_may_lie_in_a_file_beside_it(write: Write, tmp_path: Path) -> None:
    """Guards against paths that count from wherever the command is started."""
    (tmp_path / "schemas").mkdir()
    schema = {"type": "object", "required": ["total"]}
    (tmp_path / "schemas" / "order.json").write_text(json.dumps(schema))
    assert read_catalog(write(ENTRY % "schema: schemas/order.json")).events["e"].payload == schema


def test_yaml_does_not_convert_words(write: Write) -> None:
    """Guards against YAML's dates, and its `on` and `no` that are booleans, within schemas."""
    schema = "schema: {properties: {on: {const: 2026-11-21}, no: {type: string}}}"
    assert read_catalog(write(ENTRY % schema)).events["e"].payload == {
        "properties": {"on": {"const": "2026-11-21"}, "no": {"type": "string"}}
    }
