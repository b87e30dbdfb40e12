"""The file of outboxes, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.outboxes import Outboxes, load_outboxes
from outbox_pipelines.settings import make_settings

FILE = """
[defaults]
kafka = "broker:9092"
archive = "/archive/{outbox}"
batch_events = 7

[[outbox]]
name = "orders"
dsn_variable = "ORDERS_DSN"
batch_events = 8

[[outbox]]
name = "billing"
dsn = "postgresql://u:password-of-billing@db/billing"
schema = "billing"
"""


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outboxes:
    return _load(FILE, tmp_path, monkeypatch)


def _load(text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Outboxes:
    (directory / "outboxes.toml").write_text(text)
    monkeypatch.setenv("OUTBOX_OUTBOXES_FILE", str(directory / "outboxes.toml"))
    monkeypatch.setenv("ORDERS_DSN", "postgresql://u:password-of-orders@db/orders")
    # Of the environment, what nothing in the file says is inherited, but never a database, its table or
    # what publishes it.
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://db/environment")
    monkeypatch.setenv("OUTBOX_NAME", "environment")
    monkeypatch.setenv("OUTBOX_CONNECTOR", "environment")
    monkeypatch.setenv("OUTBOX_RETENTION_DAYS", "3")
    return load_outboxes()


def test_values_win_over_defaults_and_those_over_the_environment(loaded: Outboxes) -> None:
    """Guards against an outbox that is relayed with the settings, or the database, of another."""
    orders, billing = loaded.get("orders"), loaded.get("billing")
    assert not loaded.errors
    assert [orders.name, billing.name] == loaded.names == ["orders", "billing"]
    assert orders.require_dsn() == "postgresql://u:password-of-orders@db/orders"
    assert (orders.batch_events, billing.batch_events) == (8, 7)
    assert (orders.archive, billing.archive) == ("/archive/orders", "/archive/billing")
    assert (orders.db_schema, billing.db_schema) == ("public", "billing")
    assert orders.retention_days == billing.retention_days == 3
    assert orders.connector == billing.connector == ""


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ('name = "orders"\ndsn = "service=x"', "2 outboxes have this name"),
        ('name = "Orders-EU"\ndsn = "service=x"', "write lower-case letters, digits and _"),
        ('dsn = "service=x"', "has no name"),
        ('name = "x"', "names no database: add dsn_variable"),
        ('name = "x"\ndsn_variable = "NOT_SET"', "names NOT_SET, which is not set"),
        ('name = "x"\ndsn_variable = 5', "must be the name of an environment variable"),
        ('name = "x"\ndsn = "service=x"\nbatch_evnts = 5', "did you mean batch_events?"),
        (
            'name = "x"\ndsn = "service=x"\ntopic_variable = "T"',
            "topic_variable is not a setting of an outbox",
        ),
        ('name = "x"\ndsn = "service=x"\nlocal_dir = "/x"', "local_dir is not a setting of an outbox"),
        ('name = "x"\ndsn = "service=x"\nbatch_events = 0', "OUTBOX_BATCH_EVENTS=0"),
        ('name = "x"\ndsn = "postgresql://u:secret-in-file@h:1:2/d"', "OUTBOX_DSN has an invalid host"),
    ],
)
def test_a_wrong_entry_is_an_error_of_that_outbox_alone(
    entry: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a mistake about one outbox that stops all, or that nobody sees."""
    loaded = _load(f"{FILE}\n[[outbox]]\n{entry}", tmp_path, monkeypatch)
    [(name, why)] = loaded.errors.items()
    assert error in why
    assert "secret-in-file" not in why
    assert set(loaded.settings) == {"orders", "billing"} - {name}
    with pytest.raises(SetupError, match=f"outbox {name}"):
        loaded.get(name)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[defaults", "is not TOML"),
        ("", "lists no outbox"),
        ('[[outboxes]]\nname = "x"', "unknown section 'outboxes'"),
        ('[outbox.orders]\ndsn = "x"', "value where a section belongs"),
        ('defaults = 1\n[[outbox]]\nname = "x"', "value where a section belongs"),
        ('[defaults]\ndsn = "x"\n[[outbox]]\nname = "x"', r"a dsn in \[defaults\]"),
    ],
)
def test_a_wrong_file_is_an_error(
    text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a file that seems to list nothing."""
    with pytest.raises(SetupError, match=f"OUTBOX_OUTBOXES_FILE=.*{error}"):
        _load(text, tmp_path, monkeypatch)


def test_one_of_several_must_be_chosen(loaded: Outboxes) -> None:
    """Guards against a command that works on an outbox which nobody named."""
    with pytest.raises(
        SetupError, match=r"lists 2 outboxes: choose one with --outbox NAME \(orders, billing\)"
    ):
        loaded.get()
    with pytest.raises(SetupError, match="does not list it; choose orders, billing"):
        loaded.get("order")


def test_outboxes_of_the_same_tables_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two names of one outbox, of which both seem to be relayed."""
    again = '[[outbox]]\nname = "again"\ndsn = "host=db dbname=billing user=other"\nschema = "billing"'
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
