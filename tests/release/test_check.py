"""A release made here passes the checks that need no network; spoiled ones do not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from outbox_pipelines import __version__
from tests.release.check import ReleaseError, check_contents, check_page, check_same, locked, make_again
from tests.release.make import ROOT, SUMS, archives, build, make, notes, release_time


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make(ROOT, folder := tmp_path_factory.mktemp("release") / "dist", release_time(ROOT))
    return folder


@pytest.fixture(scope="module")
def release(dist: Path) -> tuple[Path, Path]:
    return archives(dist)


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


@pytest.mark.extended
def test_a_release_is_made_again_byte_for_byte(dist: Path, tmp_path: Path) -> None:
    """Guards against files that cannot be made again, and a source archive that does not build the wheel."""
    again = make_again(dist, release_time(ROOT), tmp_path / "again")
    check_same(dist, again)
    for change in (lambda: (again / "licenses.txt").write_text("other"), (again / "licenses.txt").unlink):
        change()
        with pytest.raises(ReleaseError, match=r"licenses\.txt differs"):
            check_same(dist, again)


def test_what_is_beside_the_archives(dist: Path) -> None:
    """Guards against checksums that do not fit, and papers that leave out a package or a license."""
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", SUMS], cwd=dist, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout.count(": OK")) == (0, 5), checked.stderr
    bill = json.loads((dist / "sbom.cdx.json").read_text())
    by_name = {(each["name"], each["version"]): each for each in bill["components"]}
    assert {name for name, _ in by_name} > {"dagster", "psycopg", "pytest"}
    assert {each["scope"] for (name, _), each in by_name.items() if name in ("dagster", "pytest")} == {
        "required",
        "optional",
    }
    references = [each["bom-ref"] for each in bill["components"]]
    assert len(references) == len({*references}) == len(by_name)
    needed = {name for each in bill["dependencies"] for name in each["dependsOn"]}
    assert needed <= {*references}
    text = (dist / "licenses.txt").read_text()
    assert all(f"\n{name} {version}: " in text for name, version in by_name)
    assert "\nclick 8" in text
    assert "not stated" not in text


def test_the_bill_of_materials_is_one(dist: Path) -> None:
    """Guards against a bill that tools refuse."""
    text = (dist / "sbom.cdx.json").read_text()
    check = JsonStrictValidator(SchemaVersion.V1_6)
    assert check.validate_str(text) is None
    assert check.validate_str(text.replace('"type": "library"', '"type": "book"', 1)) is not None


def test_the_image_has_the_wheel_of_the_release(release: tuple[Path, Path], tmp_path: Path) -> None:
    """Guards against an image that cannot be built, since a file of the wheel is not copied into it."""
    stage = (ROOT / "deploy" / "Dockerfile").read_text().split("\nFROM ")[1]
    for line in re.findall("^COPY (.+) ", stage, re.MULTILINE):
        for name in line.split():
            source, copy = ROOT / name, tmp_path / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy)
    build(tmp_path, tmp_path / "dist", release_time(ROOT), "wheel")
    [wheel] = (tmp_path / "dist").iterdir()
    assert wheel.read_bytes() == release[0].read_bytes()


def test_there_is_one_version() -> None:
    """Guards against a relay that takes itself for another version than its schema needs."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert __version__ == version
    files = ("chart/Chart.yaml", "kubernetes/kustomization.yaml", "dagster/run-pods/launcher.yaml")
    texts = [(ROOT / "deploy" / name).read_text() for name in files]
    found = [re.findall(r'(?:ersion: |newTag: |pipelines:)"?([\d.]+)', text) for text in texts]
    assert found == [[version] * 2, [version], [version]]


def test_notes_are_those_of_the_version() -> None:
    """Guards against notes of another version."""
    changelog = (
        "# Changelog\n## [Unreleased]\nsoon\n\n## [1.0.0] - 2027-01-01\n### Added\n- all\n\n## [0.9.0]\nold\n"
    )
    assert notes(changelog, "1.0.0") == "# Outbox Pipelines 1.0.0\n### Added\n- all\n"
    assert notes(changelog, "1.1.0") == "# Outbox Pipelines 1.1.0\nsoon\n"


def test_what_is_installed_beside_it_is_locked() -> None:
    """Guards against a check in an environment that no user gets."""
    lines = [line for line in locked("relay").splitlines() if line[0] != " "]
    names = {line.partition("=")[0].partition("[")[0] for line in lines}
    assert {"click", "confluent-kafka", "psycopg", "psycopg-binary", "prometheus-client"} <= names
    assert not {"dagster", "pandas", "duckdb"} & names
