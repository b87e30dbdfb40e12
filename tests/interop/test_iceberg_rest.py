"""The archive as an Iceberg table in a REST catalog, whose server writes the table's metadata."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.core.secret import Secret
from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.iceberg import compare, iceberg_catalog, register, registered_days
from outbox_pipelines.errors import SetupError, UnavailableError
from outbox_pipelines.settings import Settings, load_settings
from tests.days.archive.days import days_ago
from tests.days.iceberg.conftest import database, empty, lake, server, settings
from tests.days.iceberg.test_register import archived
from tests.interop import build
from tests.interop.rest_catalog import RestCatalog
from tests.interop.test_iceberg_readers import PROGRAMS, run
from tests.schema.servers import Database

__all__ = ["database", "empty", "lake", "server", "settings"]
pytestmark = pytest.mark.slow

EARLY, DAY = days_ago(5), days_ago(3)
TOKEN = "a-token-of-a-catalog"


@pytest.fixture
def catalog(lake: str, settings: Settings, tmp_path: Path) -> Iterator[RestCatalog]:
    try:
        jars = build.spark_jars(load_settings())
        [others] = build.environment(load_settings(), PROGRAMS / "spark.txt").rglob("pyspark/jars")
        with RestCatalog(tmp_path / "rest", [*jars, others / "*"], lake, settings.archive, TOKEN) as made:
            yield made
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def there(settings: Settings, catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings with the catalog by its name in pyiceberg's configuration."""
    for name, value in {"TYPE": "rest", "URI": catalog.url, "TOKEN": TOKEN}.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name}", value)
    return settings.model_copy(update={"iceberg": Secret("lake")})


def test_days_are_registered_once(
    database: Database, there: Settings, catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a table that only a catalog in PostgreSQL can have, and against days that are lost or
    twice there if the server goes away in the middle."""
    archived(database, there, EARLY, DAY)
    manifest = registered_days._manifest

    def away(*given: Any) -> Any:
        catalog.kill()
        return manifest(*given)

    with monkeypatch.context() as patch:
        patch.setattr(registered_days, "_manifest", away)
        with pytest.raises(UnavailableError, match=r"\(OUTBOX_ICEBERG\) reports an error: .*refused"):
            register(there)
    catalog.start()
    assert register(there).added == (EARLY, DAY)
    assert days.archive(there, DAY, again=True).written
    assert register(there).replaced == (DAY,)
    assert (register(there).unchanged, [compare(there, each) for each in (EARLY, DAY)]) == (2, [(), ()])
    asked = ["SELECT aggregate_id, count(*) FROM events GROUP BY 1 ORDER BY 1"]
    answers = json.loads(run("duckdb", catalog.url, asked=asked, TOKEN=TOKEN))
    assert answers == [[[str(EARLY), 1], [str(DAY), 1]]]
    catalog.freeze()
    monkeypatch.setattr(iceberg_catalog, "_ANSWER_SECONDS", 0.5)
    # Otherwise this would wait for ever.
    late = threading.Timer(20, catalog.thaw)
    late.start()
    with pytest.raises(UnavailableError, match=r"Read timed out"):
        compare(there, DAY)
    late.cancel()
    catalog.thaw()


class _Page(BaseHTTPRequestHandler):
    """A server that is no catalog."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>\n</html>")

    def log_message(self, *_: Any) -> None:
        """Print nothing: the command's output is compared."""


@pytest.fixture
def page() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Page) as serving:
        threading.Thread(target=serving.serve_forever).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_what_is_wrong_is_one_line(
    database: Database, there: Settings, catalog: RestCatalog, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a stack of a client where an address or a token is wrong, and a token in a message."""
    archived(database, there, DAY)
    for name, value, said in (
        ("TOKEN", "another-token", "reports an error: NotAuthorizedException: the token is not valid"),
        ("URI", f"{catalog.url}/elsewhere", "there is no /elsewhere/v1/config"),
        ("URI", "http://127.0.0.1:9", "refused"),
        ("URI", page, f"{page} does not answer as a REST catalog (OUTBOX_ICEBERG=lake): correct the uri"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"PYICEBERG_CATALOG__LAKE__{name}", value)
            done = database.outbox("archive", "register", OUTBOX_ARCHIVE=there.archive, OUTBOX_ICEBERG="lake")
        [line] = done.stderr.splitlines()
        assert (done.exit_code, said in line) == (2, True), line
        assert "token" not in line.replace(said, "")
