"""Replays from begin to end, as an operator types them; what they send, and what they refuse."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
import uuid
from contextlib import closing
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition
from psycopg.conninfo import make_conninfo

from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.catalog.subjects import Subjects
from outbox_pipelines.core.event import Event
from outbox_pipelines.core.topic_ends import read_to_ends
from outbox_pipelines.days.archive import drop
from outbox_pipelines.days.archive.day import archive
from outbox_pipelines.days.archive.manifest import EVENT_DATE, SCHEMA, Manifest
from outbox_pipelines.days.partitions import close
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.postgres import Postgres
from outbox_pipelines.relay import service
from outbox_pipelines.replay import replay_topics, replays, sender
from outbox_pipelines.replay.replay_reading import Part, Reader
from outbox_pipelines.replay.replay_record import Replay, cancel
from outbox_pipelines.replay.selection import Selection
from outbox_pipelines.writer import BytesPayload, emit
from tests import forks
from tests.conftest import (
    Message,
    Outbox,
    _reader,
    clean_environment,
    command,
    either,
    headers_of,
    may_log_in,
    patience,
    read_topic,
    wait_until,
)
from tests.kafka_clients import administrator, lent
from tests.reconciliation.place import DAY, TODAY, Place
from tests.registry import FakeRegistry
from tests.relay.topic import change, create, create_topic

NEXT = DAY + timedelta(1)
CATALOG = """
events:
  order.placed: {description: x, producer: x, owner: x, aggregate_type: order, version: 4,
                 versions: {3: {type: object, required: [total], properties: {total: {type: number}}}},
                 schema: {type: object, required: [total], properties: {total: {type: integer}}}}
"""
WHY = ("--reason", "a new consumer", "--rate", "1000000000")


def typed(place: Place, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`outbox replay` with these arguments, and the archive of the place."""
    environment = {"OUTBOX_ARCHIVE": str(place.settings.archive), **environment}
    return place.outbox.outbox("replay", *arguments, **environment)


def dropped(place: Place, day: date = DAY) -> Manifest:
    """Let the day be in the archive alone."""
    (closing,) = close.close(place.settings, day)
    assert closing.closed, closing.why_not
    manifest = archive(place.settings, day).manifest
    assert drop.drop(place.settings, day, early=True).now
    return manifest


def replayed(place: Place, topic: str = "") -> list[Message]:
    """The replayed messages, in the order of their aggregate's partition."""
    messages = read_topic(place.settings.kafka, topic or place.topic)
    return [each for each in messages if "replay-id" in each.headers]


def test_days_of_archive_and_table_are_sent_again(place: Place) -> None:
    """Guards against a gap or an overlap between the places of days, another order, and another message."""
    payload = BytesPayload(b"\0\xff", "application/x-protobuf").text()
    more: dict[str, Any] = {"headers": '{"tenant": 7.50}', "correlation_id": "c", "version": 3}
    old = place.write(30, keys=1, payload=payload, **more)
    new = place.write(20, keys=1, day=NEXT)
    place.relay()
    originals = {each.headers["id"]: each for each in place.messages()}
    assert originals[old[0]].value == "\0\udcff"
    dropped(place)
    reported = typed(place, "--since", str(DAY), "--until", str(NEXT), "--same-topic", *WHY)
    assert reported.returncode == 0, reported.stderr
    assert "done  50 of 50 sent" in reported.stdout
    again = replayed(place)
    assert [each.headers["id"] for each in again] == old + new
    for each in again:
        original = originals[each.headers["id"]]
        marks = {name: each.headers.pop(name) for name in ("replay-id", "replayed-at")}
        assert str(marks["replay-id"]) in reported.stdout
        assert (each.headers, each.value, each.key) == (original.headers, original.value, original.key)
    listed = json.loads(typed(place, "list", "--json").stdout)
    (row,) = listed
    assert (row["state"], row["sent"], row["reason"]) == ("done", 50, "a new consumer")
    assert row["files"][0]["day"] == str(DAY)
    assert place.reconcile().equal


@pytest.mark.extended
def test_a_redacted_day_is_sent_as_it_is_now(place: Place) -> None:
    """Guards against a value that comes back from an archive, events that are lost with it, and a replay that
    does not say what is gone."""
    ids = place.write(2, keys=1, payload='{"email": "a@example.com", "total": 1.50}')
    place.write(1, aggregate_type="parcel")
    place.relay()
    dropped(place)
    archive = {"OUTBOX_ARCHIVE": str(place.settings.archive)}
    asked = ("--where", f"id = '{ids[0]}'", "--path", "email", "--reason", "r")
    reported = place.outbox.outbox("archive", "redact", str(DAY), *asked, **archive)
    assert reported.returncode == 0, reported.stderr
    reported = typed(place, "--since", str(DAY), "--aggregate-type", "order", "--same-topic", *WHY)
    assert "done  2 of 2 sent" in reported.stdout, reported.stderr
    again = {str(each.headers["id"]): json.loads(each.value or "") for each in replayed(place)}
    assert again == {
        ids[0]: {"email": "outbox-erased", "total": 1.5},
        ids[1]: {"email": "a@example.com", "total": 1.5},
    }
    assert place.reconcile().equal
    limits = {"OUTBOX_RETENTION_DAYS": "1", "OUTBOX_ARCHIVE_RETENTION_DAYS": "parcel=2"}
    assert place.outbox.outbox("archive", "expire", **archive, **limits).returncode == 0
    gone = f"1 event of {DAY} was removed by retention on {TODAY}"
    notes = [gone, f"events of {DAY} were redacted on {TODAY}"]
    shown = typed(place, "--since", str(DAY), "--dry-run").stdout
    assert shown.endswith("".join(f"  note: {each}\n" for each in notes) + "2 events, nothing sent\n")
    assert gone in typed(place, "--aggregate-type", "parcel", "--dry-run").stderr
    assert typed(place, "--since", str(DAY), "--same-topic", *WHY).returncode == 0
    listed = json.loads(typed(place, "list", "--json").stdout)
    assert [each["notes"] for each in listed] == [notes, notes[1:]]


@pytest.mark.extended
def test_conditions_are_met_together_in_both_places(place: Place) -> None:
    """Guards against a condition that only one of the two places applies."""
    for day in (DAY, NEXT):
        place.write(4, keys=2, day=day, payload='{"total": 5}')
        place.write(2, keys=2, day=day, payload='{"total": 7}', event_type="order.paid")
    place.write(1, day=NEXT, aggregate_type="parcel")
    place.relay()
    dropped(place)
    known = " AND ".join(f"{name} IS NOT DISTINCT FROM {name}" for name in [*SCHEMA.names, EVENT_DATE])
    where = f"(payload->>'total')::INT > 5 AND event_date <= DATE '{NEXT}' AND {known} -- paid"
    reported = typed(place, "--aggregate-id", "1", "--where", where, "--dry-run")
    assert reported.returncode == 0, reported.stderr
    assert [line.split()[:3] for line in reported.stdout.splitlines()] == [
        [str(DAY), "1", "order.paid"],
        [str(NEXT), "1", "order.paid"],
        ["2", "events,", "nothing"],
    ]
    assert typed(place, "--topic", place.topic, "--same-topic", "--dry-run").stdout.endswith(
        "12 events, nothing sent\n"
    )
    assert replayed(place) == []


@pytest.mark.extended
@pytest.mark.parametrize("is_dropped", [False, True])
def test_what_was_not_published_is_not_sent(place: Place, is_dropped: bool) -> None:
    """Guards against a replay that publishes a dead letter, or an event before the relay does."""
    place.write(3)
    place.relay()
    place.rows("INSERT INTO outbox_parked SELECT *, 'failed' FROM outbox ORDER BY seq LIMIT 1")
    if is_dropped:
        dropped(place)
    place.write(2, day=NEXT)
    reported = typed(place, "--since", str(DAY), "--same-topic", *WHY)
    assert "done  2 of 2 sent" in reported.stdout, reported.stderr


def test_another_topic_has_as_many_partitions(place: Place) -> None:
    """Guards against keys that change their partition, and topics that appear unasked."""
    place.write(6)
    place.relay()
    wrong, right = f"{place.topic}-wrong", f"{place.topic}.replay"
    create(place.settings.kafka, wrong, 2)
    day = ("--since", str(DAY))
    refused = typed(place, *day, "--to-topic", wrong, *WHY)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "has 2 partitions, and" in refused.stderr
    refused = typed(place, *day, "--to-topic", "{topic}.replay", *WHY)
    assert f"topic {right} does not exist: create it with 3 partitions" in refused.stderr
    reported = typed(place, *day, "--to-topic", "{topic}.replay", "--create", *WHY)
    assert reported.returncode == 0, reported.stderr
    originals = {each.headers["id"]: each.partition for each in place.messages()}
    assert {each.headers["id"]: each.partition for each in replayed(place, right)} == originals
    # Refused ones left no trace.
    assert len(json.loads(typed(place, "list", "--json").stdout)) == 1


def test_several_topics_are_sent_to_a_new_one(place: Place) -> None:
    """Guards against a topic that is created twice, and one that a refusal leaves behind."""
    for kind, partitions in (("parcel", 3), ("refund", 2)):
        create_topic(place.outbox, partitions, of=kind)
        place.write(2, aggregate_type=kind)
    place.write(4)
    place.relay()
    to = ("--to-topic", f"{place.topic}.all", "--create", *WHY)
    refused = typed(place, "--since", str(DAY), *to)
    assert f"topic {place.topic}.all would have 3 partitions, and" in refused.stderr
    reported = typed(place, "--aggregate-type", "order", "--aggregate-type", "parcel", *to)
    assert "done  6 of 6 sent" in reported.stdout, reported.stderr
    assert len(replayed(place, f"{place.topic}.all")) == 6


@pytest.mark.extended
@pytest.mark.parametrize("damage", ["file", "manifest", "away"])
def test_a_damaged_archive_is_not_read(place: Place, damage: str) -> None:
    """Guards against a file that is read although it is not the one that was proven."""
    place.write(3)
    place.relay()
    manifest = dropped(place)
    root = Path(str(place.settings.archive))
    file = root / f"events/event_date={DAY}/{manifest.file}"
    stated = root / f"_outbox/manifests/{DAY}.json"
    if damage == "file":
        content = bytearray(file.read_bytes())
        content[50] ^= 1
        file.write_bytes(content)
    elif damage == "manifest":
        stated.write_text(stated.read_text().replace('"rows": 3', '"rows": 4'))
    else:
        root.rename(root.with_name("elsewhere"))
    refused = typed(place, "--since", str(DAY), "--same-topic", *WHY)
    assert (refused.returncode, refused.stdout) == (2, "")
    said = {
        "file": "has changed since it was written",
        "manifest": "digest differs",
        "away": "OUTBOX_ARCHIVE",
    }
    assert said[damage] in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert replayed(place) == []


def test_an_archive_that_goes_away_stops_the_replay(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a trace of Python when a disk is unmounted amid a replay, and one that cannot go on."""
    written = place.write(30, keys=1) + place.write(20, keys=1, day=NEXT)
    place.relay()
    dropped(place)
    dropped(place, NEXT)
    root = Path(str(place.settings.archive))
    send = sender.Sender.send

    def then_away(self: sender.Sender, events: list[Event]) -> None:
        send(self, events)
        root.rename(root.with_name("elsewhere"))

    with monkeypatch.context() as patched:
        patched.setattr(sender.Sender, "send", then_away)
        with pytest.raises(SetupError) as stopped:
            replays.begin(
                place.settings,
                Selection(since=str(DAY)),
                "{topic}",
                reason="x",
                actor="y",
                creates=False,
                rate=1e9,
                is_stopped=lambda: False,
                progress=lambda *_: None,
            )
    ((replay, state, why),) = place.rows("SELECT id::text, state, error FROM outbox_replays")
    assert state == "stopped"
    assert "OUTBOX_ARCHIVE" in why
    assert f"{stopped.value}" == f"{why}. Correct the cause, then run `outbox replay --resume {replay}`"
    again = typed(place, "--resume", replay)
    assert (again.returncode, again.stderr) == (2, f"outbox: {why}\n")
    root.with_name("elsewhere").rename(root)
    assert "done  50 of 50 sent" in typed(place, "--resume", replay).stdout
    assert list(dict.fromkeys(each.headers["id"] for each in replayed(place))) == written


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--since", str(DAY)], "say where to: either --to-topic NAME or --same-topic"),
        (["--same-topic", *WHY], "no events are selected"),
        (["--since", str(DAY), "--same-topic"], "--reason is required"),
        (["--event-type", "order.unknown", "--same-topic", *WHY], "no published event is selected"),
        (["--where", "nothing = 1", "--same-topic", *WHY], '"nothing" not found'),
        (
            ["--where", "(SELECT content FROM read_text('/etc/hostname')) <> ''", "--same-topic", *WHY],
            "disabled",
        ),
        (["--resume", "01a21924-ba13-760e-85c0-7786a622b10b", "--same-topic"], "omit --same-topic"),
        (["--resume", "01a21924-ba13-760e-85c0-7786a622b10b"], "there is no replay"),
        (["cancel", "01a21924-ba13-760e-85c0-7786a622b10b"], "there is no replay"),
    ],
)
def test_wrong_input_is_one_line(place: Place, arguments: list[str], says: str) -> None:
    """Guards against a trace of Python, and events that were sent before a mistake was found."""
    place.write(1)
    place.relay()
    refused = typed(place, *arguments)
    assert (refused.returncode, refused.stdout) == (1 if says.startswith("no published") else 2, "")
    assert says in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert replayed(place) == []


def running(place: Place, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`outbox replay` in a process that is under way."""
    process: forks.Popen[str] = forks.Popen(
        command("replay", *arguments),
        env=clean_environment() | place.outbox.environment | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    (before,) = place.rows("SELECT coalesce(sum(sent), 0) FROM outbox_replays")

    def is_under_way() -> bool:
        assert process.poll() is None, process.communicate()
        return place.rows("SELECT coalesce(sum(sent), 0) FROM outbox_replays") > [before]

    wait_until(is_under_way, what="a replay under way")
    return process


@pytest.mark.extended
def test_a_killed_replay_is_resumed_without_a_loss(place: Place) -> None:
    """Guards against events that are lost or repeated from the start after a kill -9."""
    place.outbox.fill(6_000)
    place.relay()
    process = running(place, "--topic", place.topic, "--same-topic", "--reason", "again", "--rate", "500")
    refused = typed(place, "--topic", place.topic, "--same-topic", *WHY)
    assert "another replay is running" in refused.stderr
    process.kill()
    process.communicate()
    ((replay, state, sent),) = place.rows("SELECT id::text, state, sent FROM outbox_replays")
    assert state == "running"
    assert 0 < sent < 6_000
    before = len(replayed(place))
    reported = typed(place, "--resume", replay, "--rate", "1000000000")
    assert reported.returncode == 0, reported.stderr
    assert "done  6,000 of 6,000 sent" in reported.stdout
    again = replayed(place)
    assert {each.headers["id"] for each in again} == {each.headers["id"] for each in place.messages()}
    # What the database knew is not repeated.
    assert len(again) <= before + 6_000 - sent
    assert {each.headers["replay-id"] for each in again} == {replay}
    assert "is done: begin another one" in typed(place, "--resume", replay).stderr


@pytest.mark.extended
def test_it_stops_on_a_signal_and_when_it_is_canceled(place: Place) -> None:
    """Guards against a Ctrl-C that loses the position, a cancellation that the process does not see, and a
    number of events that is lower than what it has sent."""
    place.outbox.fill(6_000)
    place.relay()
    slowly = ("--topic", place.topic, "--same-topic", "--reason", "again", "--rate", "500")
    process = running(place, *slowly)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    ((replay, state, sent),) = place.rows("SELECT id::text, state, sent FROM outbox_replays")
    assert state == "stopped"
    assert sent == len(replayed(place))
    assert f"outbox replay --resume {replay}" in said
    assert f"{replay}  stopped" in place.outbox.outbox("status").stdout
    resumed = running(place, "--resume", replay, "--rate", "500")
    assert "canceled" in typed(place, "cancel", replay).stdout
    listed, said = resumed.communicate(timeout=60)
    assert resumed.returncode == 1, said
    assert f"canceled  {len(replayed(place)):,} of 6,000 sent" in listed
    assert "there is nothing to cancel" in typed(place, "cancel", replay).stderr


def test_an_operator_replays_and_a_relay_does_not(place: Place) -> None:
    """Guards against replays that need the owner's rights, or that a service could begin."""
    place.write(2)
    place.relay()
    name = uuid.uuid4().hex[:8]
    operator, relay = f"operator_{name}", f"relay_{name}"
    day = ("--since", str(DAY), "--same-topic", *WHY)
    try:
        for role, grant in ((operator, "outbox_grant_operator"), (relay, "outbox_grant_relay")):
            place.rows(f"CREATE ROLE {role} {may_log_in(place.settings.dsn)}")
            place.rows("SELECT " + grant + "(%s)", role)
        reported = place.outbox.outbox(
            "replay", *day, OUTBOX_DSN=make_conninfo(place.settings.dsn, user=operator)
        )
        assert "done  2 of 2 sent" in reported.stdout, reported.stderr
        assert place.rows("SELECT actor FROM outbox_replays") == [(operator,)]
        refused = place.outbox.outbox(
            "replay", *day, OUTBOX_DSN=make_conninfo(place.settings.dsn, user=relay)
        )
        assert refused.returncode == 2
        assert "permission denied for function outbox_replay_begin" in refused.stderr
        assert len(replayed(place)) == 2
    finally:
        for role in (operator, relay):
            place.rows(f"DROP OWNED BY {role}")
            place.rows(f"DROP ROLE {role}")


@pytest.mark.extended
def test_an_outage_is_told_and_a_cancel_ends_it(
    own_servers: tuple[Postgres, Kafka, Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a command that says nothing while Kafka stands still, and hears nothing."""
    _, kafka, outbox = own_servers
    outbox.fill(100)
    service.relay(outbox.settings, until_empty=True)
    require = replay_topics.require

    def then_frozen(*arguments: Any, **options: Any) -> Any:
        found = require(*arguments, **options)
        kafka.freeze()
        return found

    monkeypatch.setattr(replay_topics, "require", then_frozen)
    monkeypatch.setattr(sender, "QUEUE", {"queue_buffering_max_messages": 10})
    monkeypatch.setattr(sender, "_LAST_SECONDS", 0.1)
    monkeypatch.setattr(replays, "_SAY_SECONDS", 0.1)
    reported: list[Replay] = []
    troubles: list[str] = []
    ended: list[Replay] = []

    def say(found: Replay, _: int, trouble: str) -> None:
        reported.append(found)
        troubles.append(trouble)

    def replay() -> None:
        ended.append(
            replays.begin(
                outbox.settings,
                Selection(where="true"),
                "{topic}",
                reason="x",
                actor="y",
                creates=False,
                rate=1e9,
                is_stopped=lambda: False,
                progress=say,
            )
        )

    thread = threading.Thread(target=replay, daemon=True)
    thread.start()
    wait_until(lambda: "no answer" in troubles, what="that Kafka does not answer")
    cancel(outbox.settings, reported[0].id)
    thread.join(patience(30))
    kafka.thaw()
    assert [each.state for each in ended] == ["canceled"]


@pytest.mark.parametrize(
    "shape",
    either(
        {"value_format": "cloudevents", "cloudevents_source": "/shop"},
        {"value_format": "flat", "header_names": {"version": "v", "causation-id": ""}},
        {"value_format": "envelope", "tombstones": True},
        {"format": "json_schema", "registry_framing": "header"},
        {"format": "avro", "registry_framing": "value"},
    ),
)
def test_a_replayed_message_is_the_original_and_its_marks(
    place: Place, registry: FakeRegistry, tmp_path: Path, shape: dict[str, Any]
) -> None:
    """Guards against a message that a consumer reads in another way than its original."""
    if "format" in shape:
        catalog = tmp_path / "catalog.yaml"
        catalog.write_text(CATALOG)
        shape = {**shape, "registry_url": registry.url, "catalog_file": catalog}
    place = replace(place, outbox=Outbox(place.outbox.settings.model_copy(update=shape)))
    if "format" in shape:
        for found in Subjects(read_catalog(catalog), place.settings).of_event_types.values():
            registry.add(found.name, found.text, found.kind)
    more: dict[str, Any] = {"headers": '{"tenant": 7.50, "ü": "ö"}', "correlation_id": 'c"1', "version": 3}
    for day in (DAY, NEXT):
        place.write(1, day=day, payload='{"total": 1.50}', **more)
        place.write(1, day=day, payload='{"total": 2}')
    place.relay()
    dropped(place)
    replays.begin(
        place.settings,
        Selection(since=str(DAY)),
        "{topic}",
        reason="x",
        actor="y",
        creates=False,
        rate=1e9,
        is_stopped=lambda: False,
        progress=lambda *_: None,
    )
    originals, again = {}, []
    for key, value, headers in raw(place):
        if "replay-id" in headers:
            again.append((key, value, headers))
        else:
            originals[headers["id"]] = (key, value, headers)
    assert len(again) == len(originals) == 4
    for key, value, headers in again:
        marks = {name: headers.pop(name).decode() for name in ("replay-id", "replayed-at")}
        if shape.get("value_format") == "cloudevents":
            attributes = "".join(f', "{name.replace("-", "")}": "{mark}"' for name, mark in marks.items())
            assert attributes.encode() in value
            value = value.replace(attributes.encode(), b"")
        assert (key, value, headers) == originals[headers["id"]]


def raw(place: Place) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Key, value and headers of each message; Avro is no text."""
    starts = [TopicPartition(place.topic, partition, 0) for partition in range(3)]
    with closing(_reader(place.settings.kafka)) as client:
        return [
            (message.key(), message.value(), dict(headers_of(message)))
            for messages in read_to_ends(client, starts)
            for message in messages
        ]


NARROW = {"max.message.bytes": "2000", "compression.type": "uncompressed"}


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_refused_event_is_named_and_nothing_behind_it_is_unknown(place: Place, delivery: str) -> None:
    """Guards against a record that counts less than was sent, and a refusal that blames another event."""
    written = place.write(20, keys=9)
    (large,) = place.write(1, payload=json.dumps({"text": uuid.uuid4().hex * 250}))
    written += [large, *place.write(18, keys=9)]
    place.relay()
    narrow = f"{place.topic}-narrow"
    create(place.settings.kafka, narrow, 3, **NARROW)
    environment = {"OUTBOX_DELIVERY": delivery, "OUTBOX_KAFKA_CONFIG": "compression.type=none"}
    refused = typed(place, "--since", str(DAY), "--to-topic", narrow, *WHY, **environment)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    seqs = dict(place.rows("SELECT id::text, seq FROM outbox ORDER BY seq"))
    assert f"event {large} (seq {seqs[large]}, order.placed of order 0), 8,012 bytes" in refused.stderr
    assert f"refused: topic {narrow}: MSG_SIZE_TOO_LARGE: larger than" in refused.stderr
    ((replay, sent, position, why),) = place.rows(
        "SELECT id::text, sent, position, error FROM outbox_replays"
    )
    # Everything before it was sent, in order, although batches of them were refused too.
    assert (sent, position) == (20, seqs[large] - 1)
    there = [each.headers["id"] for each in replayed(place, narrow)]
    behind = written[21:]
    assert {*written[:20]} <= {*there}
    later = [each for each in there if each in behind]
    assert len(there) == 20 + len(later)
    assert (f"; {len(later)} later event" in why) == bool(later)
    assert delivery == "at_least_once" or not later
    without = f"seq > {position} AND id <> '{large}'"
    assert without in why
    canceled = typed(place, "cancel", replay)
    assert "20 of 39 sent" in canceled.stdout
    assert f"event {large}" in canceled.stdout
    rest = ("--since", str(DAY), "--where", without, "--to-topic", narrow)
    assert "18 of 18 sent" in typed(place, *rest, *WHY, **environment).stdout


def test_none_behind_a_refused_event_overtakes_it(place: Place) -> None:
    """Guards against the next requests of a new producer, which Kafka accepts behind a refused one."""
    payload = json.dumps({"text": uuid.uuid4().hex * 250})
    written = place.write(1, keys=1, payload=payload) + place.write(30, keys=1)
    place.relay()
    narrow = f"{place.topic}-narrow"
    create(place.settings.kafka, narrow, 3, **NARROW)
    environment = {"OUTBOX_KAFKA_CONFIG": "compression.type=none,batch.num.messages=1,linger.ms=0"}
    refused = typed(place, "--since", str(DAY), "--to-topic", narrow, *WHY, **environment)
    assert f"event {written[0]} (seq" in refused.stderr
    assert replayed(place, narrow) == []
    change(place.settings.kafka, narrow, **{"max.message.bytes": "100000"})
    ((replay,),) = place.rows("SELECT id::text FROM outbox_replays")
    assert "done  31 of 31 sent" in typed(place, "--resume", replay, **environment).stdout
    assert [each.headers["id"] for each in replayed(place, narrow)] == written


def test_a_refusal_by_the_topic_blames_no_event(place: Place) -> None:
    """Guards against advice to leave out an event, and then the next, of a topic that accepts none."""
    place.write(3)
    place.relay()
    strict = f"{place.topic}-strict"
    create(place.settings.kafka, strict, 3, **{"message.timestamp.before.max.ms": "0"})
    refused = typed(place, "--since", str(DAY), "--to-topic", strict, *WHY)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"topic {strict}: INVALID_TIMESTAMP: " in refused.stderr
    assert "event " not in refused.stderr
    assert place.rows("SELECT sent FROM outbox_replays") == [(0,)]


def test_what_follows_from_a_refusal_is_not_its_reason(place: Place) -> None:
    """Guards against a message about what is behind the refused event, if the client reports that first."""
    made = sender.Sender(
        place.settings,
        uuid.uuid4(),
        {},
        {},
        rate=1e9,
        is_stopped=lambda: False,
        position=0,
        sent=0,
    )
    message: Any = SimpleNamespace(topic=lambda: "orders")
    made._refuse(KafkaError(KafkaError._GAPLESS_GUARANTEE), message)
    made.settle()
    made._refuse(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), message)
    with pytest.raises(SetupError, match=r"topic orders: .* grant WRITE"):
        made.settle()
    made.close()


def test_what_is_published_while_events_are_counted_is_not_counted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a replay that says "done, 3 of 5 sent"."""
    place.write(3)
    place.relay()
    find = Reader.parts

    def found(reader: Reader) -> list[Part]:
        parts = find(reader)
        if place.rows("SELECT count(*) FROM outbox") == [(3,)]:
            place.write(2)
            place.relay()
        return parts

    monkeypatch.setattr(Reader, "parts", found)
    done = begun(place)
    assert (done.state, done.sent, done.events) == ("done", 3, 3)


def begun(place: Place) -> Replay:
    """A replay of all events into their topics, at its end."""
    return replays.begin(
        place.settings,
        Selection(where="true"),
        "{topic}",
        reason="again",
        actor="me",
        creates=False,
        rate=1e9,
        is_stopped=lambda: False,
        progress=lambda *_: None,
    )


def test_what_commits_late_is_sent_and_counted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a replay that says "done, 3 of 2 sent"."""
    require = replay_topics.require
    with place.outbox.connect(autocommit=False) as late:
        emit(late, "order", 1, "order.placed", {})
        place.outbox.write(2, 3)
        place.relay()

        def required(*given: Any, **named: Any) -> Any:
            late.commit()
            place.relay()
            return require(*given, **named)

        monkeypatch.setattr(replay_topics, "require", required)
        done = begun(place)
    assert (done.state, done.sent, done.events) == ("done", 3, 3)


@pytest.mark.extended
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_topic_that_is_deleted_in_between(place: Place, delivery: str) -> None:
    """Guards against a replay that is "done" although its topic was made again, without what was in it."""
    place.write(3)
    place.relay()
    topic = f"{place.topic}-deleted"
    create(place.settings.kafka, topic, 3)
    is_deleted = False

    def replace_once() -> bool:
        nonlocal is_deleted
        if not is_deleted:
            is_deleted = True
            with lent(administrator, place.settings.kafka) as admin:
                admin.delete_topics([topic])[topic].result(600)
            create(place.settings.kafka, topic, 3)
        return False

    with pytest.raises(SetupError, match="was deleted during the replay, with events of it: begin another"):
        replays.begin(
            place.settings.model_copy(update={"delivery": delivery}),
            Selection(where="true"),
            topic,
            reason="again",
            actor="me",
            creates=False,
            rate=1e9,
            is_stopped=replace_once,
            progress=lambda *_: None,
        )
    assert place.rows("SELECT state, error LIKE 'topic % was deleted%' FROM outbox_replays") == [
        ("canceled", True)
    ]


def test_a_key_is_not_awaited_once_its_topic_is_complete(place: Place) -> None:
    """Guards against a replay that stands still: the first key completes the topic, the second one waits."""
    topic = f"{place.topic}-one"
    create(place.settings.kafka, topic, 1)
    events = [
        Event(n, str(uuid.uuid4()), "order", key, "order.placed", "{}", None)
        for n, key in enumerate(["first", "second", "second"], 1)
    ]
    deadline = time.monotonic() + patience(10)
    made = sender.Sender(
        place.settings,
        uuid.uuid4(),
        {("order", "order.placed"): topic},
        {topic: 1},
        rate=1e9,
        is_stopped=lambda: time.monotonic() > deadline,
        position=0,
        sent=0,
    )
    made.send(events)
    assert made.finish()
    assert (made.position, made.sent) == (3, 3)
    made.close()


@pytest.mark.extended
def test_a_database_that_ends_the_session_stops_the_replay(place: Place) -> None:
    """Guards against a trace of Python, and a replay that cannot go on after an outage."""
    place.outbox.fill(3_000)
    place.relay()
    process = running(place, "--topic", place.topic, "--same-topic", "--reason", "again", "--rate", "500")
    place.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'outbox replay' AND datname = current_database()"
    )
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    ((replay,),) = place.rows("SELECT id::text FROM outbox_replays WHERE state = 'running'")
    assert (said.count("\n"), f"run `outbox replay --resume {replay}`" in said) == (1, True), said
    assert "done  3,000 of 3,000 sent" in typed(place, "--resume", replay, "--rate", "1000000").stdout
