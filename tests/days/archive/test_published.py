"""`published_at` of the file: what the view `outbox_events` says, found without a look at each row."""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta

import numpy as np
import pytest

from outbox_pipelines.core.position import Snapshot
from outbox_pipelines.days.archive import day as days
from outbox_pipelines.days.archive.export import Published, earliest
from outbox_pipelines.settings import Settings
from tests.days.archive.days import at, days_ago, make_days, progress, publish, rows, write, writing
from tests.schema.events import insert
from tests.schema.servers import Connection, Database

pytestmark = pytest.mark.slow

Progress = list[tuple[datetime, str, str | None, int | None]]
SEED = int(os.environ.get("SEED") or random.randrange(2**32))
VIEW = "SELECT id::text, processed_at, status, retry_count, last_error FROM outbox_events"
PARK = "INSERT INTO outbox_parked SELECT o.*, %s, 3, NULL, 'too large' FROM outbox o WHERE id = %s"


def file_equals_view(database: Database, settings: Settings, day: date) -> dict[str, datetime | None]:
    """When each event was published, by its id; what the file says and the view does not is an error."""
    days.archive(settings, day)
    names = ("id", "published_at", "status", "attempts", "last_error")
    found = sorted(tuple(row[name] for name in names) for row in rows(settings, day))
    with database.connect() as connection:
        assert found == sorted(connection.execute(VIEW).fetchall()), f"SEED={SEED}"
    return {id: published for id, published, *_ in found}


class Relays:
    """Positions of all shards, moved as relays move them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def settle(self, shard: int, last_seq: int) -> None:
        """Inside of a tick, which begins if there is none."""
        self._connection.execute(
            "UPDATE outbox_shards SET target = coalesce(target, pg_current_snapshot()), last_seq = %s "
            "WHERE shard = %s",
            [last_seq, shard],
        )

    def finish(self, shard: int) -> None:
        """A tick is over; without one, all that is committed is published at once."""
        self._connection.execute(
            "UPDATE outbox_shards SET done = coalesce(target, pg_current_snapshot()), target = NULL, "
            "last_seq = NULL WHERE shard = %s",
            [shard],
        )

    def set_shards(self, shards: int) -> None:
        """Another number of them, which meet where everything that is committed is published."""
        with self._connection.transaction():
            self._connection.execute("CREATE TEMP TABLE before ON COMMIT DROP AS SELECT * FROM outbox_shards")
            self._connection.execute("DELETE FROM outbox_shards")
            self._connection.execute(
                "INSERT INTO outbox_shards (shard, shards, done, system_identifier, database) "
                "SELECT n, %s, pg_current_snapshot(), system_identifier, database "
                "FROM (SELECT * FROM before LIMIT 1) one, generate_series(0, %s - 1) n",
                [shards, shards],
            )


@pytest.mark.parametrize("shards", [1, 3])
def test_random_histories(database: Database, settings: Settings, shards: int) -> None:
    """Guards against a time that is another's: late commits, open ticks, seconds without a row, shards."""
    random_ = random.Random(SEED)
    day = days_ago(3)
    make_days(database, day)
    seq = 0
    with ExitStack() as stack, database.connect() as connection:
        relays = Relays(connection)
        relays.set_shards(shards)
        # Their transactions overlap.
        writers = [stack.enter_context(database.connect(autocommit=False)) for _ in range(4)]

        def emit(writer: Connection) -> None:
            nonlocal seq
            writer.execute("SET LOCAL outbox.backfill = on")
            for _ in range(random_.randint(1, 3)):
                id = random_.randrange(20)
                seq = insert(writer, aggregate_id=str(id), created_at=at(day, random_.randrange(10**9))).seq

        for _ in range(150):
            writer, shard = random_.choice(writers), random_.randrange(shards)
            step = random_.choices(
                ["emit", "commit", "settle", "finish", "progress", "reshard"], [6, 4, 3, 2, 4, 0.1]
            )[0]
            if step == "emit":
                emit(writer)
            elif step == "commit":
                writer.commit()
            elif step == "settle":
                query = "SELECT coalesce(last_seq, 0) FROM outbox_shards WHERE shard = %s"
                ((reached,),) = connection.execute(query, [shard])
                relays.settle(shard, random_.randint(reached, max(seq, reached)))
            elif step == "finish":
                relays.finish(shard)
            elif step == "reshard":
                shards = random_.randint(1, 4)
                relays.set_shards(shards)
            else:
                progress(connection)
        for writer in writers:
            emit(writer)
            writer.commit()
        progress(connection)
    publish(database)
    found = file_equals_view(database, settings, day)
    assert len(found) > 20
    assert len(set(found.values())) > 1


def test_a_late_transaction(database: Database, settings: Settings) -> None:
    """Guards against an event of a long transaction that counts as published before it was committed."""
    day = days_ago(3)
    make_days(database, day)
    with writing(database) as late:
        first = insert(late, created_at=at(day))
        (second,) = write(database, day)
        early = publish(database)
    then = publish(database)
    assert first.seq < second.seq
    assert file_equals_view(database, settings, day) == {str(first.id): then, str(second.id): early}


def test_inside_of_a_big_tick(database: Database, settings: Settings) -> None:
    """Guards against a backlog of hours that was all published at its end."""
    day = days_ago(3)
    make_days(database, day)
    written = write(database, day, [{}] * 9)
    with database.connect() as connection:
        relays = Relays(connection)
        times = []
        for n in (2, 5):
            relays.settle(0, written[n].seq)
            times.append(progress(connection))
        relays.finish(0)
        times.append(progress(connection))
    expected = {str(event.id): times[n // 3] for n, event in enumerate(written)}
    assert file_equals_view(database, settings, day) == expected


def test_what_was_parked(database: Database, settings: Settings) -> None:
    """Guards against a dead letter that looks published, and a released one that was published too early."""
    day = days_ago(3)
    make_days(database, day)
    plain, released, failed, discarded = write(database, day, [{"aggregate_id": id} for id in "abcd"])
    with database.connect() as connection:
        connection.execute(PARK, ["failed", failed.id])
        connection.execute(PARK, ["discarded", discarded.id])
        then = publish(database)
        (row,) = connection.execute(
            "INSERT INTO outbox_released VALUES (%s, %s, DEFAULT, 4) RETURNING published_at",
            [released.seq, released.id],
        )
    found = file_equals_view(database, settings, day)
    assert found == {
        str(plain.id): then,
        str(released.id): row[0],
        str(failed.id): None,
        str(discarded.id): None,
    }
    by_id = {row["id"]: (row["status"], row["attempts"], row["last_error"]) for row in rows(settings, day)}
    assert by_id == {
        str(plain.id): ("PROCESSED", 0, None),
        str(released.id): ("PROCESSED", 4, None),
        str(failed.id): ("FAILED", 3, "too large"),
        str(discarded.id): ("DISCARDED", 3, "too large"),
    }


def test_without_any_progress(database: Database, settings: Settings) -> None:
    """Guards against a restored outbox, whose old positions mean nothing, that cannot be archived."""
    day = days_ago(3)
    make_days(database, day)
    (event,) = write(database, day)
    publish(database)
    database.rows("DELETE FROM outbox_progress")
    assert file_equals_view(database, settings, day) == {str(event.id): None}


# --- against the definition alone -----------------------------------------------------------------------


def covering(progress: Progress, tx: int, seq: int) -> int | None:
    """The definition: the time of the first row that covers an event."""
    for time, done, target, last_seq in progress:
        if Snapshot.parse(done).sees(tx):
            return _us(time)
        if target is not None and seq <= (last_seq or 0) and Snapshot.parse(target).sees(tx):
            return _us(time)
    return None


def history(random_: random.Random) -> tuple[Progress, list[tuple[int, int]]]:
    """Rows of progress of one shard, not of every settle, and events as (tx, seq)."""
    events, running, free, seq = [], set[int](), 100, 1000

    def snapshot() -> Snapshot:
        return Snapshot(min(running, default=free), free, tuple(sorted(running)))

    done, target, last_seq = snapshot(), None, None
    progress: Progress = []
    for _ in range(random_.randint(1, 120)):
        if random_.random() < 0.6:
            running.add(free)
            free += random_.randint(1, 3)
        for tx in random_.sample(sorted(running), min(len(running), 3)):
            events.append((tx, seq := seq + 1))
            if random_.random() < 0.5:
                running.discard(tx)
        if random_.random() < 0.5:
            if target is None:
                target, last_seq = snapshot(), 999
            last_seq = random_.randint(last_seq or 0, seq)
        elif random_.random() < 0.5:
            done, target, last_seq = target or snapshot(), None, None
        if random_.random() < 0.5:
            time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=len(progress))
            progress.append((time, str(done), str(target) if target else None, last_seq))
    return progress, events


def test_any_history_of_a_shard() -> None:
    """Guards against a bisection that is right only for the histories its author thought of."""
    known: Counter[bool] = Counter()
    for seed in range(SEED, SEED + 500):
        progress, events = history(random.Random(seed))
        if not events:
            continue
        tx, seq = np.array(events, np.int64).T
        at, unknown = earliest([Published(progress).at(tx, seq)])
        found = [None if not_known else int(us) for us, not_known in zip(at, unknown, strict=True)]
        assert found == [covering(progress, *event) for event in events], f"SEED={seed}"
        known.update(us is not None for us in found)
    assert min(known[True], known[False]) > 500


def _us(time: datetime) -> int:
    return round(time.timestamp() * 1_000_000)
