"""Commands that choose an outbox, and the status of all, on a real database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Outbox


@pytest.fixture
def file(outbox: Outbox, tmp_path: Path) -> str:
    path = tmp_path / "outbox.toml"
    path.write_text(
        f"""
        [outbox]
        kafka = "{outbox.settings.kafka}"
        [topics]
        topic = "{outbox.settings.topic}"
        [outboxes.away]
        dsn = "host=127.0.0.1 port=1 dbname=away"
        [outboxes.orders]
        dsn = {{ env = "ORDERS_DSN" }}
        [outboxes.empty]
        dsn = {{ env = "ORDERS_DSN" }}
        schema = "empty"
        """
    )
    return str(path)


def test_a_command_works_on_the_outbox_that_is_chosen(outbox: Outbox, file: str) -> None:
    """Guards against commands that ignore the choice: each takes it, before or after its name."""
    environment = {
        "OUTBOX_CONFIG": file,
        "ORDERS_DSN": outbox.settings.require_dsn(),
        "OUTBOX_DSN": "host=127.0.0.1 port=1 dbname=environment",
    }
    outbox.write("a", "b")
    refused = outbox.outbox("relay", "--until-empty", **environment)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "lists 3 outboxes: choose one with --outbox NAME (away, orders, empty)" in refused.stderr
    for arguments in (("--outbox", "orders", "shards"), ("shards", "--outbox", "orders")):
        assert outbox.outbox(*arguments, **environment).stdout.startswith("shard 0 ")
    set_ = outbox.outbox("shards", "set", "1", "--outbox", "orders", **environment)
    assert set_.stdout == "1 shard: nothing to change\n"
    relayed = outbox.outbox("relay", "--until-empty", "--outbox", "orders", **environment)
    assert relayed.returncode == 0, relayed.stderr
    assert [message.key for message in outbox.messages()] == ["a", "b"]
    # Of a command that needs no settings to say what it does.
    assert outbox.outbox("relay", "--help", OUTBOX_BATCH_EVENTS="wrong").returncode == 0


def test_the_status_of_all_has_a_line_for_each_worst_first(outbox: Outbox, file: str) -> None:
    """Guards against an outbox whose trouble hides another's, or that is not shown at all."""
    environment = {"OUTBOX_CONFIG": file, "ORDERS_DSN": outbox.settings.require_dsn()}
    outbox.write("a", "b")
    shown = outbox.outbox("status", "--all", **environment)
    assert shown.returncode == 2
    lines = [line.split()[0] for line in shown.stdout.splitlines()]
    assert lines == ["OUTBOX", "away", "empty", "orders"]
    assert "connect to the database" in shown.stdout
    assert "run `outbox migrate`" in shown.stdout
    found = json.loads(outbox.outbox("status", "--all", "--json", **environment).stdout)
    assert [(each["outbox"], each["backlog"]) for each in found] == [
        ("away", None),
        ("empty", None),
        ("orders", 2),
    ]
    both = outbox.outbox("status", "--all", "--outbox", "orders", **environment)
    assert both.returncode == 2
    assert "omit one of them" in both.stderr
