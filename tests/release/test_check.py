"""A release built here passes the checks that need no network; spoiled ones do not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.release.check import ReleaseError, build, check_contents, check_page, locked


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


def test_the_release_has_its_files_and_its_page(release: tuple[Path, Path]) -> None:
    """Guards against a wheel without SQL, and a page whose links lead nowhere."""
    check_contents(*release)
    check_page(release[0])


def test_a_wheel_with_tests_is_refused(release: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against a check that finds nothing."""
    wheel, sources = release
    spoiled = tmp_path / wheel.name
    spoiled.write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(spoiled, "a") as opened:
        opened.writestr("tests/conftest.py", "")
    with pytest.raises(ReleaseError, match=r"tests/conftest\.py"):
        check_contents(spoiled, sources)


def test_what_is_installed_beside_it_is_locked() -> None:
    """Guards against a check in an environment that no user gets."""
    lines = [line for line in locked("relay").splitlines() if line[0] != " "]
    names = {line.partition("=")[0].partition("[")[0] for line in lines}
    assert {"click", "confluent-kafka", "psycopg", "psycopg-binary", "prometheus-client"} <= names
    assert not {"dagster", "pandas", "duckdb"} & names
