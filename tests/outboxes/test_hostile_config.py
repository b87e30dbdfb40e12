"""An `outbox.toml` that a clumsy or a hostile person wrote, as `outbox config` reports it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from outbox_pipelines.cli.main import cli
from outbox_pipelines.settings import load_settings

ADDRESSES = ("postgresql://u:hunter2pw@h/d", "host=h password=hunter2pw", "host=h password='hunter2pw'")
# Entries that are no secrets, sections and names; the address is in the place of %s.
PLACES = (
    *('[outbox]\nname = "%s"', '[outbox]\nkafka = "%s"', '[outbox]\nschema = "%s"'),
    *('[outbox]\nconnector = "%s"', '[outbox]\n"%s" = 1', '[outbox]\ndsn = { env = "%s" }'),
    *(
        '[outbox]\ndsn = { file = "%s" }',
        '[topics]\ntopic = "%s"',
        '[event_types]\na = "%s"',
        '[event_types]\n"%s" = "a"',
    ),
    *('[topics]\ncreate_topics_pattern = "%s"', '[messages]\ncloudevents_source = "%s"'),
    *('[messages]\ncatalog_file = "%s"', '[messages]\nvalue_format = "%s"', '[relay]\nbatch_events = "%s"'),
    *('[telemetry]\nmetrics_address = "%s"', '[days]\narchive = "%s"', '[days]\nexpectations = "%s"'),
    *('[checks]\nui_url = "%s"', '[consumer]\nconsumer_schema = "%s"', '[consumer]\ndrain_consumers = "%s"'),
    '[aggregate_types.order]\ncloudevents_source = "%s"',
    *('["%s"]', '[outboxes."%s"]', '[messages.header_names]\n"%s" = "a"'),
)


@pytest.fixture(autouse=True)
def _away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OUTBOX_DSN", "OUTBOX_KAFKA", "OUTBOX_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def _outbox(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def _check(text: str) -> list[str]:
    Path("outbox.toml").write_text(text)
    return _outbox("config", "check").output.splitlines()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("address", ADDRESSES)
def test_a_password_in_a_wrong_place_is_refused_and_never_shown(place: str, address: str) -> None:
    """Guards against a connection string that is pasted as any other setting, section or name."""
    shown = "\n".join(_check(place % address))
    assert "no mistake" not in shown
    for more in ((), ("--json",)):
        shown += _outbox("config", "show", *more).output
    assert "hunter2pw" not in shown


@pytest.mark.parametrize("name", ["NAME", "SCHEMA", "EVENT_TYPES", "WARN_AT", "LEASE_SECONDS", "DELIVERY"])
def test_a_password_in_a_wrong_variable_is_not_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the same in the environment."""
    monkeypatch.setenv(f"OUTBOX_{name}", ADDRESSES[0])
    done = _outbox("config", "check")
    assert (done.exit_code, "hunter2pw" in done.output) == (1, False)


def test_what_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stack trace, a process that reads without end, and a file that is ignored."""
    Path("long").write_text("a" * 1_000_001)
    Path("empty").write_text("\n")
    os.mkfifo("pipe")
    for where, why in {
        "~no_such_user/dsn": "cannot be read",
        "/dev/zero": "is not a regular file",
        "pipe": "is not a regular file",
        "long": "more than 1,000,000 characters",
        "empty": "is empty",
        "a\\u0000b": "cannot be read",
    }.items():
        [line] = _check(f'[outbox]\ndsn = {{ file = "{where}" }}')
        assert why in line
        assert "line 2: dsn names" in line
    for text in (f"a = {'[' * 5000}", f"[relay]\nbatch_events = {'9' * 5000}", "a ="):
        [line] = _check(text)
        assert "outbox.toml is not TOML" in line
    Path("outbox.toml").unlink()
    Path("outbox.toml").symlink_to("nowhere")
    assert "outbox.toml is not a file" in _outbox("config", "check").output
    Path("outbox.toml").unlink()
    Path("outbox.toml").hardlink_to("pipe")
    assert "outbox.toml is not a file" in _outbox("config", "check").output
    Path("outbox.toml").unlink()
    Path("outbox.toml").mkdir()
    assert "outbox.toml is not a file" in _outbox("status").output
    monkeypatch.setenv("OUTBOX_CONFIG", "~no_such_user/outbox.toml")
    assert "OUTBOX_CONFIG names ~no_such_user" in _outbox("status").output


def test_a_mistake_is_named_as_it_was_written_and_on_its_line() -> None:
    """Guards against a line and a name that lead a person to another place."""
    lines = _check(
        'dsn = { env = "X" }\nkafka = "a:9092"\ntable = 3\n\n[outboxes.x]\ndsn = "service=x"\n'
        'topics = { topic = 4 }\n[outboxes."a.b"]\n[outboxes.x.kafka]\nsasl.password = "hunter2pw"\n'
        'ssl.key.pem = { env = "A", file = "b" }\n'
    )
    starts = [
        *("1: dsn is no section: it belongs in [outbox]", "2: kafka is no section: its addresses belong in"),
        *("3: table is no section", "8: a.b is no name of an outbox", "10: sasl.password is a secret"),
        *("11: ssl.key.pem is a secret", "7: topic=4: "),
    ]
    assert len(lines) == len(starts), lines
    for line in starts:
        assert any(each.startswith(f"outbox.toml line {line}") for each in lines), (line, lines)


def test_a_header_in_a_text_is_none() -> None:
    """Guards against the line of another entry, if a text looks like a header or contains quotes."""
    lines = _check(
        "# ''' and \"\"\"\n[outbox]\nkafka = \"#'''\"\n"
        'schema = """a\n[relay]\nbatch_events = 1\n\\"""\n"""\n'
        "connector = '''\n[relay]\n'''\n[relay]\nbatch_events = 0\n"
    )
    assert any(line.startswith("outbox.toml line 13: batch_events=0") for line in lines), lines


def test_true_is_no_number() -> None:
    """Guards against 1 where `true` is written, and a limit of 0 where `off` is meant (YAML reads false)."""
    for entry in (
        "relay.batch_events",
        "relay.lease_seconds",
        "topics.topic_replication",
        "checks.warn_at.lag",
    ):
        [line] = _check(f'outbox.dsn = "service=a"\n{entry} = true')
        assert "line 2: " in line
        assert "number" in line
    [*_, line] = _check('outbox.dsn = "service=a"\nchecks.error_at = { idempotency_keys = false, lag = 120 }')
    assert "no mistake" in line
    assert load_settings().error_at == {"idempotency_keys": "off", "lag": 120.0}
