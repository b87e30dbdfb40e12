"""The messages of a day compared with what a consumer has handled."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.reconciliation import processed
from outbox_pipelines.reconciliation.processed import chosen
from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox, fresh_database, wait_until
from tests.consumer.place import Place as ConsumerPlace
from tests.consumer.place import running
from tests.reconciliation.place import DAY, START_MS, Place, found, new_id, one


def test_a_consumer_that_has_handled_all_is_equal(place: Place) -> None:
    """The real consumer, with types that it passes over."""
    place.write(6)
    place.write(3, event_type="order.seen")
    place.relay()
    place.name(event_types=["order.placed"])
    place.rows(
        "CREATE TABLE effects (seq bigserial, event_id text, key text, n int, "
        "by int DEFAULT pg_backend_pid())"
    )
    at = ConsumerPlace(place.settings.dsn, place.settings.kafka, place.topic)
    with running(at.consumer()) as run:
        wait_until(lambda: at.effects() == 6)
        run.end()
    report = place.reconcile()
    assert found(report.sides[1]) == {}
    assert report.sides[1].compared == 6
    assert report.equal


def test_an_event_that_it_passed_over_is_missing(place: Place) -> None:
    """Guards against offsets that were set forward by hand."""
    ids = place.write(5)
    place.relay()
    place.consumer(ids[1:])
    report = place.reconcile()
    assert found(report.sides[0]) == {}
    assert found(report.sides[1]) == {"missing": 1}
    missing = one(report.sides[1], "missing")
    assert missing.kind.status is Status.ERROR
    (example,) = missing.examples
    (message,) = [each for each in place.messages() if each.headers["id"] == ids[0]]
    assert (example.id, example.topic) == (ids[0], place.topic)
    assert (example.partition, example.offset) == (message.partition, message.offset)


def test_what_its_group_has_not_reached_lags(place: Place) -> None:
    place.write(4)
    place.relay()
    place.consumer()
    ids = place.write(2)
    place.relay()
    report = place.reconcile()
    assert found(report.sides[1]) == {"lagging": 2}
    lagging = one(report.sides[1], "lagging")
    assert sorted(str(each.id) for each in lagging.examples) == sorted(ids)
    assert {each.detail for each in lagging.examples} == {"not received"}
    assert report.status is Status.WARN


@pytest.mark.extended
def test_each_consumer_is_judged_separately(place: Place) -> None:
    """Guards against what one has handled, or is behind, that counts for the next."""
    ids = place.write(3)
    place.relay()
    place.consumer(ids[1:])
    billing = place.file.read_text()
    place.file.write_text(f"{billing}\n[accounts]\n[shipping]\ntopics = ['another']")
    report = place.reconcile()
    assert {side.name: found(side) for side in report.sides[1:]} == {
        "billing": {"missing": 1},
        "accounts": {"lagging": 3},
        "shipping": {},
    }
    assert report.summary == "billing: 1 missing; accounts: 3 lagging"


@pytest.mark.extended
def test_without_offsets_the_time_decides(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a group that Kafka has forgotten, or that never was."""
    ids = place.write(3)
    place.relay()
    place.consumer(ids[1:], group=f"{place.topic}-unknown")
    report = place.reconcile()
    assert found(report.sides[1]) == {"lagging": 1}
    assert "has no offsets in Kafka" in report.sides[1].notes[0]
    monkeypatch.setattr(processed, "_GRACE_MS", 0)
    assert found(place.reconcile().sides[1]) == {"missing": 1}


def test_what_its_inbox_contains_is_distinguished(place: Place) -> None:
    """Guards against events that were received, and count as handled, also if their topic has lost them."""
    ids = place.write(5)
    place.relay()
    place.consumer()
    for event_id, status in zip(ids, ("waiting", "failed", "discarded", "processed"), strict=False):
        place.receive(event_id, status)
    (lost,) = place.write(1)
    place.pass_over()
    place.receive(lost, "failed")
    report = place.reconcile()
    assert found(report.sides[1]) == {"lagging": 1, "dead_letters": 2, "discarded": 1}
    dead, without = one(report.sides[1], "dead_letters").examples
    assert (dead.id, dead.detail) == (ids[1], "no")
    assert (without.id, without.topic) == (lost, None)
    assert one(report.sides[1], "lagging").examples[0].id == ids[0]


@pytest.mark.extended
def test_an_id_that_is_of_no_event_is_a_phantom(place: Place) -> None:
    place.write(3)
    place.relay()
    place.consumer()
    stranger = new_id()
    place.handle(stranger)
    # Of the day before, though it was drawn on the day.
    (neighbour,) = place.write(1, day=DAY - timedelta(1), id=new_id())
    place.handle(neighbour)
    place.relay()
    report = place.reconcile()
    assert found(report.sides[1]) == {"phantom": 1}
    assert one(report.sides[1], "phantom").examples[0].id == stranger
    place.consumer([], handles_others=True)
    assert found(place.reconcile().sides[1]) == {}


@pytest.mark.extended
def test_topics_and_types_that_it_does_not_take_are_not_asked_for(place: Place) -> None:
    place.write(3)
    place.write(2, event_type="order.seen")
    place.relay()
    place.consumer([])
    assert found(place.reconcile().sides[1]) == {"missing": 5}
    place.consumer([], event_types=["order.seen"])
    assert found(place.reconcile().sides[1]) == {"missing": 2}
    place.consumer([], topics=["another"])
    report = place.reconcile()
    assert (found(report.sides[1]), report.sides[1].compared) == ({}, 0)
    assert report.sides[1].notes == ["none of the day's events is in a topic that it reads"]


@pytest.mark.extended
def test_what_is_pruned_is_forgotten_not_missing(place: Place) -> None:
    """Guards against a day that is reconciled late, and reported lost as a whole."""
    ids = place.write(4)
    place.pass_over()
    place.send(*ids[:3], at_ms=START_MS + 1000)
    place.send(ids[3])
    place.consumer([])
    # What came to the topic within a day cannot be pruned.
    assert found(place.reconcile().sides[1]) == {"forgotten": 3, "missing": 1}
    # A row that was handled on the day itself: none of the day was pruned.
    place.handle(ids[0], at=datetime.fromtimestamp(START_MS / 1000 + 5, UTC))
    assert found(place.reconcile().sides[1]) == {"missing": 3}
    place.rows("UPDATE processed_events SET processed_at = now()")
    assert found(place.reconcile().sides[1]) == {"forgotten": 2, "missing": 1}
    place.consumer([], keep_days=14)
    assert found(place.reconcile().sides[1]) == {"missing": 3}


@pytest.mark.extended
def test_its_records_may_be_in_another_database(place: Place) -> None:
    ids = place.write(3)
    place.relay()
    with fresh_database(place.settings.require_dsn()) as dsn:
        place.consumer([], dsn=dsn)
        with pytest.raises(SetupError, match="consumer billing: its database has no table processed_events"):
            place.reconcile()
        other = Place(Outbox(place.settings.model_copy(update={"dsn": dsn})), place.directory)
        other.consumer(ids[:2], dsn=dsn)
        assert found(place.reconcile().sides[1]) == {"missing": 1}
    place.consumer([], dsn="host=127.0.0.1 port=1")
    with pytest.raises(SetupError, match=r"cannot connect to the database \(dsn of \[consumers.billing\]"):
        place.reconcile()


def test_one_that_is_not_named_is_an_error() -> None:
    settings = load_settings(consumers={"billing": {}, "accounts": {}})
    assert [each.name for each in chosen(settings, [])] == ["billing", "accounts"]
    assert [each.group for each in chosen(settings, ["accounts"])] == ["accounts"]
    with pytest.raises(SetupError, match="no consumer is named 'shipping': there is billing, accounts"):
        chosen(settings, ["shipping"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[consumers]\nsource = 'x'", "has source outside a consumer's section"),
        ("[consumers.billing]\ntopic = 'x'", "unknown entry 'topic': use source, group"),
        (
            "[consumers.billing]\ntopics = 'x'",
            r"""topics cannot be 'x': write for example topics = \["order-events"\]""",
        ),
        (
            "[consumers.billing]\nkeep_days = true",
            "keep_days cannot be True: write for example keep_days = 14",
        ),
        ("[consumers.billing]\ndsn = { env = 'NO' }", r"\[billing\] dsn names NO, which is not set"),
    ],
)
def test_an_error_in_a_file_says_how_to_correct_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "outbox.toml").write_text(text)
    monkeypatch.setenv("OUTBOX_CONFIG", str(tmp_path / "outbox.toml"))
    with pytest.raises(SetupError, match=rf"outbox.toml line [12]: consumers .*{said}"):
        load_settings()
