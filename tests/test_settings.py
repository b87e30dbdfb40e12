"""Values and names of settings that are mistyped."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_pipelines import settings
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import load_settings, make_settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention_days", 10**20),
        ("close_after_minutes", 1e300),
        ("retry_seconds", float("inf")),
        ("alert_after_seconds", float("nan")),
        ("max_attempts", 2**31),
        ("kafka", "127.0.0.1:99999"),
        ("kafka", "a:9092,:9092"),
        ("kafka", "a:9092 b:9092"),
    ],
)
def test_a_value_that_nothing_can_use_is_refused(name: str, value: object) -> None:
    """Guards against a message that blames the database, or another port, for a number that is too large."""
    with pytest.raises(SetupError, match=f"OUTBOX_{name.upper()}"):
        make_settings(**{name: value})


def test_brokers_have_all_kinds_of_addresses() -> None:
    brokers = "broker, kafka-1.example.com:9092,10.0.0.1:9093,[::1]:9094"
    assert make_settings(kafka=brokers).kafka == brokers


def test_a_home_is_found() -> None:
    """Guards against a file that a shell finds and the program does not."""
    given = make_settings(
        catalog_file="~/catalog.yaml", expectations="~/gx", registry_ca="~no-such-user/ca.pem"
    )
    home = Path.home()
    assert (given.catalog_file, given.expectations) == (home / "catalog.yaml", home / "gx")
    assert given.registry_ca == Path("~no-such-user/ca.pem")


def test_a_mistyped_name_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against an operator who believes in exactly_once, which the relay does not know of."""
    monkeypatch.setattr(settings, "_mistyped", set())
    monkeypatch.setenv("OUTBOX_RETENTION_DAY", "s3cr3t")
    monkeypatch.setenv("OUTBOX_OF_THE_SHOP", "1")
    monkeypatch.setenv("OUTBOX_DELIVERI", "exactly_once")
    for _ in range(2):
        load_settings()
    assert caplog.messages == [
        "OUTBOX_DELIVERI is not a setting and has no effect: did you mean OUTBOX_DELIVERY?",
        "OUTBOX_RETENTION_DAY is not a setting and has no effect: did you mean OUTBOX_RETENTION_DAYS?",
    ]


def test_a_settings_file_that_is_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of pages for one wrong character in a password."""
    file = tmp_path / "outbox.toml"
    file.write_bytes('[outbox]\nkafka = "Müller"'.encode("latin-1"))
    monkeypatch.setenv("OUTBOX_CONFIG", str(file))
    with pytest.raises(SetupError, match=r"outbox.toml cannot be read as UTF-8 text: [^\n]*$"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTBOX_KAFKA", "broker:9092,password=hunter2"),
        ("OUTBOX_SCHEMA", "postgresql://u:hunter2@h/d"),
        ("OUTBOX_HEADER_NAMES", "id=postgresql://u:hunter2@h/d"),
        ("OUTBOX_DRAIN_CONSUMERS", "shop:consumer postgresql://u:hunter2@h/d"),
    ],
)
def test_what_is_in_a_wrong_setting(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a password that passes as a host, and an address that passes as a name."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=f"^{name}[^\n]* write ") as refused:
        load_settings()
    assert "hunter2" not in str(refused.value)
