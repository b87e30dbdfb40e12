"""`outbox lint-writes` as a user, a workflow or a pre-commit hook runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from outbox_pipelines.cli.main import cli

BAD = """import psycopg
from outbox_pipelines.writer import emit

connection = psycopg.connect("", autocommit=True)
emit(connection, "order", 1, "e", {})
connection.execute("DELETE FROM outbox")
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    (tmp_path / "orders.py").write_text(BAD)
    (tmp_path / "empty.py").write_text("")
    return tmp_path


def lint(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["lint-writes", *map(str, arguments)])


def test_a_line_for_each_finding_and_how_to_correct_it(application: Path) -> None:
    """Guards against a finding that an editor cannot jump to, or that does not say how to correct it."""
    done = lint(application)
    assert done.exit_code == 1
    first, remedy, second, _ = done.stdout.splitlines()
    assert first.startswith(f"{application}/orders.py:5:1: OB001 emit-outside-transaction: ")
    assert remedy.startswith("    ")
    assert "transaction block" in remedy
    assert second.startswith(f"{application}/orders.py:6:1: OB008 outbox-row-changed: ")
    assert done.stderr == "2 findings in 2 files\n"


def test_nothing_found(application: Path) -> None:
    """Guards against a workflow that fails on clean code, or passes without saying how much it checked."""
    done = lint(application / "empty.py")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no findings in 1 file\n")


def test_json(application: Path) -> None:
    """Guards against an output that a program cannot read, for findings and for none."""
    done = lint("--json", application)
    assert done.exit_code == 1
    assert [(one["line"], one["code"]) for one in json.loads(done.stdout)] == [(5, "OB001"), (6, "OB008")]
    assert json.loads(lint("--json", application / "empty.py").stdout) == []


def test_github(application: Path) -> None:
    """Guards against an annotation that the workflow shows at no line."""
    first, _ = lint("--github", application).stdout.splitlines()
    assert first.startswith(f"::error file={application}/orders.py,line=5,col=1,title=OB001 emit-outside-")


def test_a_file_name_is_only_a_name(tmp_path: Path) -> None:
    """Guards against a pull request whose file name is a command to the workflow, or controls a terminal."""
    name = "a\x1b[31m,b:c%\n::error::x.py"
    (tmp_path / name).write_text(BAD)
    first, _ = lint("--github", tmp_path).stdout.splitlines()
    assert first.startswith(
        rf"::error file={tmp_path}/a\x1b[31m%2Cb%3Ac%25%0A%3A%3Aerror%3A%3Ax.py,line=5,col=1,title=OB001"
    )
    (tmp_path / name).write_text("import outbox_pipelines\n" + "x = (")
    for options in (["--github"], [], ["--json"], ["--report"]):
        said = lint(*options, tmp_path).output
        assert "\x1b" not in said
        assert not any(line.startswith("::error::") for line in said.splitlines())
    assert json.loads(lint("--json", tmp_path).stdout)[0]["path"] == f"{tmp_path}/{name}"


@pytest.mark.parametrize("options", [[], ["--select", "OB001"], ["--select", "OB001", "--after-commit"]])
def test_a_file_that_cannot_be_parsed_is_never_clean(tmp_path: Path, options: list[str]) -> None:
    """Guards against a workflow that checks one rule and passes over a file that nothing has read."""
    (tmp_path / "orders.py").write_text(BAD + "x = (")
    assert lint(*options, tmp_path).exit_code == 1
    assert [one["code"] for one in json.loads(lint("--json", *options, tmp_path).stdout)] == ["OB000"]
    assert lint(*options, "--ignore", "OB000", tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        (["--select", "OB001"], ["OB001"]),
        (["--ignore", "OB001"], ["OB008"]),
        (["--select", "OB001,OB008", "--ignore", "OB008"], ["OB001"]),
        (["--ignore", "OB001, OB008"], []),
    ],
)
def test_rules_that_are_asked_for(application: Path, options: list[str], codes: list[str]) -> None:
    """Guards against a rule that is turned off and fails the build all the same."""
    done = lint("--json", *options, application)
    assert [one["code"] for one in json.loads(done.stdout)] == codes
    assert done.exit_code == (1 if codes else 0)


def test_usage(application: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Guards against a typing error in a workflow that looks like clean code."""
    elsewhere = tmp_path_factory.mktemp("nothing")
    for arguments, said in (
        ([], "PATH"),
        ([elsewhere / "missing"], "does not exist"),
        ([application, elsewhere / "missing.py"], "does not exist"),
        ([elsewhere], "no Python file"),
        (["--select", "OB999", application], "unknown rule OB999: known rules are OB000, OB001"),
        (["--ignore", "", application], "unknown rule "),
    ):
        done = lint(*arguments)
        assert done.exit_code == 2, arguments
        assert said in done.stderr


def test_without_settings_and_servers(application: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a linter that needs a relay's settings in CI."""
    monkeypatch.setenv("OUTBOX_CONFIG", "/nowhere")
    assert lint(application).exit_code == 1


def test_a_file_that_cannot_be_parsed(application: Path) -> None:
    """Guards against one broken file that ends the run, hides the others, or passes for clean."""
    (application / "broken.py").write_text("import outbox_pipelines\n\ndef f(:\n")
    (application / "binary.py").write_bytes(b"outbox = 1\0")
    found = json.loads(lint("--json", application).stdout)
    assert [(Path(one["path"]).name, one["line"], one["code"]) for one in found] == [
        ("binary.py", 1, "OB000"),
        ("broken.py", 3, "OB000"),
        ("orders.py", 5, "OB001"),
        ("orders.py", 6, "OB008"),
    ]


def test_nested_too_deeply(tmp_path: Path) -> None:
    """Guards against generated code that ends the run with a traceback."""
    (tmp_path / "generated.py").write_text("outbox = " + " + ".join(["x"] * 5000) + "\n")
    assert "OB000" in lint(tmp_path).stdout


def test_after_commit_and_report(tmp_path: Path) -> None:
    """Guards against a report that fails a build, or that leaves out where the message goes."""
    (tmp_path / "bus.py").write_text(
        "from kafka import KafkaProducer\n\ndef tell():\n    KafkaProducer().send('t')\n"
    )
    (tmp_path / "service.py").write_text(
        "from sqlalchemy.orm import Session\nfrom bus import tell\n\n"
        "def place(session: Session):\n    session.add(1)\n    session.commit()\n    tell()\n"
    )
    assert lint(tmp_path).exit_code == 0
    done = lint("--after-commit", "--json", tmp_path)
    assert [one["code"] for one in json.loads(done.stdout)] == ["OB011"]
    assert done.exit_code == 1
    done = lint("--report", tmp_path)
    assert done.exit_code == 0
    place, writes, publishes = done.stdout.splitlines()
    assert place == f"{tmp_path}/service.py:4: place: publishes apart from the commit (OB011)"
    assert writes == "    writes: line 5; line 6"
    assert publishes == f"    publishes: line 7 (tell, {tmp_path}/bus.py:4)"
    (listed,) = json.loads(lint("--report", "--json", tmp_path).stdout)
    assert listed["function"] == "place"


PROGRAM = """
import json, sys
before = set(sys.modules)
import outbox_pipelines.lint.linter, outbox_pipelines.lint.linter
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(names - set(sys.stdlib_module_names))))
"""


def test_only_the_standard_library_is_imported() -> None:
    """Guards against an analysis that needs the drivers of the application which it reads, or the relay's."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["outbox_pipelines"]


def test_exclude(application: Path) -> None:
    """Guards against tests and migrations that are read although they are of no concern."""
    inner = application / "shop" / "migrations"
    inner.mkdir(parents=True)
    (inner / "0001.py").write_text(BAD)
    (application / "tests").mkdir()
    (application / "tests" / "test_orders.py").write_text(BAD)
    for patterns, files in [
        ((), 4),
        (("tests",), 3),
        (("tests/",), 3),
        (("*/migrations/*", "test_*"), 2),
        (("*/shop", "tests", "empty.py"), 1),
    ]:
        options = [option for pattern in patterns for option in ("--exclude", pattern)]
        done = lint(*options, application)
        assert done.stderr.endswith(f"in {files} file{'s' * (files > 1)}\n"), (patterns, done.stderr)
    done = lint("--exclude", "*.py", application)
    assert (done.exit_code, "no Python files found" in done.stderr) == (2, True)


def test_changed_rows_without_the_writer(tmp_path: Path) -> None:
    """Guards against alarms in an application with a table of its own that is called outbox."""
    (tmp_path / "relay.py").write_text(
        "import psycopg\n\n"
        "def clean(connection: psycopg.Connection) -> None:\n"
        '    connection.execute("DELETE FROM outbox WHERE sent")\n'
    )
    assert lint(tmp_path).exit_code == 0
    assert "OB008" in lint("--strict-inserts", tmp_path).stdout
    (tmp_path / "orders.py").write_text("from outbox_pipelines.writer import emit\n")
    assert "OB008" in lint(tmp_path).stdout


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("type Number = int", (3, 12)),
        ("def first[T](outbox: T) -> T: ...", (3, 12)),
        ("class Box[T]: ...", (3, 12)),
        ('name = f"{order["outbox"]}"', (3, 12)),
        ('name = t"{outbox}"', (3, 14)),
        ("lazy import outbox", (3, 15)),
    ],
)
def test_a_newer_syntax(tmp_path: Path, line: str, version: tuple[int, int]) -> None:
    """Guards against "invalid syntax" for code that is right, where the command runs with an older Python."""
    (tmp_path / "orders.py").write_text(f"# outbox\n{line}\n")
    done = lint(tmp_path)
    if version <= sys.version_info[:2]:
        assert done.exit_code == 0
    else:
        assert f"syntax of Python {version[0]}.{version[1]} or newer, and this is Python 3." in done.stdout


def test_what_is_wrong_in_every_python(tmp_path: Path) -> None:
    """Guards against a hint that a newer Python would read what none does."""
    (tmp_path / "orders.py").write_text("# outbox\nx = (1\n")
    assert "newer" not in lint(tmp_path).stdout
