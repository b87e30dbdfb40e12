"""The example of large payloads in Go: what it stores, consumers and sweeps understand, and the other way."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from outbox_pipelines.bodies import Bodies
from outbox_pipelines.days.bodies.check import check
from outbox_pipelines.writer import emit
from outbox_pipelines.writer.references import reference_of
from tests.examples.services import environment, events, go_program_of
from tests.schema.servers import Database

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go_program_of("go_bodies", tmp_path_factory.mktemp("go"))


def read(program: Path, directory: Path, payload: object) -> subprocess.CompletedProcess[bytes]:
    given = json.dumps(payload).encode()
    return subprocess.run([program, "read", directory], input=given, capture_output=True, check=False)


def test_bodies_of_go(database: Database, program: Path, tmp_path: Path) -> None:
    """Guards against a protocol that only our own writer and consumer follow, and that people copy."""
    (tmp_path / "invoice.pdf").write_bytes(content := b"%PDF" * 100_000)
    directory = tmp_path / "bodies"
    directory.mkdir()
    subprocess.run(
        [program, "write", directory, "7", tmp_path / "invoice.pdf", "application/pdf"],
        env=environment(database, PGSSLMODE="disable"),
        check=True,
    )
    bodies = Bodies(str(directory))
    with database.connect(autocommit=False) as connection:
        emit(connection, "order", 8, "order.invoiced", bodies.large(content, "application/pdf"))
    of_go, ours = (event.payload for event in events(database))
    reference = reference_of(of_go)
    assert reference is not None
    assert (bodies.get(reference), reference.content_type) == (content, "application/pdf")
    assert read(program, directory, of_go).stdout == read(program, directory, ours).stdout == content
    settings = database.settings.model_copy(update={"bodies": str(directory)})
    assert [(each.references, each.problems) for each in check(settings, digest=True)] == [(2, [])]
    (directory / reference.key).write_bytes(content[:-1] + b"X")
    for wrong in (of_go, {"outbox-body": {"key": "../invoice.pdf"}}, {"total": 5}):
        assert read(program, directory, wrong).returncode == 1
