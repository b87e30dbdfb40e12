"""AsyncAPI's own parser accepts the document of the event catalog, in each shape of the values."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.catalog.asyncapi import document
from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.settings import load_settings
from tests.catalog.conftest import Write
from tests.catalog.conftest import write as write
from tests.catalog.test_asyncapi import EVENTS
from tests.interop import build


@pytest.fixture(scope="session")
def validator() -> Path:
    return build.asyncapi(load_settings())


def _wrong(validator: Path, found: dict[str, Any]) -> list[str]:
    done = subprocess.run(
        ["node", "validate.mjs"],
        cwd=validator,
        input=json.dumps(found),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("value_format", ["payload", "flat", "envelope", "cloudevents"])
def test_the_document_is_valid(validator: Path, write: Write, value_format: str) -> None:
    """Guards against a document that the tools of a platform team refuse."""
    settings = load_settings(value_format=value_format, topic="x.{aggregate_type:lower}")
    found = document(read_catalog(write(EVENTS)), settings, version="2")
    assert _wrong(validator, found) == []
    found["channels"]["orders"]["messages"]["order.placed"]["$ref"] = "#/components/messages/away"
    assert _wrong(validator, found) != []
