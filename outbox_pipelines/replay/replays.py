"""Begin and resume replays.

Invariants:
- One replay of an outbox runs at a time. Nothing is sent before everything is checked and recorded.
- The position of a replay is in the database: what was acknowledged before it is not sent again. After a
  crash, what was acknowledged within the last second may come twice.
- With OUTBOX_DELIVERY=exactly_once, the position is also in each transaction: nothing comes twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from typing import Final
from uuid import UUID

import psycopg
from confluent_kafka import KafkaException
from psycopg.types.json import Jsonb

from outbox_pipelines.database import Connection, refusal
from outbox_pipelines.database.locks import AdvisoryLock
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError
from outbox_pipelines.relay.memory import collecting_rarely
from outbox_pipelines.replay import replay_sql, replay_topics
from outbox_pipelines.replay.replay_reading import Part, Reader
from outbox_pipelines.replay.replay_record import Replay, advance, connected, get
from outbox_pipelines.replay.selection import Selection
from outbox_pipelines.replay.sender import AgainError, Sender, StoppedError
from outbox_pipelines.replay.transactional_sender import TransactionalSender
from outbox_pipelines.settings import ProcessSettings

_LOCK: Final = AdvisoryLock("hashtext('outbox replay')", "'outbox_replays'::regclass::oid::int")
_SAVE_SECONDS: Final = 1.0
_SAY_SECONDS: Final = 5.0


class NothingSelectedError(SetupError):
    """No published event is selected."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Selected events of a day and a type."""

    day: date
    aggregate_type: str
    event_type: str
    events: int
    example: str
    """The id of the first of them."""
    topic: str
    """Where they are sent."""


Progress = Callable[[Replay, int, str], None]
"""Called with the replay, the number of acknowledged events, and what Kafka's client says of an outage."""


def preview(settings: ProcessSettings, selection: Selection, target: str) -> tuple[list[Counted], list[str]]:
    """Return what a replay would send, and what retention and redaction have changed in these days.

    Raises:
        SetupError: the selection selects nothing, or cannot be evaluated.
        UnavailableError: the database or the archive does not answer.
    """
    with connected(settings) as connection:
        reader = Reader(settings, connection, selection)
        return _count(settings, reader, target), reader.notes()


def begin(
    settings: ProcessSettings,
    selection: Selection,
    target: str,
    *,
    reason: str,
    actor: str,
    creates: bool,
    rate: float,
    is_stopped: Callable[[], bool],
    progress: Progress,
) -> Replay:
    """Send the selected events again; return the replay at its end, or where it was stopped.

    Args:
        target: a template of `{topic}`.
        creates: whether missing topics are created.
        rate: events a second at most.

    Raises:
        NotReadyError: another replay is running.
        SetupError: the selection selects nothing, a topic does not fit, or Kafka refuses an event.
        UnavailableError: the database, the archive or Kafka does not answer.
    """
    replay_topics.check(target)
    with _alone(settings) as connection:
        reader = Reader(settings, connection, selection)
        parts = reader.parts()
        last_seq = max((part.last for part in parts), default=0)
        # More may be published in the meantime: they are not sent.
        counts = _count(settings, reader, target, last_seq)
        routes = _routes(settings, counts, selection.topics, target)
        partitions, topic_ids = replay_topics.require(settings, routes.values(), creates=creates)
        parameters = {
            "selection": Jsonb(selection.to_json()),
            "target": target,
            "files": Jsonb([_file(part) for part in parts if part.manifest is not None]),
            "events": sum(count.events for count in counts),
            "last_seq": last_seq,
            "reason": reason,
            "on_behalf_of": actor,
            "notes": reader.notes(),
        }
        ((replay_id,),) = connection.execute(replay_sql.BEGIN, parameters)
        replay = get(connection, replay_id)
        return _run(settings, reader, replay, routes, partitions, topic_ids, rate, is_stopped, progress)


def resume(
    settings: ProcessSettings,
    replay: UUID,
    *,
    rate: float,
    is_stopped: Callable[[], bool],
    progress: Progress,
) -> Replay:
    """Continue a replay behind what is acknowledged; raise as `begin`."""
    with _alone(settings) as connection:
        found = get(connection, replay)
        if not found.is_open:
            raise SetupError(f"replay {replay} is {found.state}: begin another one")
        selection = Selection.of_json(found.selection)
        reader = Reader(settings, connection, selection)
        counts = _count(settings, reader, found.target, found.last_seq)
        routes = _routes(settings, counts, selection.topics, found.target)
        partitions, topic_ids = replay_topics.require(settings, routes.values(), creates=False)
        return _run(settings, reader, found, routes, partitions, topic_ids, rate, is_stopped, progress)


def _run(
    settings: ProcessSettings,
    reader: Reader,
    replay: Replay,
    routes: Mapping[replay_topics.EventTypeNames, tuple[str, str]],
    partitions: Mapping[str, int],
    topic_ids: Mapping[str, str],
    rate: float,
    is_stopped: Callable[[], bool],
    progress: Progress,
) -> Replay:
    connection = reader.connection
    sender: Sender | None = None
    state, saved_at, said_at, said_sent = "running", 0.0, time.monotonic(), -1

    def save(wanted: str, error: str | None = None) -> str:
        position, sent = (sender.position, sender.sent) if sender is not None else (0, 0)
        return advance(connection, replay.id, position, sent, wanted, error)

    def is_ended() -> bool:
        """Save and report the progress, also while the replay waits for Kafka; return whether to end."""
        nonlocal state, saved_at, said_at, said_sent
        if time.monotonic() > saved_at + _SAVE_SECONDS:
            state, saved_at = save("running"), time.monotonic()
        if sender is not None and time.monotonic() > said_at + _SAY_SECONDS:
            # A broker that hangs is no error of the client for a long time.
            is_silent = sender.sent == said_sent and sender.is_waiting
            progress(replay, sender.sent, sender.trouble or ("no answer" if is_silent else ""))
            said_at, said_sent = time.monotonic(), sender.sent
        return is_stopped() or state != "running"

    topics = {kind: topic for kind, (_, topic) in routes.items()}
    try:
        sender = _sender(settings, connection, replay, topics, partitions, rate, is_ended)
        with collecting_rarely():
            is_complete = _send(reader, sender, replay, is_ended)
        if is_complete:
            sender.position = replay.last_seq
            replay_topics.require_same(settings, topic_ids)
        save("done" if is_complete else "stopped")
    except replay_topics.ReplacedError as error:
        save("stopped", str(error))
        # Resumed, it would leave out what is lost.
        save("canceled")
        raise
    except (SetupError, KafkaException) as error:
        why = str(error) if isinstance(error, SetupError) else f"Kafka's client fails: {error.args[0].str()}"
        save("stopped", why)
        kind = type(error) if isinstance(error, SetupError) else SetupError
        raise kind(f"{why}. Correct the cause, then run `outbox replay --resume {replay.id}`") from None
    except psycopg.OperationalError as error:
        raise UnavailableError(
            f"the database refuses: {refusal(error)}. Later, run `outbox replay --resume {replay.id}`"
        ) from error
    finally:
        if sender is not None:
            sender.close()
    return get(connection, replay.id)


def _sender(
    settings: ProcessSettings,
    connection: Connection,
    replay: Replay,
    topics: Mapping[replay_topics.EventTypeNames, str],
    partitions: Mapping[str, int],
    rate: float,
    is_ended: Callable[[], bool],
) -> Sender:
    if settings.delivery == "exactly_once":
        return TransactionalSender(
            settings, connection, replay, topics, partitions, rate=rate, is_stopped=is_ended
        )
    return Sender(
        *(settings, replay.id, topics, partitions),
        rate=rate,
        is_stopped=is_ended,
        position=replay.position,
        sent=replay.sent,
    )


def _send(reader: Reader, sender: Sender, replay: Replay, is_ended: Callable[[], bool]) -> bool:
    """Send what is behind the position; return False if the replay was stopped before all is acknowledged."""
    try:
        while True:
            try:
                for events in reader.events(sender.position, replay.last_seq):
                    sender.send(events)
                    if is_ended():
                        raise StoppedError
                return sender.finish() and not is_ended()
            except AgainError:
                sender.restart()
    except StoppedError:
        with suppress(StoppedError, AgainError):
            sender.finish()
        return False


def _count(
    settings: ProcessSettings, reader: Reader, target: str, last_seq: int | None = None
) -> list[Counted]:
    found = reader.count(last_seq)
    kinds = {(aggregate_type, event_type) for _, aggregate_type, event_type, *_ in found}
    routes = replay_topics.routes(settings, kinds, reader.selection.topics, target)
    counts = [
        Counted(day, aggregate_type, event_type, number, example, routes[aggregate_type, event_type][1])
        for day, aggregate_type, event_type, number, example in found
        if (aggregate_type, event_type) in routes
    ]
    if not counts:
        raise NothingSelectedError(
            "no published event is selected: check the conditions with `outbox archive query` or in the view "
            f"outbox_events{''.join(f'; {note}' for note in reader.notes())}"
        )
    return counts


def _routes(
    settings: ProcessSettings, found: list[Counted], topics: Sequence[str], target: str
) -> dict[replay_topics.EventTypeNames, tuple[str, str]]:
    kinds = {(each.aggregate_type, each.event_type) for each in found}
    return replay_topics.routes(settings, kinds, topics, target)


def _file(part: Part) -> dict[str, str]:
    assert part.manifest is not None
    return {"day": str(part.day), "file": part.manifest.file, "sha256": part.manifest.sha256}


@contextmanager
def _alone(settings: ProcessSettings) -> Iterator[Connection]:
    with connected(settings) as connection:
        if holder := _LOCK.take(connection, {}):
            raise NotReadyError(
                f"another replay is running, in {holder}: wait, or end it with `outbox replay cancel ID`"
            )
        yield connection
