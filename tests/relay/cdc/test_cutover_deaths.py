"""kill -9 of a cut-over to a connector and back: what is left is named, and the next command continues."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outbox_pipelines.errors import NotReadyError, SetupError
from outbox_pipelines.relay.cdc import cutover, queries
from outbox_pipelines.relay.cdc.setup import set_up
from outbox_pipelines.relay.cdc.status import read
from outbox_pipelines.secret import Secret
from outbox_pipelines.settings import Settings
from tests import forks
from tests.conftest import Outbox, clean_environment, wait_until
from tests.relay.cdc.connect import PlayedConnect, played
from tests.relay.cdc.deaths import Commands, die_everywhere
from tests.relay.cdc.test_switch import writing
from tests.relay.parked import numbers_by_key, write
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import create_topic


@pytest.mark.thorough
def test_every_statement_and_call(outbox: Outbox, is_thorough: bool) -> None:
    """Guards against a change of which one half is forgotten: in the row, in the slot or in Kafka Connect."""
    settings = quick(outbox)
    create_topic(outbox)
    with played(settings) as worker:
        environment = clean_environment() | outbox.environment | {"OUTBOX_CONNECT": worker.url}
        commands = Commands(settings, environment, "")
        with running(settings), writing(outbox, pace=0.01) as counts:
            deaths = die_everywhere(commands, 1 if is_thorough else 5)
            wait_until_relayed(outbox)
        with running(settings):
            wait_until_relayed(outbox)
        assert worker.connectors == {}
    assert deaths > 8
    assert numbers_by_key(outbox.messages()) == {key: list(range(count)) for key, count in counts.items()}
    with outbox.connect() as connection:
        query = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        assert connection.execute(query).fetchone() == (0,)


@pytest.fixture
def worker(outbox: Outbox) -> Iterator[PlayedConnect]:
    create_topic(outbox)
    with played(quick(outbox)) as made:
        yield made


def _to(settings: Settings, target: str, seconds: float = 30) -> list[str]:
    said: list[str] = []
    cutover.run(settings, target, seconds=seconds, say=said.append, place={"password": ""})
    return said


def test_a_slot_that_is_lost_before_the_connector_starts(outbox: Outbox, worker: PlayedConnect) -> None:
    """Guards against a new slot, which begins behind events that neither has published (G1)."""
    settings = quick(outbox, connect=Secret(worker.url))
    with running(settings), outbox.connect() as admin:
        _to(settings, "cdc")
        admin.execute(queries.BEGIN_CONNECTOR, {"connector": settings.name})
        wait_until(lambda: read(settings).connector_state == "publishes", what="the relay has left the slot")
        write(outbox, ("a", {"n": 0}))
        admin.execute("SELECT pg_drop_replication_slot(slot) FROM outbox_shards")
        for target in ("debezium", "setup"):
            with pytest.raises(SetupError, match="run `outbox cutover --to polling`"):
                set_up(settings, seconds=5, say=print) if target == "setup" else _to(settings, target)
        assert (read(settings).exists, worker.connectors) == (False, {})
        _to(settings, "polling")
        wait_until_relayed(outbox)
    assert numbers_by_key(outbox.messages()) == {"a": [0]}


def test_no_relay_takes_over(outbox: Outbox, worker: PlayedConnect) -> None:
    """Guards against a command that names itself as the remedy."""
    settings = quick(outbox, connect=Secret(worker.url))
    with running(settings):
        _to(settings, "debezium")
    for target in ("polling", "debezium"):
        with pytest.raises(NotReadyError, match="start `outbox relay`, then run the command again"):
            _to(settings, target, seconds=1)
    assert worker.connectors == {}
    write(outbox, ("a", {"n": 0}))
    with running(settings):
        wait_until(lambda: read(settings).connector_state is None, what="a relay that continues")
        _to(settings, "debezium")
        assert read(settings).problems == []
        other = settings.model_copy(update={"connector": "other"})
        with pytest.raises(SetupError, match=f"set OUTBOX_CONNECTOR={settings.name}, or run"):
            _to(other, "debezium")
        wait_until(lambda: len(outbox.messages()) == 1, what="the event")
        _to(settings, "polling")


def test_a_connector_that_could_not_be_removed(outbox: Outbox, worker: PlayedConnect) -> None:
    """Guards against a connector that is forgotten, and starts again one day, beside the relay."""
    settings = quick(outbox, connect=Secret(worker.url))
    with running(settings):
        _to(settings, "debezium")
        worker.connectors[settings.name].stop()
        without = settings.model_copy(update={"connect": Secret("")})
        assert f"remove the connector {settings.name} and its offsets" in _to(without, "cdc")[0]
        with outbox.connect() as admin:
            admin.execute("UPDATE outbox_shards SET connector = %s", [settings.name])
        (problem,) = read(settings).problems
        assert problem.endswith("run `outbox cutover --to cdc` again, which removes it")
        plan = cutover.plan(settings, "cdc")
        assert plan == ["1. the connector and its progress are removed from Kafka Connect"]
        assert _to(settings, "cdc")[0] == f"connector {settings.name}: removed"
        assert (read(settings).problems, worker.connectors) == ([], {})


def test_a_connector_that_is_left_from_earlier(outbox: Outbox, worker: PlayedConnect) -> None:
    """Guards against progress of a connector from before the relay's turn: it fails, or repeats events."""
    settings = quick(outbox, connect=Secret(worker.url))
    with running(settings), outbox.connect() as admin:
        _to(settings, "debezium")
        write(outbox, ("a", {"n": 0}))
        wait_until(lambda: len(outbox.messages()) == 1, what="an event of the connector")
        worker.refuses = lambda method, what, body: method == "DELETE"
        with pytest.raises(SetupError):
            _to(settings, "cdc")
        wait_until(lambda: read(settings).reader is not None, what="a relay that reads the slot")
        write(outbox, ("a", {"n": 1}))
        confirmed = (
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots JOIN outbox_shards "
            "ON slot = slot_name"
        )
        (left,) = worker.connectors.values()
        wait_until(
            lambda: admin.execute(confirmed).fetchall()[0][0] > left.offset, what="a slot further than that"
        )
        worker.refuses = lambda *_: False
        said = _to(settings, "debezium")
        assert f"connector {settings.name}: removed" in said
        write(outbox, ("a", {"n": 2}))
        wait_until(lambda: len(outbox.messages()) == 3, what="an event of the next connector")
        _to(settings, "polling")
    assert numbers_by_key(outbox.messages()) == {"a": [0, 1, 2]}


def test_an_answer_that_is_lost(outbox: Outbox, worker: PlayedConnect) -> None:
    """Guards against a relay that continues beside a connector whose registration has arrived."""
    settings = quick(outbox, connect=Secret(worker.url))
    said: list[str] = []
    with running(settings):
        _to(settings, "cdc")
        worker.refuses = lambda method, what, body: bool(worker.connectors)
        with pytest.raises(SetupError):
            cutover.run(settings, "debezium", seconds=20, say=said.append, place={"password": ""})
        assert "Run `outbox cutover --to cdc`" in said[-1]
        assert read(settings).connector_state == "publishes"
        write(outbox, ("a", {"n": 0}))
        wait_until(lambda: len(outbox.messages()) == 1, what="an event of the connector")
        worker.refuses = lambda *_: False
        _to(settings, "cdc")
        write(outbox, ("a", {"n": 1}))
        wait_until_relayed(outbox)
        assert (read(settings).problems, worker.connectors) == ([], {})
    assert numbers_by_key(outbox.messages()) == {"a": [0, 1]}


_WAITS = """
SELECT count(*) FROM pg_replication_slots WHERE active AND confirmed_flush_lsn IS NULL
AND database = current_database()"""


@pytest.mark.parametrize("server", ["notices", "does not notice"])
def test_a_death_while_the_server_makes_the_slot(outbox: Outbox, server: str) -> None:
    """Guards against a slot that the server makes for no one, while a transaction runs for hours."""
    program = "from outbox_pipelines import session; import sys\n"
    if server == "does not notice":
        program += "session.OWN['client_connection_check_interval'] = '0'\n"
    program += "sys.argv = ['outbox', 'cutover', '--to', 'cdc']\n"
    program += "from outbox_pipelines.__main__ import main; main()"
    with outbox.connect(autocommit=False) as slow, outbox.connect() as admin:
        slow.execute("SELECT pg_current_xact_id()")

        def waits() -> bool:
            return admin.execute(_WAITS).fetchone() == (1,)

        environment = clean_environment() | outbox.environment
        with forks.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.DEVNULL
        ) as process:
            wait_until(waits, what="a slot that is being made")
            process.send_signal(signal.SIGKILL)
        wait_until(lambda: not read(outbox.settings).changing, what="the end of the dead one's session")
        (problem,) = read(outbox.settings).problems
        assert "setup was interrupted while it made the slot" in problem
        if server == "notices":
            wait_until(lambda: not waits(), what="a server that makes no slot")
        else:
            assert "of the server still makes it" in problem
            assert waits()
        assert _to(outbox.settings, "polling") == ["relays read between snapshots"]
        found = read(outbox.settings)
        assert (found.slot, found.exists, found.problems) == (None, False, [])
