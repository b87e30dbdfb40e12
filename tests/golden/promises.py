"""What programs of users build on, as lines of text: `tests/golden` has a file of them for each part.

Invariants:
- Nothing here needs a server, a clock or a file of the machine.
- A line for each name, so that the difference of two files lists what is new and what is gone. What only
  people read is left out: descriptions, messages, pages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import date
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, is_typeddict

import click
import dagster as dg
import psycopg
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from outbox_pipelines import errors
from outbox_pipelines.catalog import avro_schemas
from outbox_pipelines.cli.main import cli
from outbox_pipelines.config.sections import SECTIONS
from outbox_pipelines.consumer import prometheus as of_consumers
from outbox_pipelines.core.event import Event
from outbox_pipelines.days.archive import manifest, store
from outbox_pipelines.defs import outbox_definitions
from outbox_pipelines.defs.component import OutboxComponent
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.formats.protobuf import descriptors
from outbox_pipelines.relay.kafka.message import Encoder, Headers, Schema, Value
from outbox_pipelines.relay.parking.prober import dead_letter
from outbox_pipelines.relay.telemetry import exporter
from outbox_pipelines.settings import Settings, load_settings, variable
from outbox_pipelines.writer.bytes_payload import BytesPayload
from tests.defs.conftest import EVERYTHING, OF_TABLE
from tests.formats.protobuf.shop import MESSAGE, descriptor_set

FOLDER: Final = Path(__file__).parent
_LISTED: Final = re.compile(
    r"^\.\. auto\w+:: ([\w.]+)\.(\w+)(?:\(\))?\n(   :members:.*\n)?(?:   :inherited-members:\n)?"
    r"(?:   :exclude-members: (.*)\n)?",
    re.MULTILINE,
)


def commands() -> Iterator[str]:
    """Every command with its arguments, and every option with its type."""
    yield from _command(cli, "outbox")


def _command(command: click.Command, path: str) -> Iterator[str]:
    options = [each for each in command.params if isinstance(each, click.Option)]
    arguments = [each.make_metavar(click.Context(command)) for each in command.params if each not in options]
    yield " ".join([path, *arguments])
    yield from sorted(
        f"{path} {'/'.join([*each.opts, *each.secondary_opts])}: {_value(each)}" for each in options
    )
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _command(command.commands[name], f"{path} {name}")


def _value(option: click.Option) -> str:
    kind = "flag" if option.is_flag else option.type.name
    if isinstance(option.type, click.Choice):
        kind = "|".join(map(str, option.type.choices))
    return f"{kind}{', repeatable' if option.multiple else ''}{', required' if option.required else ''}"


def exit_codes() -> Iterator[str]:
    """The exit code of a command that ends with each error."""
    ours = (each for each in vars(errors).values() if isinstance(each, type))
    refusals = [each for each in ours if issubclass(each, errors.SetupError)]
    for each in (*refusals, click.UsageError, psycopg.OperationalError):

        def fail(error: type[Exception] = each) -> None:
            raise error("it failed")

        group = type(cli)("outbox", commands={"fail": click.Command("fail", callback=fail)})
        yield f"{each.__name__} {CliRunner().invoke(group, ['fail']).exit_code}"
    yield f"success {CliRunner().invoke(cli, ['--version']).exit_code}"


def messages() -> Iterator[str]:
    """Value and headers of an event in each shape and format, of a replayed one, and of a dead letter."""
    payload = '{"total": 1.50, "note": "ü"}'
    metadata = {
        "created-at": "2026-11-27T08:00:00.123456Z",
        "idempotency-key": "key-1",
        "correlation-id": "correlation-1",
        "causation-id": "causation-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "version": 2,
        "headers": {"tenant": "7", "tracestate": "a=1"},
    }
    identity = ("0198c5a0-0000-7000-8000-000000000001", "order", "42", "order.placed")
    event = Event(7, *identity, payload, json.dumps(metadata))
    encode = Encoder(load_settings()).encode
    marks = {"replay-id": "replay-1", "replayed-at": "2026-11-28T08:00:00.000+00:00"}
    for shape in ("payload", "flat", "envelope", "cloudevents"):
        settings = load_settings(value_format=shape, cloudevents_source="shop")
        yield from _message(shape, *Encoder(settings).encode(event))
        yield from _message(f"{shape}, replayed", *Encoder(settings, marks=marks).encode(event))
    yield from _message("bytes", *encode(event._replace(payload=BytesPayload(b"\0\1", "image/png").text())))
    with_tombstones = Encoder(load_settings(tombstones=True))
    yield from _message("tombstone", *with_tombstones.encode(event._replace(payload="null")))
    yield from _message("dead letter", *dead_letter(event, encode, "order-events", "MSG_SIZE_TOO_LARGE", 3))
    for name, schema, fitting in _formats(payload):
        for framing in ("value", "header"):
            framed = _framed(name, framing, schema).encode(event._replace(payload=fitting))
            yield from _message(f"{name}, {framing}", *framed)


def _framed(name: str, framing: str, schema: Schema) -> Encoder:
    registry = {
        "registry_framing": framing,
        "registry_url": "http://registry",
        "catalog_file": "catalog.yaml",
    }
    return Encoder(load_settings(format=name, **registry), lambda *_: schema)


def _formats(payload: str) -> Iterator[tuple[str, Schema, str]]:
    """Each format with a schema, a schema, and a payload that fits it."""
    yield "json_schema", Schema(5, "{}"), payload
    members = {"total": {"type": "number"}, "note": {"type": "string"}}
    derived = avro_schemas.document("order.placed", {"type": "object", "properties": members})
    yield "avro", Schema(5, derived), payload
    file = descriptors.file_of(descriptor_set(), MESSAGE)
    yield "protobuf", Schema(5, file.text, descriptors.texts_of(file), MESSAGE), '{"n": 5}'


def _message(name: str, value: Value, headers: Headers) -> Iterator[str]:
    yield f"{name}: value {value!r}"
    yield f"{name}: headers {', '.join(f'{header}={text!r}' for header, text in headers)}"


def status() -> Iterator[str]:
    """The members of what `outbox status --json` prints."""
    schema = json.loads((files("outbox_pipelines.quality") / "status.schema.json").read_text())
    yield f"document: {_type(schema)}"
    yield from _members("", schema)


def _members(name: str, schema: dict[str, Any]) -> Iterator[str]:
    """Each member of a JSON Schema's objects, with its type."""
    for each, definition in {name: schema, **schema.get("$defs", {})}.items():
        required = definition.get("required", ())
        for member, given in definition.get("properties", {}).items():
            yield f"{each}.{member}: {_type(given)}{'' if member in required else ', optional'}"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(map(_type, several))
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return " | ".join(map(repr, values))
    kinds = schema.get("type", "any")
    if kinds == "array" and "prefixItems" in schema:
        return f"[{', '.join(map(_type, schema['prefixItems']))}]"
    if kinds == "array":
        return f"[{_type(schema.get('items', {}))}, …]"
    if isinstance(more := schema.get("additionalProperties"), dict):
        return f"{{…: {_type(more)}}}"
    kind = kinds if isinstance(kinds, str) else " | ".join(kinds)
    return f"{kind} ({schema['format']})" if "format" in schema else kind


def metrics() -> Iterator[str]:
    """The metrics of relays and consumers, with their labels."""
    counted = vars(exporter.Families(CollectorRegistry()))
    del counted["is_ready"]
    read: list[Any] = [exporter.configured({}), *exporter.families([])]
    for family in (*counted.values(), *read, *of_consumers._families().values()):
        kind = getattr(family, "type", None) or family._type
        name = getattr(family, "name", None) or family._name
        yield f"{name}{'_total' if kind == 'counter' else ''}{{{', '.join(family._labelnames)}}}: {kind}"


def dagster() -> Iterator[str]:
    """Keys of assets and checks, names of jobs, their ops and settings, schedules and sensors."""
    for name, given in (("outbox", EVERYTHING), ("outbox", OF_TABLE), ("orders", EVERYTHING)):
        where = "existing table" if given is OF_TABLE else name
        outbox = Outbox(name=name, settings=given, automation="running")
        yield from (f"{where}: {line}" for line in sorted(_definitions(outbox_definitions(outbox))))
    for kind in (Outbox, OutboxComponent):
        yield from (f"{kind.__name__}.{each.name}" for each in fields(kind) if each.init)


def _definitions(loaded: dg.Definitions) -> Iterator[str]:
    yield from (f"asset {spec.key.to_user_string()}" for spec in loaded.resolve_all_asset_specs())
    for checks in loaded.asset_checks or ():
        yield from (f"check {each.asset_key.to_user_string()}:{each.name}" for each in checks.check_specs)
    for job in loaded.jobs or ():
        yield f"job {job.name}"
        for op in loaded.resolve_job_def(job.name).graph.iterate_op_defs():
            config: Any = op.config_schema.as_field().config_type
            settings = sorted(getattr(config, "fields", {}))
            yield f"job {job.name}, op {op.name}: {', '.join(settings) or 'no settings'}"
    yield from (f"schedule {each.name}" for each in loaded.schedules or ())
    yield from (f"sensor {each.name}" for each in loaded.sensors or ())


def archive() -> Iterator[str]:
    """Where files are, their columns with their ids, and the manifest."""
    day = date(2026, 11, 27)
    yield f"file {store.key(day, 'events-….parquet')}"
    yield f"file {store.manifest_key(day)}"
    yield f"file metadata {manifest.SCHEMA.metadata}"
    # Those of users have ids that follow from their names.
    added = manifest.added((("mine", "numeric"), ("n", "bigint"), ("status", "boolean")))
    for column in manifest.schema_with(added):
        null = ", null" if column.nullable else ""
        yield f"column {column.name}: {column.type}{null}, {column.metadata}"
    yield f"bucket of sums: {manifest.BUCKET} seq"
    yield f"text of a row: {manifest.row_text('MICROSECONDS')}"
    yield from _members("manifest", manifest.Manifest.model_json_schema())


def python() -> Iterator[str]:
    """What the API pages list, with names and defaults of parameters."""
    for page in sorted((FOLDER.parents[1] / "docs").glob("api-*.md")):
        for module, name, members, excluded in _LISTED.findall(page.read_text()):
            found = getattr(import_module(module), name)
            yield f"{module}.{name}{_parameters(found)}"
            listed = re.findall(r"\w+", members.partition(":members:")[2])
            if members and not listed:
                fields_of_dict = [*found.__annotations__] if is_typeddict(found) else []
                shown = [each for each in dir(found) if _is_listed(found, each)]
                listed = fields_of_dict or [each for each in shown if each not in excluded.split(", ")]
            yield from (f"{module}.{name}.{each}{_parameters(getattr(found, each, None))}" for each in listed)


def _is_listed(of: Any, name: str) -> bool:
    """Whether Sphinx lists a method or property of a class; its fields are parameters."""
    method = inspect.getattr_static(of, name)
    method = getattr(method, "fget", None) or getattr(method, "func", method)
    ours = str(getattr(method, "__module__", "")).startswith("outbox_pipelines")
    return not name.startswith("_") and ours and bool(method.__doc__)


def _parameters(of: Any) -> str:
    try:
        found = inspect.signature(of)
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return str(inspect.Signature(bare, __validate_parameters__=False))


def settings() -> Iterator[str]:
    """Every setting with its section of the file, its values, and its default."""
    for section, model in SECTIONS.items():
        for name in model.model_fields:
            field = Settings.model_fields[name]
            kind = field.annotation
            values = f" ({'|'.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
            key = variable(name).removeprefix("OUTBOX_").lower()
            yield f"{variable(name)}, [{section}] {key}{values}: {field.default!r}"


PROMISES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    each.__name__: each
    for each in (archive, commands, dagster, exit_codes, messages, metrics, python, settings, status)
}
