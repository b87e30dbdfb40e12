"""What the commands write on stderr: for operators, for programs, and for a search for one event."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from outbox_pipelines.core import log
from outbox_pipelines.relay.telemetry.observers import observer
from outbox_pipelines.settings import load_settings
from outbox_pipelines.writer import emit
from tests.conftest import Outbox
from tests.relay.topic import NOISE, create_topic


@pytest.fixture
def unconfigured() -> Iterator[None]:
    """Leaves logging as it was."""
    root, ours = logging.getLogger(), logging.getLogger("outbox_pipelines")
    kafka = logging.getLogger("outbox_pipelines.librdkafka")
    handlers, level, propagate = list(root.handlers), ours.level, kafka.propagate
    yield
    root.handlers[:], kafka.propagate = handlers, propagate
    ours.setLevel(level)


def _drain(outbox: Outbox, code: int = 0, **environment: str) -> list[str]:
    done = outbox.process("relay", "--until-empty", **environment)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def _objects(lines: list[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines]
    for one in found:
        assert list(one)[:4] == ["time", "level", "logger", "message"]
        assert datetime.fromisoformat(one["time"]).tzinfo is not None
    return found


def _refusing_topic(outbox: Outbox) -> None:
    create_topic(outbox, **{"max.message.bytes": "2000"})


def test_a_relay_says_little(outbox: Outbox) -> None:
    """Guards against a log that is unreadable because of unimportant lines."""
    outbox.write(1, 2)
    taken, published = _drain(outbox)
    assert taken == "shard 0 taken"
    assert published.startswith("published 2 events in ")
    assert _drain(outbox, OUTBOX_LOG_LEVEL="error")[0] == "shard 0 taken"


def test_a_dead_letter_is_a_line_with_time_and_level(outbox: Outbox) -> None:
    """Guards against an error that does not say when."""
    _refusing_topic(outbox)
    with outbox.connect(autocommit=False) as connection:
        written = emit(connection, "order", 1, "order.placed", {"noise": NOISE})
    lines = _drain(outbox, code=1, OUTBOX_MAX_ATTEMPTS="1")
    (line,) = [line for line in lines if "dead letter: " in line]
    time, level, message = line.split(" ", 2)
    assert datetime.fromisoformat(time).tzinfo is not None
    assert level == "error:"
    assert message.startswith(f"dead letter: event {written.id} (seq {written.seq}, ")
    assert lines[-1].startswith("outbox: ")


def test_machines_get_an_object_a_line(outbox: Outbox) -> None:
    """Guards against lines that a log collector cannot read, or fields that are lost in a text."""
    _refusing_topic(outbox)
    with outbox.connect(autocommit=False) as connection:
        written = emit(connection, "order", 1, "order.placed", {"noise": NOISE})
        emit(connection, "order", 2, "order.placed", {"n": 1})
    *lines, last = _drain(outbox, code=1, OUTBOX_MAX_ATTEMPTS="1", OUTBOX_LOG_FORMAT="json")
    taken, letter, published = _objects(lines)
    assert (taken["message"], taken["level"], taken["shard"]) == ("shard 0 taken", "info", 0)
    assert (letter["level"], letter["logger"]) == ("error", "outbox_pipelines.relay.parking.notify")
    assert (letter["id"], letter["seq"], letter["attempts"]) == (str(written.id), written.seq, 1)
    assert letter["aggregate_id"] == "1"
    assert "MSG_SIZE_TOO_LARGE" in letter["error"]
    assert published["events"] == 1
    # How a command ends is a text for operators, whatever the format.
    assert last.startswith("outbox: 1 event could not be published")


def test_at_debug_each_event_has_a_line(outbox: Outbox) -> None:
    """Guards against an event that cannot be followed into its topic."""
    outbox.write("a", "b", "größer")
    lines = _drain(outbox, OUTBOX_LOG_LEVEL="debug", OUTBOX_LOG_FORMAT="json")
    shown = {
        one["id"]: one
        for one in _objects(lines)
        if one["logger"] == "outbox_pipelines.relay.telemetry.observers"
    }
    assert len(shown) == 3
    for message in outbox.messages():
        one = shown[message.headers["id"] or ""]
        assert (one["topic"], one["partition"], one["offset"]) == message[:3]
        assert (one["aggregate_type"], one["aggregate_id"]) == ("order", message.key)
        assert one["level"] == "debug"
    outbox.write("c")
    (text,) = [line for line in _drain(outbox, OUTBOX_LOG_LEVEL="debug") if " is in " in line]
    assert f" is in {outbox.topic()} [" in text


def test_at_debug_parked_events_have_lines_too(outbox: Outbox) -> None:
    """Guards against events that came late, and of which the log knows nothing."""
    _refusing_topic(outbox)
    with outbox.connect(autocommit=False) as connection:
        guilty = emit(connection, "order", 1, "order.placed", {"noise": NOISE})
        behind = emit(connection, "order", 1, "order.placed", {"n": 1})
    lines = _drain(outbox, 1, OUTBOX_LOG_LEVEL="debug", OUTBOX_LOG_FORMAT="json", OUTBOX_MAX_ATTEMPTS="1")
    shown = [
        (one["id"], one.get("error", one.get("offset")))
        for one in _objects(lines[:-1])
        if one["logger"] == "outbox_pipelines.relay.telemetry.observers"
    ]
    assert (str(guilty.id), "MSG_SIZE_TOO_LARGE") in shown
    assert (str(behind.id), 0) in shown


@pytest.mark.extended
def test_kafkas_client_speaks_at_debug_only(outbox: Outbox) -> None:
    """Guards against a client's noise on every outage, and against hiding it from those who look for it."""
    given = {"OUTBOX_KAFKA": "127.0.0.1:1", "OUTBOX_LOG_FORMAT": "json"}
    (line,) = _drain(outbox, 2, **given)
    assert line.startswith("outbox: no broker answers at 127.0.0.1:1")
    # The client's own words end with the milliseconds that a connection took.
    said, _, _ = line.partition("(after")
    *lines, last = _drain(outbox, 2, **given, OUTBOX_LOG_LEVEL="debug")
    assert "outbox_pipelines.librdkafka" in {one["logger"] for one in _objects(lines)}
    assert last.startswith(said)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("OUTBOX_LOG_LEVEL", "loud", "'debug', 'info'"), ("OUTBOX_LOG_FORMAT", "xml", "'text' or 'json'")],
)
def test_wrong_settings_of_the_log_are_one_line(outbox: Outbox, name: str, value: str, says: str) -> None:
    """Guards against a relay that logs differently from what its operator configured."""
    done = outbox.process("status", **{name: value})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"outbox: {name}={value}: ")
    assert says in line


@pytest.mark.usefixtures("unconfigured")
def test_case_does_not_matter_and_levels_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against two handlers, each of which writes every line."""
    for level in ("DEBUG", "Warning"):
        log.configure(load_settings(log_level=level))
        logging.getLogger("outbox_pipelines.relay.telemetry.observers").debug("one event")
        logging.getLogger("outbox_pipelines.librdkafka").error("kafka")
    text = capsys.readouterr().err
    assert (text.count("one event"), text.count("kafka")) == (1, 1)


@pytest.mark.usefixtures("unconfigured")
def test_an_exception_stays_in_its_object(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a traceback that breaks a stream of lines."""
    log.configure(load_settings(log_format="json"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("outbox_pipelines").exception("it broke", extra={"message_id": 7, "level": "mine"})
    (one,) = _objects(capsys.readouterr().err.splitlines())
    assert (one["message"], one["message_id"], one["level"]) == ("it broke", 7, "error")
    assert one["exception"].endswith("ValueError: two\nlines")


@pytest.mark.usefixtures("unconfigured")
def test_single_events_are_not_watched_by_default() -> None:
    """Guards against a call per event, 200,000 times a second, whose result is not used."""
    for level in ("info", "warning"):
        settings = load_settings(log_level=level)
        log.configure(settings)
        assert observer(settings) is None
