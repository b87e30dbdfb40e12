"""Records refusals in the rows of events, and reports dead letters: the core's `Refusals` over PostgreSQL.

Invariants:
- Everything is written in the session that owns the table.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final

from outbox_pipelines.config.rules import Router
from outbox_pipelines.core.event import Event
from outbox_pipelines.core.log import RepeatedLines
from outbox_pipelines.existing import claim_sessions, existing_sql
from outbox_pipelines.existing.claim_sessions import names
from outbox_pipelines.existing.core.claims import Claims, Name
from outbox_pipelines.existing.core.row_retries import Pending, RowRetries
from outbox_pipelines.existing.table_ownership import TableOwnership
from outbox_pipelines.existing.table_statements import Keys
from outbox_pipelines.relay.core.blocked import BlockedAggregates
from outbox_pipelines.relay.core.parked import DeadLetter, Tried, Verdict
from outbox_pipelines.relay.core.quarantine import Quarantine
from outbox_pipelines.relay.kafka.topic_lookups import TopicLookups
from outbox_pipelines.relay.parking.notify import DeadLetterRuns, describe
from outbox_pipelines.relay.parking.prober import Prober
from outbox_pipelines.settings import ProcessSettings

if TYPE_CHECKING:
    from outbox_pipelines.relay.kafka.schema_ids import SchemaIds

# Dead letters that wait for the operator's command: in memory, because a marked table cannot store them.
_MOST_COMMANDS: Final = 1000
_COMMANDS_SECONDS: Final = 10.0
_LOG: Final = logging.getLogger(__name__)
_EVENT: Final = len(Event._fields)


class MarkedTableRetries(RowRetries):
    """Retries the blocked aggregates of an owned table."""

    def __init__(
        self,
        settings: ProcessSettings,
        ownership: TableOwnership,
        claims: Claims,
        blocked: BlockedAggregates,
        *,
        topics: TopicLookups,
        schema_ids: SchemaIds | None = None,
        on_dead_letter: Callable[[DeadLetter], None],
    ) -> None:
        self._runs = DeadLetterRuns(settings.dead_letter_command.reveal(), most=_MOST_COMMANDS)
        self._lines = RepeatedLines(_LOG)
        self._has_command = bool(settings.dead_letter_command)
        self._on_letter = on_dead_letter
        self._own_prober = Prober(settings, topics, schema_ids=schema_ids)
        super().__init__(
            _Rows(ownership),
            claims,
            blocked,
            self._own_prober,
            Quarantine(topics, blocked, time.monotonic),
            clock=time.monotonic,
            topic_of=Router(settings).topic_or_empty,
            jitter=lambda: random.uniform(0.8, 1.2),
            most_attempts=settings.max_attempts,
            retry_seconds=settings.retry_seconds,
            batch_bytes=settings.batch_bytes,
            blocks=settings.on_dead_letter == "block",
            on_dead_letter=self._tell,
        )

    def close_prober(self, *, failed: bool) -> None:
        """End the prober (after a graceful stop, wait for its last answers) and record its last verdicts."""
        if failed:
            self._own_prober.close(wait_seconds=0.0)
        else:
            self._own_prober.close()
        self.close()

    def close_commands(self) -> None:
        """Wait for the operator's commands, for a limited time, and end them."""
        self._runs.wait(_COMMANDS_SECONDS)
        if left := self._runs.close():
            _LOG.error(
                "OUTBOX_DEAD_LETTER_COMMAND was not run for %d dead letters: the relay has ended", left
            )

    def _tell(self, letter: DeadLetter) -> None:
        self._on_letter(letter)
        self._runs.done()
        event = letter.event
        if self._runs.room > 0:
            remedy = "correct the row or the topic, then run `outbox dead-letters replay`"
            said = describe(event, letter.attempts, letter.error, remedy=remedy)
            self._runs.submit(event.seq, said)
        elif self._has_command:
            self._lines.log(
                "queue",
                "OUTBOX_DEAD_LETTER_COMMAND is not run for %s: %d are queued",
                *(event, _MOST_COMMANDS),
                level=logging.ERROR,
            )


class _Rows:
    """Refusals in the table's rows, as far as it has columns for them: implements the core's `Refusals`."""

    def __init__(self, ownership: TableOwnership) -> None:
        self._ownership = ownership
        self._statements = ownership.statements
        self._keys = ownership.statements.keys
        self.remembers_failures = ownership.mapping.remembers_failures

    def tried(self) -> Iterable[Pending]:
        if self._statements.counts_attempts:
            for kind, name, key, *rest in self._ownership.execute(self._statements(existing_sql.TRIED), {}):
                yield Pending((kind, name), self._keys.number(key), *rest)

    def failed(self) -> Iterable[Name]:
        rows = self._ownership.execute(self._statements(existing_sql.FAILED), {})
        return [(kind, name) for kind, name in rows]

    def still_failed(self, aggregates: Sequence[Name]) -> Collection[Name]:
        rows = self._ownership.execute(self._statements(existing_sql.STILL_FAILED), names(aggregates))
        return {(kind, name) for kind, name in rows}

    def read(self, seqs: Sequence[int]) -> Generator[tuple[int, tuple[Event, int] | str]]:
        given = {"numbers": list(seqs), "keys": self._keys.array(seqs)}
        with closing(self._ownership.read(self._statements(existing_sql.EVENTS), given, seqs)) as found:
            for seq, row in found:
                yield seq, row if isinstance(row, str) else (Event._make(row[:_EVENT]), row[_EVENT])

    def postpone(self, reasons: dict[int, str]) -> None:
        if reasons and self._statements.writes_errors:
            self._ownership.execute(self._statements(existing_sql.POSTPONED), _texts(self._keys, reasons))

    def bury(self, reasons: dict[int, str]) -> None:
        count = len(reasons)
        with claim_sessions.explained(self._ownership.mapping):
            self._refuse(_texts(self._keys, reasons), [0.0] * count, [True] * count)

    def rehearse(self, seqs: list[int]) -> None:
        with self._ownership.transaction() as connection:
            claim_sessions.rehearse(connection, self._statements, self._ownership.mapping, seqs)

    def mark_what_can_be(self, seqs: list[int]) -> None:
        with self._ownership.transaction() as connection:
            claim_sessions.mark_what_can_be(connection, self._statements, seqs)

    def record(self, tried: Sequence[Tried], pauses: Sequence[float], news: Collection[int]) -> None:
        published = [one.attempt.event.seq for one in tried if one.verdict is Verdict.PUBLISHED]
        refused = [both for both in zip(tried, pauses, strict=True) if both[0].verdict is Verdict.REFUSED]
        reasons = {one.attempt.event.seq: one.reason for one in tried}
        table = self._ownership.mapping
        with claim_sessions.explained(table), self._ownership.transaction() as connection:
            if published:
                claim_sessions.mark(connection, self._statements, table, published)
            if refused:
                self._refuse(
                    _texts(self._keys, {one.attempt.event.seq: one.reason for one, _ in refused}),
                    [pause for _, pause in refused],
                    [one.attempt.is_last for one, _ in refused],
                )
            self.postpone({seq: reasons[seq] for seq in news})
        self._keys.forget(published)

    def _refuse(self, texts: dict[str, object], pauses: list[float], lasts: list[bool]) -> None:
        if self._statements.writes_refusals:
            given = {**texts, "pauses": pauses, "lasts": lasts}
            self._ownership.execute(self._statements(existing_sql.REFUSED), given)


def _texts(keys: Keys, reasons: dict[int, str]) -> dict[str, object]:
    # PostgreSQL's text has no NUL.
    return {"keys": keys.array(reasons), "errors": [reason.replace("\0", "") for reason in reasons.values()]}
