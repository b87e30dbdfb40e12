"""What `outbox status --json` prints is what `outbox status --json-schema` describes."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outbox_pipelines.core import table_locks
from outbox_pipelines.debezium.connector_state import Connector, Task
from outbox_pipelines.quality.measurements import Measurements, OpenReplay, ShardStatus
from outbox_pipelines.quality.slots import OtherSlot, Slots
from outbox_pipelines.relay.fleet.summary import Summary
from tests.existing import textbook
from tests.quality.test_measurements import BEGIN, _fill, _park
from tests.schema.servers import Database


@pytest.fixture
def validator(database: Database) -> jsonschema.Draft202012Validator:
    schema = json.loads(database.outbox("status", "--json-schema").output)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _printed(database: Database, *options: str, exit_code: int = 0, **environment: str) -> Any:
    done = database.outbox("status", "--json", *options, **environment)
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def _unknown(validator: jsonschema.Draft202012Validator, shown: Any) -> None:
    """The document is valid, and no object in it may have another member."""
    validator.validate(shown)
    objects = [shown]
    while objects:
        each = objects.pop()
        if isinstance(each, list):
            objects += each
        elif isinstance(each, dict):
            # Counts by reason have any member.
            objects += [value for name, value in each.items() if not name.endswith("reasons")]
            each["a_new_member"] = {}
            assert not validator.is_valid(shown), each
            del each["a_new_member"]


def test_an_outbox(database: Database, validator: jsonschema.Draft202012Validator) -> None:
    """Guards against a program that reads members which are gone, renamed, or of another type."""
    fresh = _printed(database)
    assert fresh["version"] == 1
    _unknown(validator, fresh)
    _fill(database, 20)
    _park(database, "1", "failed", error="too large")
    _park(database, "2", "retrying", "waiting", error="rejected")
    database.rows("UPDATE outbox_shards SET heartbeat = now(), breaker = 'open', breaker_reason = 'down'")
    database.rows(BEGIN)
    shown = _printed(database)
    assert (shown["dead_letters"], shown["shards"][0]["backlog"]) == (1, 20)
    assert [each["state"] for each in shown["replays"]] == ["running"]
    _unknown(validator, shown)
    _unknown(validator, _printed(database, "--all"))


def test_an_existing_table(
    database: Database, validator: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    """Guards against a description of the append-only outbox alone."""
    database.rows(textbook.PUBLISHED_AT)
    shown = _printed(database, OUTBOX_TABLE=json.dumps(tomllib.loads(textbook.PUBLISHED_AT_MAPPING)))
    assert (shown["version"], shown["table"]) == (1, "public.events")
    _unknown(validator, shown)


def test_what_cannot_be_read(
    database: Database, validator: jsonschema.Draft202012Validator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against no document, or one of another form, when a program needs it most."""
    away = replace(database, dsn="host=127.0.0.1 port=1 dbname=shop")
    shown = _printed(away, exit_code=2)
    assert "cannot connect to the database" in shown["error"]
    _unknown(validator, shown)
    shown = _printed(away, "--all", exit_code=2)
    assert shown[0]["status"] == "unavailable"
    _unknown(validator, shown)
    monkeypatch.setattr(table_locks, "LOCK_PATIENCE", 0.5)
    with database.connect(autocommit=False) as other:
        other.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        shown = _printed(database, exit_code=2)
    assert "has locked outbox" in shown["error"]
    validator.validate(shown)


@pytest.mark.parametrize(
    "of", [Measurements, ShardStatus, OpenReplay, Slots, OtherSlot, Connector, Task, Summary]
)
def test_every_member_is_described(validator: jsonschema.Draft202012Validator, of: type) -> None:
    """Guards against a new member, also of what these states do not have: a slot, a connector."""
    described = validator.schema["$defs"][of.__name__]
    assert {field.name for field in fields(of)} == described["properties"].keys() - {"version", "checks"}
    assert set(described["required"]) == described["properties"].keys()
