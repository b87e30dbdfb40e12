"""What others write into ids, types, errors and files steers no terminal, page, mail or process of ours."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import urllib.request
from dataclasses import replace
from datetime import date
from pathlib import Path

import mistune
import pytest
from click.testing import CliRunner

from outbox_pipelines.catalog.document import Catalog, parse
from outbox_pipelines.catalog.page import page
from outbox_pipelines.cli.main import cli
from outbox_pipelines.core import log, metrics_server
from outbox_pipelines.core.text import markdown, plain, plain_lines, reason, short, to_json
from outbox_pipelines.database import schema
from outbox_pipelines.days.partitions import close
from outbox_pipelines.existing import check as table_check
from outbox_pipelines.existing.findings import Finding
from outbox_pipelines.quality import status_text
from outbox_pipelines.relay.kafka import client
from outbox_pipelines.relay.telemetry import exporter
from outbox_pipelines.settings import load_settings
from tests import forks
from tests.conftest import clean_environment, command, wait_until
from tests.days.archive.reading import three_days
from tests.quality.test_rules import SHARD, WELL

HOSTILE = "a\x1b[2J\x1b]0;owned\x07\nFAKE: all is well\r\x9b31m\u202egpj\u2028\ud800"
HARMLESS = r"a\x1b[2J\x1b]0;owned\x07\nFAKE: all is well\r\x9b31m\u202egpj\u2028\ud800"


def test_text_of_others_is_one_line_without_control() -> None:
    assert plain(HOSTILE) == HARMLESS
    assert plain("größer, 注文 🙂") == "größer, 注文 🙂"


@pytest.mark.parametrize(
    "text", ["![x](y)", "[x](y)", "\\\\[x](y)", "<img src=y>", "<https://y>", "[x]: y\n\n[x]"]
)
def test_text_of_others_is_no_markup(text: str) -> None:
    assert re.search(r"<(a|img)\b", str(mistune.html(text)))
    assert not re.search(r"<(a|img)\b", str(mistune.html(markdown(text))))


def test_what_is_long_does_not_fill_the_screen() -> None:
    assert short("x" * 200) == "x" * 200
    assert short("x" * 60_000) == "x" * 200 + "… (60,000 characters)"
    assert reason("x" * 800) == "x" * 800
    assert (
        reason(ValueError("x" * 800 + "\n")) == f"ValueError: {'x' * 388} … (814 characters) … {'x' * 398}\\n"
    )


def test_json_for_people_is_json_without_control() -> None:
    """Guards against `show` output that controls the terminal of an operator who views a dead letter."""
    text = to_json({"note": HOSTILE, "größer": [1.5, None]}, indent=2)
    assert json.loads(text) == {"note": HOSTILE, "größer": [1.5, None]}
    assert not any(ord(character) < 32 and character != "\n" for character in text)
    assert "\x9b" not in text
    text.encode()
    deep: list[object] = []
    for _ in range(800):
        deep = [deep]
    assert json.loads(to_json({"id": 1, "payload": deep}, indent=2))["id"] == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_line_stays_one(
    form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a line of the log that an event made up."""
    log.configure(load_settings(log_format=form))
    # Not pytest's own handlers: a parallel run cannot report the half of a surrogate pair.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [each for each in root.handlers if isinstance(each, log._Stderr)])
    assert len(root.handlers) == 1
    logging.getLogger("outbox_pipelines.relay").warning("dead letter: %s", HOSTILE, extra={"id": HOSTILE})
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert r"\ud800" in said
    said.encode()
    assert "\x1b" not in said
    assert "\x9b" not in said


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "aliases written out"),
        ("a: &a [*a]", "aliases written out"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("{b: " * 200, "nested more than 100 deep"),
        ("x" * 10_000_001, "characters"),
    ],
)
def test_a_catalog_that_explodes_is_refused(text: str, why: str) -> None:
    """Guards against a file of 400 bytes that takes all memory of a build, or ends its process."""
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_aliases_are_taken() -> None:
    assert parse("a: &x {type: object}\nb: *x") == {"a": {"type": "object"}, "b": {"type": "object"}}


def test_the_catalog_page_contacts_no_server() -> None:
    """Guards against a page that tells another server who reads it, or runs what it describes."""
    described = (
        "See ![a diagram](https://evil.example/x.png) <script>alert(1)</script> [x](javascript:alert(1))"
    )
    entry = {"description": described, "producer": "<img src=x onerror=alert(1)>", "owner": "a"}
    text = page(Catalog.model_validate({"events": {"order.placed": entry}}))
    assert "default-src 'none'" in text
    assert "a diagram" in text
    for tag in ("<img", "<script", 'href="javascript:'):
        assert tag not in text


def test_idle_connections_take_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a relay that runs out of threads because a client connects to its metrics."""
    monkeypatch.setattr(metrics_server, "CONNECTIONS", 4)
    monkeypatch.setattr(metrics_server._Handler, "timeout", 1.0)
    settings = load_settings(dsn="postgresql://a@127.0.0.1:9/b", kafka="127.0.0.1:9")
    with exporter.serving(settings, 0) as (_, url):
        port = int(url.rsplit(":", 1)[1].split("/")[0])
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]

        def is_closed(one: socket.socket) -> bool:
            one.settimeout(0.1)
            try:
                return one.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        # Those beyond the fourth at once, the others when they have said nothing for a second.
        wait_until(lambda: all(map(is_closed, idle)), what="the end of all idle connections")
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert b'outbox_database_up{outbox="outbox"} 0.0' in answer.read()
        for one in idle:
            one.close()


def test_a_client_that_reads_trusts_whom_the_settings_say() -> None:
    """Guards against a reconciliation that cannot fetch its token, where the relay can."""
    config = "https.ca.location=/ca.pem,sasl.mechanism=OAUTHBEARER,linger.ms=5"
    settings = load_settings(kafka="broker:9092", kafka_config=config)
    assert client.consumer_config(settings) == {
        "https.ca.location": "/ca.pem",
        "sasl.mechanism": "OAUTHBEARER",
        "bootstrap.servers": "broker:9092",
    }


def test_the_tables_of_status_and_partitions_steer_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a session's name, a table's name or a reason with escape sequences of its author's."""
    of_table = replace(
        WELL,
        shards=[replace(SHARD, owner=HOSTILE, breaker="open", breaker_reason=HOSTILE)],
        table=HOSTILE,
        retried=1,
        retried_reasons={HOSTILE: 1},
        dead_letter_reasons={HOSTILE: 1},
        warnings=[HOSTILE],
    )
    shown = status_text.render(of_table, [])
    finding = Finding(HOSTILE, "correct it:", (HOSTILE,))
    checked = table_check.render(table_check.Checked(HOSTILE, [finding]))
    kept_open = [close.Closing(date(2026, 11, 1), False, HOSTILE)]
    monkeypatch.setattr(close, "close", lambda settings, day: kept_open)
    monkeypatch.setattr(schema, "drift", lambda settings: [HOSTILE])
    closings = CliRunner().invoke(cli, ["partitions", "close"]).output
    differences = CliRunner().invoke(cli, ["migrate", "--check"]).output
    for text, lines in ((shown, 10), (checked, 2), (closings, 1), (differences, 1)):
        assert HARMLESS in text
        assert len(text.splitlines()) == lines


def _on_a_terminal(*arguments: str, **environment: str) -> str:
    """Run the command with a terminal as its stdout; return what it gets."""
    terminal, stdout = os.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as shown:
        process = forks.Popen[bytes](
            [*command(), *arguments], stdout=stdout, env=clean_environment() | environment
        )
        os.close(stdout)
        found = b""
        # The end of a terminal whose last writer has ended is an error on Linux.
        with contextlib.suppress(OSError):
            while part := shown.read(4096):
                found += part
        assert process.wait(60) == 0
    return found.decode().replace("\r\n", "\n")


@pytest.mark.extended
def test_what_is_exact_in_a_file_is_escaped_on_a_terminal(tmp_path: Path) -> None:
    """Guards against a row or a description that controls the terminal, and a CSV file with other values."""
    three_days(tmp_path / "archive")
    settings = {"OUTBOX_ARCHIVE": str(tmp_path / "archive")}
    harmless, hostile = HARMLESS.removesuffix(r"\ud800"), HOSTILE.removesuffix("\ud800")
    query = ["archive", "query", "SELECT '" + hostile + "' AS x"]
    assert _on_a_terminal(*query, "--csv", **settings) == f'x\n"{harmless}"\n'
    for form in ("--csv", "--json"):
        exact = forks.run(
            [*command(), *query, form], env=clean_environment() | settings, capture_output=True
        ).stdout.decode()
        if form == "--csv":
            assert exact == f'x\n"{hostile}"\n'
        else:
            assert json.loads(exact) == [{"x": hostile}]
            assert plain_lines(exact) == exact
    catalog = tmp_path / "catalog.yaml"
    entry = {"description": hostile, "producer": "shop", "owner": "shop"}
    catalog.write_text(json.dumps({"events": {"order.placed": entry}}))
    shown = _on_a_terminal("catalog", "render", OUTBOX_CATALOG_FILE=str(catalog))
    assert r"\x1b[2J\x1b]0;owned" in shown
    assert plain_lines(shown) == shown


def test_a_terminal_that_cannot_show_it_gets_escapes() -> None:
    """Guards against a traceback on a terminal that is not UTF-8."""
    done = subprocess.run(
        command("--help"),
        # For ASCII, click itself shortens with periods.
        env=clean_environment() | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u2026" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("dead-letters", "replay", "--all", "--reason", "\udcff"),
        ("dead-letters", "list", "--event-type=\udcff"),
        ("archive", "history", "order", "\udcff"),
        ("consumer", "dead-letters", "replay", "--all", "--reason", "\udcff"),
        ("status", "--outbox", "\udcff"),
    ],
)
def test_a_command_line_that_is_not_utf_8_is_refused_in_one_line(command: tuple[str, ...]) -> None:
    """Guards against a traceback from whatever writes the text first: a driver, or the terminal."""
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 2
    assert re.fullmatch(r"outbox: .*\\udcff on the command line is not UTF-8 text: .*\n", done.output)


def test_a_command_of_the_local_stack_gets_its_line_as_it_is() -> None:
    done = CliRunner().invoke(cli, ["local", "run", "--", "no-such-command", "\udcff"])
    assert "command not found: no-such-command" in done.output


def test_a_password_in_a_wrong_place_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a connection string as a name, and a password behind a broker's colon."""
    outboxes = tmp_path / "outbox.toml"
    outboxes.write_text('[outboxes."postgresql://u:hunter2@h/d"]\ndsn = { env = "NO_SUCH" }\n')
    monkeypatch.setenv("OUTBOX_CONFIG", str(outboxes))
    for arguments in (["status", "--all"], ["status", "--all", "--json"], ["status"], ["relay", "--all"]):
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 2
        assert "hunter2" not in result.output
        assert "hunter2" not in result.stderr
    monkeypatch.delenv("OUTBOX_CONFIG")
    monkeypatch.setenv("OUTBOX_KAFKA", "relay:hunter2")
    result = CliRunner().invoke(cli, ["status"])
    assert "'relay' has no port from 1 to 65535" in result.output
    assert "hunter2" not in result.output


def test_all_servers_are_named_if_none_answers() -> None:
    """Guards against an operator who checks the last of several servers only."""
    result = CliRunner().invoke(cli, ["status"], env={"OUTBOX_DSN": "host=127.0.0.1,127.0.0.2 port=1,2"})
    assert result.exit_code == 2
    assert "(the last of 2 servers; none could be used: 127.0.0.1:1, 127.0.0.2:2)" in result.output
    one = CliRunner().invoke(cli, ["status"], env={"OUTBOX_DSN": "host=127.0.0.1 port=1"})
    assert "servers" not in one.output
