"""`make demo-archive`: past days replayed to a new consumer, a passenger forgotten, and a question to Spark.

To copy from: `_write` protects a member of a payload, `_consumer` decrypts it, and commands are shown as an
operator types them.

Invariants:
- Each claim is compared row by row; the first that does not hold ends the demo with exit code 1.
- Everything is new at the start and gone at the end: schema, databases, topics, files.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from examples.airline import queries
from examples.airline.flights import DEPARTED, operations
from examples.airline.place import database, kafka_client, prepared, topics
from examples.airline.report import say
from outbox_pipelines import consumer
from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.database import connect
from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import stack
from outbox_pipelines.local.server import bound, last_lines
from outbox_pipelines.local.stack_client import home_of
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.subject_keys import ERASED, SubjectKeys

SCHEMA: Final = "outbox_archive"
BOARDED: Final = "passenger.boarded"
ASK_SPARK: Final = Path(__file__).with_name("ask_spark.py")

_FIRST_DAY: Final = date(2013, 1, 1)
_FLIGHTS: Final = 842 + 943 + 914  # of three days
_DAYS: Final = [datetime.now(UTC).date() - timedelta(n) for n in (4, 3, 2)]
_GIVEN: Final = ("Ada", "Ben", "Cem", "Dora", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lea")
_FAMILY: Final = ("Abel", "Berg", "Cruz", "Diaz", "Ek", "Fox", "Gil", "Hahn", "Ito", "Jung", "Koch", "Lee")
_PASSENGERS: Final = 1_000
_PER_FLIGHT: Final = 4
_STUCK_SECONDS: Final = 60.0
_TICK_SECONDS: Final = 0.1
_WIDTH: Final = 100
# In the SQL that DuckDB and Spark share.
_QUESTION: Final = (
    "SELECT aggregate_id, count(*) AS boarded FROM events GROUP BY aggregate_id ORDER BY 2 DESC, 1 LIMIT 3"
)


class NotProvenError(Exception):
    """A claim does not hold; its message says which."""


class Boarding(NamedTuple):
    """A passenger on a flight: what an event says, and a row of a board."""

    flight: int
    passenger: int
    aircraft: str
    route: str
    at: datetime
    name: str


def run(seed: int) -> int:
    """Run the demo and return the exit code.

    Raises:
        SetupError: the environment must be corrected first, or a command has failed.
    """
    started = time.monotonic()
    given = load_settings()
    say("Starting PostgreSQL and Kafka …" if not (given.dsn and given.kafka) else "Connecting …")
    with (
        stack(given, say) as servers,
        tempfile.TemporaryDirectory(prefix="outbox-archive-") as home,
        prepared(
            given.model_copy(update={"dsn": servers.dsn, "kafka": servers.kafka}),
            SCHEMA,
            keep=False,
            copies=(".replay", ".again"),
        ) as settings,
        database(servers.dsn, f"{SCHEMA}_keys") as keys,
        database(servers.dsn, f"{SCHEMA}_lake") as lake,
        database(servers.dsn, f"{SCHEMA}_boards") as boards,
    ):
        show = Show(
            settings,
            boards,
            {
                "OUTBOX_NAME": "outbox",
                "OUTBOX_DSN": settings.require_dsn(),
                "OUTBOX_KAFKA": settings.require_kafka(),
                "OUTBOX_SCHEMA": settings.db_schema,
                "OUTBOX_TOPIC": settings.topic,
                "OUTBOX_ARCHIVE": f"{home}/archive",
                "OUTBOX_ICEBERG": lake,
                "OUTBOX_KEYS_DSN": keys,
                "OUTBOX_MASTER_KEY": base64.b64encode(os.urandom(32)).decode(),
            },
        )
        try:
            board = _live(show, seed)
            todays = _replay(show, board)
            _forget(show, board, todays)
            ask(show, lake, given)
        except NotProvenError as error:
            say(f"\nNOT PROVEN: {error}")
            return 1
    say(f"\nAll proven, in {time.monotonic() - started:.0f} s.")
    return 0


class Show:
    """The demo's outbox, its operator and its consumers."""

    def __init__(self, settings: Settings, boards: str, environment: Mapping[str, str]) -> None:
        self.settings = settings
        self._boards = boards
        self._environment = {**os.environ, **environment, "PYTHONSAFEPATH": "1"}

    def keys(self) -> SubjectKeys:
        """Return the keys of the passengers, as a process that has just started knows them."""
        given = self._environment
        return SubjectKeys(given["OUTBOX_KEYS_DSN"], master_key=given["OUTBOX_MASTER_KEY"])

    def outbox(self, *arguments: object) -> list[str]:
        """Run a command, show it, and return the lines that it prints.

        Raises:
            NotProvenError: what it was asked for is not so.
            SetupError: it failed.
        """
        given = [str(each) for each in arguments]
        command = " ".join(f'"{each}"' if {*" {"} & {*each} else each for each in ["outbox", *given])
        say(f"   $ {command}")
        done = _run([sys.executable, "-m", "outbox_pipelines", *given], self._environment)
        for line in (lines := done.stdout.splitlines()):
            say(f"     {line[:_WIDTH]}{'…' if line[_WIDTH:] else ''}")
        if done.returncode:
            kind = NotProvenError if done.returncode == 1 else SetupError
            raise kind(f"`{command}` failed: {last_lines(done.stderr, 1)}")
        return lines

    def prove(self, claim: str, found: Collection[Any], expected: Collection[Any]) -> None:
        """Compare rows; raise `NotProvenError` if they differ."""
        if differing := set(found) ^ set(expected):
            raise NotProvenError(f"{claim}; {len(differing)} rows differ, such as {next(iter(differing))}")
        say(f"   proven: {claim}")

    def board(self, name: str, topic: str, rows: int) -> list[Boarding]:
        """Return what a new consumer makes of a topic, once it has so many rows or makes no more."""
        dsn = make_conninfo(self._boards, options=f"-c search_path={name}")
        kafka = kafka_client(self.settings, **{"group.id": f"{topic}-{name}"})
        stop, deadline = threading.Event(), time.monotonic() + _STUCK_SECONDS
        found: list[Boarding] = []
        with psycopg.connect(dsn, autocommit=True) as connection, ThreadPoolExecutor(1) as thread:
            connection.execute(queries.CREATE_BOARD.format(schema=name).encode())
            consumer.migrate(connection)
            running = thread.submit(_consumer(topic, kafka, dsn, self.keys()).run, stop)
            try:
                while not running.done() and time.monotonic() < deadline:
                    found = [Boarding(*row) for row in connection.execute(queries.BOARD)]
                    if len(found) >= rows:
                        break
                    time.sleep(_TICK_SECONDS)
            finally:
                stop.set()
            running.result()
        return found


def _consumer(topic: str, kafka: dict[str, Any], dsn: str, keys: SubjectKeys) -> Consumer:
    """Another service: a board of who is on which flight. It can be built from a replay, too."""
    board = Consumer(source="board", topics=[topic], kafka=kafka, dsn=dsn, keys=keys)

    @board.on(BOARDED, batch=500, replays="handle")
    def boarded(events: list[Event], connection: psycopg.Connection) -> None:
        rows = [{**event.payload, "aircraft": event.aggregate_id} for event in events]
        with connection.cursor() as cursor:
            cursor.executemany(queries.SHOW_ON_BOARD, rows)

    return board


def _write(settings: Settings, keys: SubjectKeys, boardings: list[Boarding]) -> None:
    """Write days that are over, as their owner. An application calls `emit`, with the same payload."""
    rows = []
    for each in boardings:
        payload = {**each._asdict(), "at": each.at.isoformat()}
        del payload["aircraft"]
        protected = keys.protect(payload, {"name": each.passenger})
        rows.append([each.aircraft, BOARDED, json.dumps(protected), each.at])
    with connect(settings, name="outbox demo: boarding") as connection, connection.transaction():
        connection.execute(queries.DECLARE_BACKFILL)
        connection.cursor().executemany(queries.WRITE_PAST, rows)


def _live(show: Show, seed: int) -> list[Boarding]:
    """Write, relay, consume, archive and drop; return the board."""
    boardings = list(_boardings(seed))
    say(f"\n1. Three days: {len(boardings):,} boardings; each of {_PASSENGERS:,} passengers has a key")
    show.outbox("keys", "migrate")
    show.outbox("partitions", "ensure", "--since", _DAYS[0])
    _write(show.settings, show.keys(), boardings)
    show.outbox("relay", "--until-empty")
    board = show.board("first", topics(show.settings)[0], len(boardings))
    show.prove(f"the board shows what was written: {len(board):,} rows, with names", board, boardings)
    for day in _DAYS:
        show.outbox("archive", "day", day)
    for day in _DAYS[:2]:
        show.outbox("partitions", "drop", day)
    show.outbox("archive", "register")
    return board


def _replay(show: Show, board: list[Boarding]) -> list[Boarding]:
    """Build a new board of one aircraft's day; return what it should show."""
    of_day = [each for each in board if each.at.astimezone(UTC).date() == _DAYS[0]]
    [(aircraft, _)] = Counter(each.aircraft for each in of_day).most_common(1)
    todays = [each for each in of_day if each.aircraft == aircraft]
    say(f"\n2. A new consumer gets a day of aircraft {aircraft}, which only the archive still has")
    _send(show, aircraft, ".replay")
    new = show.board("new", f"{topics(show.settings)[0]}.replay", len(todays))
    show.prove(f"the new board equals the first one, row by row: {len(new)} rows", new, todays)
    _look(new)
    return todays


def _forget(show: Show, board: list[Boarding], todays: list[Boarding]) -> None:
    """Forget a passenger of that aircraft, and look wherever the name was."""
    passenger = todays[0].passenger

    def erased(rows: list[Boarding]) -> list[Boarding]:
        return [each._replace(name=ERASED) if each.passenger == passenger else each for each in rows]

    say(f"\n3. Passenger {passenger} is forgotten; no message and no file is changed")
    show.outbox("forget", passenger, "--reason", "request by letter")
    topic = topics(show.settings)[0]
    count = sum(each.passenger == passenger for each in board)
    again = show.board("later", topic, len(board))
    show.prove(
        f"consumer: ERASED in the {count} rows of this passenger alone, of the topic read again",
        again,
        erased(board),
    )
    _send(show, todays[0].aircraft, ".again")
    replayed = show.board("again", f"{topic}.again", len(todays))
    show.prove("replay: ERASED for this passenger alone", replayed, erased(todays))
    _look(replayed)
    _, *rows = show.outbox("archive", "query", "--csv", queries.WHO_IS_ERASED)
    show.prove("archive: NULL for this passenger alone", rows, [f"{passenger},{count}"])
    for day in _DAYS:
        show.outbox("archive", "verify", day)


def _look(rows: list[Boarding]) -> None:
    for each in rows[:_PER_FLIGHT]:
        say(f"     flight {each.flight} {each.route}: passenger {each.passenger}, {each.name}")


def _send(show: Show, aircraft: str, suffix: str) -> None:
    day = ("--since", _DAYS[0], "--until", _DAYS[0])
    where = ("--aggregate-id", aircraft, "--to-topic", f"{{topic}}{suffix}", "--create")
    show.outbox("replay", *day, *where, "--reason", "new consumer")


def ask(show: Show, lake: str, given: Settings) -> None:
    """Ask the Iceberg table which aircraft had most passengers."""
    say("\n4. Which aircraft had most passengers? Asked of the Iceberg table")
    # As `make interop` has installed it, the newest of each.
    parts = [
        sorted(home_of(given).path.glob(name), key=lambda path: path.stat().st_mtime)[-1:]
        for name in ("iceberg-spark-*/ready", "iceberg-spark-runtime-*.jar", "postgresql-*.jar")
    ]
    if all(parts) and (shutil.which("java") or "JAVA_HOME" in os.environ):
        [ready], *jars = parts
        engine, answer = "Spark", _spark(ready.parent, ",".join(str(jar) for [jar] in jars), lake)
    else:
        say("   Spark is not here, DuckDB answers. Java 17, Maven and this command install it (435 MB):")
        say(f"   $ {os.path.relpath(sys.executable)} -m tests.interop.build spark")
        engine, answer = "DuckDB", _duckdb(lake)
    say(f"     {engine}: {', '.join(answer)}")
    _, *rows = show.outbox("archive", "query", "--csv", _QUESTION)
    show.prove(f"{engine} answers as `outbox archive query`", answer, rows)


def _spark(home: Path, jars: str, lake: str) -> list[str]:
    to = conninfo_to_dict(lake)
    url = f"jdbc:postgresql://{to['host']}:{to['port']}/{to['dbname']}"
    secrets = {f"PG{name.upper()}": str(to[name]) for name in ("passfile", "password") if to.get(name)}
    command = [str(home / "bin" / "python"), str(ASK_SPARK), jars, url, str(to["user"])]
    done = _run(command, {**os.environ, **secrets}, json.dumps([_QUESTION]))
    if done.returncode:
        raise SetupError(f"Spark failed: {last_lines(done.stderr, 1)}")
    [rows] = json.loads(done.stdout)
    return [f"{aircraft},{count}" for aircraft, count in rows]


def _duckdb(lake: str) -> list[str]:
    # Here, because they load for a second.
    from pyiceberg.catalog import load_catalog
    from sqlalchemy import URL

    uri = URL.create(
        "postgresql+psycopg", query={name: str(value) for name, value in conninfo_to_dict(lake).items()}
    )
    catalog = load_catalog("outbox", type="sql", uri=uri.render_as_string(hide_password=False))
    with catalog.load_table("outbox.events").scan().to_duckdb("events") as connection:
        return [f"{aircraft},{count}" for aircraft, count in connection.execute(_QUESTION).fetchall()]


def _run(
    command: list[str], environment: Mapping[str, str], given: str = ""
) -> subprocess.CompletedProcess[str]:
    # Ctrl-C is for the demo, which then ends it.
    return subprocess.run(
        bound(command, signal.SIGTERM),
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        start_new_session=True,
    )


def _boardings(seed: int) -> Iterator[Boarding]:
    """The flights are real, the passengers are not."""
    chance = random.Random(seed)
    for operation in operations(_FLIGHTS):
        flight = operation.flights[0]
        at = operation.at + (_DAYS[0] - _FIRST_DAY)
        if operation.event_type == DEPARTED and flight.tail_number and at.date() <= _DAYS[-1]:
            route = f"{flight.origin}-{flight.destination}"
            for passenger in chance.sample(range(_PASSENGERS), _PER_FLIGHT):
                name = f"{_GIVEN[passenger % len(_GIVEN)]} {_FAMILY[passenger // len(_GIVEN) % len(_FAMILY)]}"
                yield Boarding(flight.id, passenger, flight.tail_number, route, at, name)
