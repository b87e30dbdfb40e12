"""The file of outboxes, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from outbox_pipelines.cli.main import cli
from outbox_pipelines.errors import SetupError
from outbox_pipelines.outboxes import Outboxes, load_outboxes
from outbox_pipelines.settings import load_settings, make_settings

FILE = """
[outbox]
kafka = "broker:9092"
[days]
archive = "/archive/{outbox}"
[relay]
batch_events = 7

[outboxes.orders]
dsn = { env = "ORDERS_DSN" }
relay.batch_events = 8

[outboxes.billing]
dsn = { file = "billing.dsn" }
schema = "billing"
"""


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outboxes:
    return _load(FILE, tmp_path, monkeypatch)


def _load(text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Outboxes:
    (directory / "outbox.toml").write_text(text)
    (directory / "billing.dsn").write_text("postgresql://u:password-of-billing@db/billing\n")
    monkeypatch.setenv("OUTBOX_CONFIG", str(directory / "outbox.toml"))
    monkeypatch.setenv("ORDERS_DSN", "postgresql://u:password-of-orders@db/orders")
    # Of the environment, what nothing in the file says is inherited, but never a database, its table or
    # what publishes it.
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://db/environment")
    monkeypatch.setenv("OUTBOX_NAME", "environment")
    monkeypatch.setenv("OUTBOX_CONNECTOR", "environment")
    monkeypatch.setenv("OUTBOX_RETENTION_DAYS", "3")
    monkeypatch.setenv("OUTBOX_BATCH_EVENTS", "9")
    return load_outboxes()


def test_an_outbox_wins_over_the_environment_and_that_over_the_file(loaded: Outboxes) -> None:
    """Guards against an outbox that is relayed with the settings, or the database, of another."""
    orders, billing = loaded.get("orders"), loaded.get("billing")
    assert not loaded.errors
    assert [orders.name, billing.name] == loaded.names == ["orders", "billing"]
    assert orders.require_dsn() == "postgresql://u:password-of-orders@db/orders"
    assert billing.require_dsn() == "postgresql://u:password-of-billing@db/billing"
    assert (orders.batch_events, billing.batch_events) == (8, 9)
    assert (orders.archive, billing.archive) == ("/archive/orders", "/archive/billing")
    assert (orders.db_schema, billing.db_schema) == ("public", "billing")
    assert orders.retention_days == billing.retention_days == 3
    assert orders.connector == billing.connector == ""
    assert "batch_events" in billing.inherited - orders.inherited


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("", "names no database: add dsn = { env"),
        ('dsn = { env = "NOT_SET" }', "line 18: dsn names NOT_SET, which is not set"),
        ("dsn = { env = 5 }", "line 18: dsn is a secret"),
        ('dsn = { file = "nowhere" }', "nowhere, which cannot be read"),
        ('dsn = "postgresql://u:secret-in-file@h/d"', "line 18: dsn is a secret, which is not written here"),
        (
            'dsn = "service=x"\nrelay.batch_evnts = 5',
            "line 19: batch_evnts does not belong in [relay]",
        ),
        ('dsn = "service=x"\nbatch_events = 5', "does not belong in [outbox]: it belongs in [relay]"),
        ('dsn = "service=x"\nname = "y"', "line 19: name is given by the section"),
        ('dsn = "service=x"\nrelay.batch_events = 0', "line 19: batch_events=0"),
        ('dsn = "service=x"\nalerts = "slack://secret-in-file"', "it belongs in [checks]"),
        ('dsn = "service=x"\nchecks.alerts = "slack://secret-in-file"', "alerts is a secret"),
    ],
)
def test_a_wrong_entry_is_an_error_of_that_outbox_alone(
    entry: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a mistake about one outbox that stops all, or that is not shown."""
    loaded = _load(f"{FILE}\n[outboxes.x]\n{entry}", tmp_path, monkeypatch)
    [(name, why)] = loaded.errors.items()
    assert error in why
    assert "secret-in-file" not in why
    assert set(loaded.settings) == {"orders", "billing"}
    with pytest.raises(SetupError, match=f"outbox {name}"):
        loaded.get(name)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[outbox", r"outbox\.toml is not TOML"),
        ("[outboxes]", "line 1: outboxes names no outbox"),
        ("outboxes = 3", "line 1: outboxes names no outbox"),
        ("[outbxo]", r"outbox\.toml line 1: outbxo is no section: did you mean outbox\?"),
        ("# first\nrelay = 1", r"line 2: relay is no section: write \[relay\]"),
        ('[outbox]\ndsn = "service=x"\n[outboxes.x]', "line 2: dsn would be the same for each outbox"),
        ('[relay]\nbatch_evnts = 1\n[outboxes.x]\ndsn = "service=x"', "did you mean batch_events"),
    ],
)
def test_a_wrong_file_is_an_error(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a file that seems to list nothing."""
    with pytest.raises(SetupError, match=error):
        _load(text, tmp_path, monkeypatch)


def test_a_template_for_all_is_no_mistake_where_no_outbox_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a command that names a right line beside the wrong one."""
    _load(f'{FILE}[topics]\ntopic = "{{outbox}}.{{aggregate_type}}"', tmp_path, monkeypatch)
    monkeypatch.setenv("OUTBOX_RETRY_SECONDS", "soon")
    for arguments in (("status", "--all"), ("status", "--outbox", "orders"), ("relay", "--outbox", "orders")):
        done = CliRunner().invoke(cli, arguments)
        assert done.exit_code == 2
        assert "OUTBOX_RETRY_SECONDS=soon:" in done.output
        assert "unknown field" not in done.output


def test_a_command_without_an_outbox_takes_a_template_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a local stack, or an outbox of Dagster's definitions, that refuses a right file."""
    _load(f'{FILE}[topics]\ntopic = "{{outbox}}.{{aggregate_type}}"', tmp_path, monkeypatch)
    monkeypatch.setenv("OUTBOX_LOCAL_DIR", str(tmp_path))
    done = CliRunner().invoke(cli, ["local", "env"])
    assert (done.exit_code, "no local servers running" in done.output) == (1, True)
    assert load_settings(name="returns").topic == "returns.{aggregate_type}"
    assert load_settings().topic == "environment.{aggregate_type}"


def test_one_of_several_must_be_chosen(loaded: Outboxes) -> None:
    """Guards against a command that works on an outbox which was not named."""
    with pytest.raises(
        SetupError, match=r"lists 2 outboxes: choose one with --outbox NAME \(orders, billing\)"
    ):
        loaded.get()
    with pytest.raises(SetupError, match="does not list it; choose orders, billing"):
        loaded.get("order")


def test_the_only_one_shares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a rule of the only outbox that counts as one of others."""
    assert not _load(FILE.partition("[outboxes.billing]")[0], tmp_path, monkeypatch).get().inherited


def test_outboxes_of_the_same_tables_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two names of one outbox, of which both seem to be relayed."""
    again = '[outboxes.again]\ndsn = "host=db dbname=billing user=other"\nschema = "billing"'
    [line] = _load(f"{FILE}\n{again}", tmp_path, monkeypatch).shared_tables()
    assert line.startswith("billing and again have the same tables")


def test_settings_are_made_of_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an instance whose settings come from the environment of the process."""
    monkeypatch.setenv("OUTBOX_KAFKA", "environment:9092")
    monkeypatch.setenv("OUTBOX_BATCH_EVENTS", "wrong")
    made = make_settings(name="orders", dsn="service=orders")
    assert (made.name, made.kafka, made.batch_events) == ("orders", "", 5000)
    with pytest.raises(TypeError, match="no settings: batch_event"):
        make_settings(batch_event=1)
    with pytest.raises(SetupError, match="OUTBOX_BATCH_EVENTS=0"):
        make_settings(batch_events=0)
