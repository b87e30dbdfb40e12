"""`outbox catalog schemas`: a JSON Schema for each event type and version, as a file."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from jsonschema import Draft202012Validator, validators

from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.catalog.registration import files
from outbox_pipelines.catalog.subjects import Subjects
from outbox_pipelines.cli.main import cli
from outbox_pipelines.settings import make_settings
from tests.catalog.conftest import CATALOG, Write

HOSTILE = """
events:
  order.placed:
    {description: d, producer: p, owner: o, version: 2, schema: {$ref: "#/$defs/a", $defs: {a: {enum: [1]}}}}
  "order.placed@2": {description: d, producer: p, owner: o, schema: {type: string}}
  "../../größe/a b": {description: d, producer: p, owner: o, schema: {type: string, title: other}}
  "gone": {description: d, producer: p, owner: o, lifecycle: retired, schema: {}}
"""


def test_each_type_and_version_has_a_document_of_its_own(write: Write) -> None:
    """Guards against a schema that overwrites another file, and one that loses its parts."""
    found = {name: json.loads(text) for name, text in files(read_catalog(write(HOSTILE))).items()}
    assert {name: (each["$id"], each["title"]) for name, each in found.items()} == {
        "order.placed@2.json": ("urn:outbox:order.placed:2", "order.placed"),
        "order.placed_40_2.json": ("urn:outbox:order.placed%402", "order.placed@2"),
        ".._2f_.._2f_gr_f6__df_e_2f_a_20_b.json": (
            "urn:outbox:..%2F..%2Fgr%C3%B6%C3%9Fe%2Fa%20b",
            "../../größe/a b",
        ),
    }
    for each in found.values():
        kind = validators.validator_for(each)
        kind.check_schema(each)
        assert each["$schema"] in (kind.META_SCHEMA["$id"], Draft202012Validator.META_SCHEMA["$id"])
    placed = found["order.placed@2.json"]
    fits = validators.validator_for(placed)(placed).is_valid
    assert (fits(1), fits("1")) == (True, False)


def test_files_are_the_schemas_of_earlier_versions(write: Write, tmp_path: Path) -> None:
    """Guards against an earlier version that has another document than when it was the newest."""
    first = CATALOG.replace("producer: shop", "producer: shop\n    version: 1")
    texts = files(read_catalog(write(first)))
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    second = CATALOG.replace("minimum: 1", "minimum: 2").replace(
        "producer: shop", "producer: shop\n    version: 2\n    versions: {1: order.placed@1.json}"
    )
    catalog = read_catalog(write(second))
    found = files(catalog)
    assert [*found] == ["order.placed@1.json", "order.placed@2.json"]
    assert found["order.placed@1.json"] == texts["order.placed@1.json"]
    assert '"minimum": 2' in found["order.placed@2.json"]
    before = read_catalog(write(first))
    for kind in ("json_schema", "avro"):
        settings = make_settings(registry_url="http://x", catalog_file="x", format=kind, topic="all")
        registered, now = (Subjects(each, settings).of_event_types for each in (before, catalog))
        assert now["order.placed@1"].text == registered["order.placed"].text


def test_the_command(write: Write, tmp_path: Path) -> None:
    """Guards against a schema that changes under the number of a version which others have read."""
    directory = tmp_path / "schemas"
    environment = {"OUTBOX_CATALOG_FILE": str(write(CATALOG))}

    def run(*options: str) -> tuple[int, str]:
        command = ["catalog", "schemas", "--output", str(directory), *options]
        done = CliRunner().invoke(cli, command, env=environment)
        return done.exit_code, done.output

    assert run("--check") == (1, f"outbox: {directory}/order.placed.json: missing, and run without --check\n")
    assert run() == (0, f"{directory}: 1 schema\n")
    assert run("--check") == (0, f"{directory} is up to date\n")
    write(CATALOG.replace("minimum: 1", "minimum: 2"))
    code, output = run("--check")
    assert (code, "has another schema: give the type a new version" in output) == (1, True)
    write(
        CATALOG.replace("minimum: 1", "minimum: 2").replace(
            "producer: shop", "producer: shop\n    version: 2"
        )
    )
    assert run()[0] == 0
    assert {each.name for each in directory.iterdir()} == {"order.placed.json", "order.placed@2.json"}
    directory = tmp_path / "catalog.yaml"
    assert run()[0] == 2
