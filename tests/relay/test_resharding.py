"""Several shards, and a change of their number while writers and relays go on."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from datetime import date
from typing import LiteralString
from unittest.mock import Mock

import psycopg
import pytest

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.days.partitions import partitions_sql
from outbox_pipelines.errors import SetupError
from outbox_pipelines.relay import relay_sql, service
from outbox_pipelines.relay.lease import resharding
from outbox_pipelines.relay.lease.resharding import OperatorChange
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.settings import load_settings
from tests.conftest import EITHER_DELIVERY, Outbox, wait_until
from tests.history import business
from tests.history.verify import verdict
from tests.history.writers import Writers
from tests.relay import faults
from tests.relay.parked import numbers, numbers_by_key, parked_rows, write
from tests.relay.threads import measured, owners, quick, relays, running, wait_for_holders, wait_until_relayed
from tests.relay.topic import NOISE, create_topic

MORE_SHARDS = """
INSERT INTO outbox_shards (shard, shards, done, system_identifier, database)
SELECT number, 1 + cardinality(more), done, system_identifier, database
FROM outbox_shards, (SELECT %s::int[] AS more) AS given, unnest(more) AS number"""


class _Changing(threading.Thread):
    def __init__(self, outbox: Outbox, wanted: int) -> None:
        super().__init__()
        self._outbox = outbox
        self._wanted = wanted
        self.changed = False
        self.waited: list[str] = []

    def run(self) -> None:
        self.changed = resharding.change(self._outbox.settings, self._wanted, on_wait=self.waited.append)


def test_the_reason_of_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the error of a change that cannot be taken back, because the connection is lost."""
    unowned, missing = Mock(), [("waits", "shard 1 publishes up to the barrier")]
    unowned.fetchall.return_value = [(None,)]
    lost = [psycopg.OperationalError(each) for each in ("the server closed the connection", "no connection")]
    connection = Mock()
    connection.execute.side_effect = [unowned, missing, *lost]
    monkeypatch.setattr(resharding, "connect", lambda *_, **__: nullcontext(connection))
    with pytest.raises(psycopg.OperationalError, match="the server closed"):
        resharding.change(load_settings(), 2)


def test_shards_share_the_work_and_miss_nothing(outbox: Outbox) -> None:
    """Guards against an event that belongs to no shard, or to two."""
    # Events whose topic a busy broker is slow to create are parked, and published outside the position.
    create_topic(outbox, 8)
    with relays(outbox, 4):
        wait_for_holders(outbox, 1)
        assert resharding.change(outbox.settings, 3)
        wait_for_holders(outbox, 3)
        outbox.fill(12_000, aggregates=50)
        wait_until_relayed(outbox)
    messages = outbox.messages()
    assert len(messages) == len({message.headers["id"] for message in messages}) == 12_000
    for found in numbers_by_key(messages).values():
        assert found == sorted(found)
    with outbox.connect() as connection:
        rows = connection.execute(
            "SELECT shard, sum(events)::int FROM outbox_progress WHERE shards = 3 GROUP BY 1 ORDER BY 1"
        ).fetchall()
        view = connection.execute(
            "SELECT status, count(*), count(processed_at) FROM outbox_events GROUP BY 1"
        ).fetchall()
    assert [shard for shard, _ in rows] == [0, 1, 2]
    assert sum(events for _, events in rows) == 12_000
    assert min(events for _, events in rows) > 1_000
    assert view == [("PROCESSED", 12_000, 12_000)]


@pytest.mark.extended
@pytest.mark.parametrize("delivery", EITHER_DELIVERY)
def test_a_shard_that_went_past_the_barrier_does_not_go_back(outbox: Outbox, delivery: str) -> None:
    """Guards against a relay that takes its shard after the barrier was set, passes it, and returns to it.

    The new shards would publish again what it has published.
    """
    settings = quick(outbox, delivery=delivery)

    def ask(*, started: bool) -> None:
        with outbox.connect() as connection:
            given = {"wanted": 2, "started": started, "on_behalf_of": None}
            assert connection.execute(relay_sql.CHANGE_SHARDS, given).fetchone()

    def shard() -> tuple[bool, bool]:
        with outbox.connect() as connection:
            ((held, has_barrier),) = connection.execute(
                "SELECT barrier_paused, barrier IS NOT NULL FROM outbox_shards"
            ).fetchall()
        return held, has_barrier

    with running(settings):
        wait_for_holders(outbox, 1)
        ask(started=False)
        wait_until(lambda: shard() == (True, False), what="the relay to stand still")
    ask(started=True)
    assert shard() == (True, True)
    # Events whose topic a busy broker is slow to create are parked, and published outside the position.
    create_topic(outbox)
    outbox.fill(100, aggregates=10)
    service.relay(settings, until_empty=True)
    ask(started=True)
    with running(settings), running(settings):
        assert resharding.change(settings, 2)
        wait_until_relayed(outbox)
    ids = [message.headers["id"] for message in outbox.messages()]
    assert (len(ids), len(set(ids))) == (100, 100)


def test_the_number_changes_again_and_again_under_load(outbox: Outbox, is_short: bool) -> None:
    """Guards against a change that loses, doubles or reorders (G1, G2): no fault, so no duplicate either."""
    seed = faults.seed()
    chance = random.Random(seed)
    with outbox.connect() as connection:
        business.prepare(connection)
    with relays(outbox, 4):
        writers = Writers(outbox.settings.dsn, seed, 4)
        for _ in range(2 if is_short else 4):
            wanted = chance.choice([1, 2, 3, 4])
            resharding.change(outbox.settings, wanted)
            wait_for_holders(outbox, wanted)
            faults.wait_for_more(faults.published(outbox), 20)
        writers.stop()
        wait_until_relayed(outbox)
    found = verdict(outbox, calm=True)
    assert found.wrong == []
    assert found.committed > 0


def test_relays_that_are_killed_while_the_number_changes(outbox: Outbox, is_short: bool) -> None:
    """Guards against a barrier that is passed by a relay's successor (G1, G2)."""
    seed = faults.seed()
    with outbox.connect() as connection:
        business.prepare(connection)
    writers = Writers(outbox.settings.dsn, seed, 3)
    with ExitStack() as stack:
        relays = [stack.enter_context(faults.relay(outbox, OUTBOX_LEASE_SECONDS="2")) for _ in range(3)]
        wait_for_holders(outbox, 1)
        for wanted in (3, 1) if is_short else (2, 3, 1, 2):
            changing = _Changing(outbox, wanted)
            changing.start()
            victim = relays.pop(0)
            victim.kill()
            relays.append(stack.enter_context(faults.relay(outbox, OUTBOX_LEASE_SECONDS="2")))
            changing.join(600)
            assert changing.changed
            wait_for_holders(outbox, wanted)
            faults.wait_for_more(faults.published(outbox), 20)
        writers.stop()
        wait_until_relayed(outbox)
    faults.verify(outbox)


@pytest.mark.extended
def test_a_change_does_not_begin_while_a_relay_is_missing(outbox: Outbox) -> None:
    """Guards against a pause of all shards until a relay answers that does not run."""
    with relays(outbox, 1):
        wait_for_holders(outbox, 1)
        assert resharding.change(outbox.settings, 2)
        wait_until(lambda: owners(outbox).count(None) == 1, what="one of two shards with a relay")
        missing = owners(outbox).index(None)
        changing = _Changing(outbox, 3)
        changing.start()
        wait_until(lambda: bool(changing.waited), what="the change to wait")
        with outbox.connect() as connection:
            assert connection.execute("SELECT wanted FROM outbox_shards").fetchall() == [(None,)] * 2
        outbox.fill(100, aggregates=50)
        wait_until(
            lambda: bool(outbox.messages()) and measured(outbox)[1 - missing].backlog == 0,
            what="the events of the other shard",
        )
        assert changing.is_alive()
        assert changing.waited == [
            f"no relay owns shard {missing} (see `outbox shards`): start `outbox relay`"
        ]
        with relays(outbox, 2):
            changing.join(600)
            assert changing.changed
            wait_until_relayed(outbox)


@pytest.mark.extended
def test_a_relay_that_vanishes_stops_only_the_change(outbox: Outbox) -> None:
    """Guards against a change that waits without end, leaves the relays waiting, or is not shown."""
    waited: list[str] = []
    shown: list[str] = []
    with relays(outbox, 1), outbox.connect() as connection:
        wait_for_holders(outbox, 1)

        def on_wait(text: str) -> None:
            waited.append(text)
            if len(waited) == 1:
                connection.execute(MORE_SHARDS, [[1]])
                shown.append(outbox.outbox("status").stdout)

        with pytest.raises(resharding.NotAllThereError, match=r"no answer from the relay of shard 1"):
            # Long enough for a busy machine to show the status and to settle.
            resharding.change(outbox.settings, 3, seconds=6, on_wait=on_wait)
        assert any("shard 1" in text for text in waited)
        assert "to 3: publishing pauses until `outbox shards set` ends" in shown[0]
        rows = connection.execute("SELECT wanted, barrier_paused, barrier FROM outbox_shards").fetchall()
        assert rows == [(None, False, None)] * 2
        assert "publishing pauses" not in outbox.outbox("status").stdout
        connection.execute("DELETE FROM outbox_shards WHERE shard = 1")
        outbox.write(1, 2, 3)
        wait_until_relayed(outbox)


@pytest.mark.parametrize("heard", ["- interval '9 seconds'", "+ interval '1 hour'"])
def test_a_change_whose_author_crashed_is_abandoned(outbox: Outbox, heard: str) -> None:
    """Guards against a relay that waits for an author that has crashed, or for a clock that went back."""
    with relays(outbox, 1):
        wait_for_holders(outbox, 1)
        with outbox.connect() as connection:
            connection.execute(
                f"UPDATE outbox_shards SET wanted = 2, wanted_at = clock_timestamp() {heard}".encode()
            )
            outbox.write(1, 2, 3)
            wait_until(
                lambda: connection.execute("SELECT wanted FROM outbox_shards").fetchone() == (None,),
                what="the relay to abandon the change",
            )
            wait_until_relayed(outbox)


@pytest.mark.extended
def test_parked_events_go_to_their_new_shard(outbox: Outbox) -> None:
    """Guards against parked events that have no owner once the number of shards has changed."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, *[(str(n), {"n": 0, "noise": NOISE}) for n in range(6)])
    write(outbox, *[(str(n), {"n": 1}) for n in range(6)])
    with relays(outbox, 3, retry_seconds=0.1, max_attempts=6):
        wait_until(lambda: len(parked_rows(outbox)) == 12)
        assert resharding.change(outbox.settings, 3)
        wait_until(lambda: [row[2] for row in parked_rows(outbox)] == ["failed"] * 6, seconds=60)
        wait_until(lambda: all(numbers(outbox, str(n)) == [1] for n in range(6)))
        assert all(row[3] == 6 for row in parked_rows(outbox))


def test_the_command(outbox: Outbox) -> None:
    """Guards against a command that does not say what it waits for, or what came of it."""
    assert outbox.process("shards").stdout.startswith("shard 0  no active relay; start `outbox relay`")
    none = outbox.outbox("shards", "set", "2", "--wait-seconds", "1")
    assert none.returncode == 1
    assert none.stderr.splitlines() == [
        "waiting: no relay owns shard 0 (see `outbox shards`): start `outbox relay`",
        "outbox: no relay owns shard 0 (see `outbox shards`): start `outbox relay`; nothing was changed",
    ]
    with relays(outbox, 2):
        wait_for_holders(outbox, 1)
        done = outbox.outbox("shards", "set", "2")
        assert (done.returncode, done.stdout) == (0, "2 shards\n"), done.stderr
        assert outbox.outbox("shards", "set", "2").stdout == "2 shards: nothing to change\n"
        wait_for_holders(outbox, 2)
        listed = json.loads(outbox.outbox("shards", "--json").stdout)
        assert [(shard["shard"], shard["shards"]) for shard in listed] == [(0, 2), (1, 2)]
    for wrong, code in (("0", 2), ("65", 2), ("two", 2)):
        assert outbox.outbox("shards", "set", wrong).returncode == code
    with pytest.raises(SetupError, match="choose 1 to 64"):
        resharding.change(outbox.settings, 65)


@pytest.mark.extended
def test_until_empty_publishes_all_shards(outbox: Outbox) -> None:
    """Guards against a drain that forgets all shards but one."""
    # Events whose topic a busy broker is slow to create are parked, which `events` does not count.
    create_topic(outbox, 8)
    with relays(outbox, 1):
        wait_for_holders(outbox, 1)
        resharding.change(outbox.settings, 4)
    outbox.fill(400)
    assert service.relay(outbox.settings, until_empty=True).events == 400
    assert len(outbox.messages()) == 400


@pytest.mark.extended
def test_a_change_waits_for_what_is_being_tried(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an event that the old shard is still trying when the new one takes it up."""
    create_topic(outbox, **{"max.message.bytes": "2000"})
    write(outbox, ("guilty", {"n": 0, "noise": NOISE}))
    trying, answered = threading.Event(), threading.Event()
    looks: list[bool] = []
    held_after_the_answer: list[bool] = []
    flush, look, hold = Prober._flush, OperatorChange.look, OperatorChange.pause

    def slow_flush(self: Prober) -> None:
        trying.set()
        assert answered.wait(600)
        flush(self)

    def counted_look(self: OperatorChange) -> bool:
        found = look(self)
        looks.append(found)
        return found

    def noted_pause(self: OperatorChange, done: Snapshot) -> None:
        held_after_the_answer.append(answered.is_set())
        hold(self, done)

    monkeypatch.setattr(Prober, "_flush", slow_flush)
    monkeypatch.setattr(OperatorChange, "look", counted_look)
    monkeypatch.setattr(OperatorChange, "pause", noted_pause)
    with relays(outbox, 2):
        wait_until(trying.is_set, what="the attempt")
        changing = _Changing(outbox, 2)
        changing.start()
        wait_until(lambda: looks.count(True) > 20, what="the relay to stand still")
        answered.set()
        changing.join(600)
        assert changing.changed
    assert held_after_the_answer
    assert all(held_after_the_answer)


@pytest.mark.parametrize(
    "statement",
    [relay_sql.KEEP_SHARDS, relay_sql.UNWANT, relay_sql.UNWANT_FORGOTTEN, partitions_sql.REOPEN],
    ids=["command", "relay", "relay_later", "reopened day"],
)
def test_shards_are_locked_in_order(outbox: Outbox, statement: LiteralString) -> None:
    """Guards against a deadlock of two that change the number, or cancel that: relays would start over."""
    with (
        outbox.connect(autocommit=False) as first,
        outbox.connect() as second,
        outbox.connect() as other,
        ThreadPoolExecutor(1) as thread,
    ):
        other.execute(MORE_SHARDS, [[1, 2]])
        # A scan of the table finds shard 0 last.
        want = "UPDATE outbox_shards SET wanted = 5, wanted_at = '2020-01-01' WHERE shard = %s"
        for shard in (1, 2, 0):
            other.execute(want, [shard])
        found = other.execute("SELECT shard FROM outbox_shards WHERE wanted IS NOT NULL").fetchall()
        assert found == [(1,), (2,), (0,)]
        first.execute("SELECT FROM outbox_shards WHERE shard = 0 FOR UPDATE")
        ended = thread.submit(second.execute, statement, {"wanted": 5, "day": date(2020, 1, 1)})
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        try:
            wait_until(lambda: other.execute(waits, [second.info.backend_pid]).fetchone() == (True,))
            unlocked = other.execute("SELECT shard FROM outbox_shards ORDER BY shard FOR UPDATE SKIP LOCKED")
            assert unlocked.fetchall() == [(1,), (2,)]
        finally:
            first.rollback()
        assert ended.result(600).rowcount in (1, 3)
        rows = other.execute("SELECT DISTINCT wanted, epoch FROM outbox_shards").fetchall()
        assert rows == ([(5, 1)] if statement is partitions_sql.REOPEN else [(None, 0)])
