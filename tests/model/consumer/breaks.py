"""Defects on purpose: each changes one decision of the production code, or one condition of its SQL.

Invariants:
- What is changed is the text of a method, which must have the old text exactly once: a break that no longer
  fits is an error.
- SQL is broken in the model's database, in the method of the statement.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from outbox_pipelines.consumer.database_retry import DatabaseRetry
from outbox_pipelines.consumer.deliveries import Deliveries, InboxWorker
from outbox_pipelines.consumer.handler_transactions import HandlerTransactions
from outbox_pipelines.consumer.inbox import Inbox
from outbox_pipelines.consumer.membership import Member
from outbox_pipelines.consumer.partition_owners import CrashGuard
from outbox_pipelines.consumer.processed_events import ProcessedEvents
from outbox_pipelines.consumer.settlement import Settlement
from outbox_pipelines.consumer.work import Work
from tests.model.consumer import world
from tests.model.consumer.database import Database


@dataclass(frozen=True)
class Change:
    """Of one method."""

    of: type
    method: str
    old: str
    new: str


@dataclass(frozen=True)
class Break:
    """One defect, where it shows and by which invariant."""

    about: str
    scope: str
    invariant: str
    changes: tuple[Change, ...]
    is_cheap: bool = True
    """Whether `make test-system` looks for it too."""


@contextmanager
def broken(each: Break) -> Iterator[None]:
    """Work with a defect."""
    before = [(change.of, change.method, change.of.__dict__[change.method]) for change in each.changes]
    try:
        for change in each.changes:
            setattr(change.of, change.method, _changed(change))
        world.forget()
        yield
    finally:
        for of, method, function in before:
            setattr(of, method, function)
        world.forget()


def _changed(change: Change) -> Any:
    source = textwrap.dedent(inspect.getsource(change.of.__dict__[change.method]))
    if source.count(change.old) != 1:
        raise LookupError(f"{change.of.__name__}.{change.method} no longer has {change.old!r} once")
    module = sys.modules[change.of.__module__]
    found: dict[str, Any] = {}
    # Annotations stay text, as in the module.
    code = "from __future__ import annotations\n" + source.replace(change.old, change.new)
    exec(compile(code, f"<{change.method}>", "exec"), module.__dict__, found)
    return found[change.method]


def _one(
    about: str,
    scope: str,
    invariant: str,
    of: type,
    method: str,
    old: str,
    new: str,
    *,
    is_cheap: bool = True,
) -> Break:
    return Break(about, scope, invariant, (Change(of, method, old, new),), is_cheap)


BREAKS: Final[dict[str, Break]] = {
    # Record, handle, commit.
    "record in a transaction of its own": _one(
        "the event is recorded and committed, then handled",
        *("consumer-one", "accounted"),
        *(ProcessedEvents, "record"),
        "rows = await self._database.rows(transaction, *self.statement(item))",
        "async with self._database.transaction() as first:\n"
        "        rows = await self._database.rows(first, *self.statement(item))",
    ),
    "handle, then record": _one(
        "the handler's work is committed before the event is recorded",
        *("consumer-one", "once"),
        *(HandlerTransactions, "one"),
        "async with self.database.transaction() as transaction:\n",
        "async with self.database.transaction() as first:\n"
        "            await self._call(handler, [item], first)\n"
        "        async with self.database.transaction() as transaction:\n"
        "            await self.processed.record(transaction, item)\n"
        "            return 'handled'\n",
    ),
    "done before it is handled": _one(
        "the offset is stored before the event is handled",
        *("consumer-two-crash", "accounted"),
        *(Work, "take"),
        "        if new:\n",
        "        member.done([each.message for each in group])\n        if new:\n",
    ),
    "done when it is polled": _one(
        "the offset is stored when the message arrives, as enable.auto.offset.store does",
        *("consumer-two-crash", "accounted"),
        *(Member, "poll"),
        "    return [each for each in messages if self._is_message(each) and self.has(each)]",
        "    self.done(messages)\n"
        "    return [each for each in messages if self._is_message(each) and self.has(each)]",
    ),
    "what is left at a stop is done": _one(
        "after SIGTERM the rest of a batch counts as done",
        *("consumer-stop-one", "accounted"),
        *(Work, "take"),
        "            return\n",
        "            member.done(messages)\n            return\n",
    ),
    "a known id is handled again": _one(
        "RECORD says that an event is new that is recorded",
        *("consumer-again-once", "once"),
        *(Database, "_record"),
        "return bool(self._insert(session, rest, [nth]))",
        "return bool(self._insert(session, rest, [nth])) or nth in self.processed",
    ),
    "no wait for who records the same event": _one(
        "an event that another transaction has recorded counts as a duplicate before that is committed",
        *("consumer-one", "accounted"),
        *(Database, "_insert"),
        'raise Blocked(("id", nth), (new, left[at:]))',
        "continue",
    ),
    "a lost answer counts as success": _one(
        "an error of the handler's transaction is ignored",
        *("consumer-one", "accounted"),
        *(Deliveries, "_one"),
        "await self.settlement.fail(item, error)",
        "pass",
    ),
    # Batches.
    "a batch handles what is recorded": _one(
        "the handler gets the whole batch, also what was handled before",
        *("consumer-again-once", "once"),
        *(HandlerTransactions, "many"),
        "await self._call_in_turn(new, transaction)",
        "await self._call_in_turn(items, transaction)",
    ),
    "a shared transaction passes over what fails": _one(
        "an event whose handler fails is committed with those that share its transaction",
        *("consumer-shared", "accounted"),
        *(HandlerTransactions, "_call_in_turn"),
        "await self._call(each.handler, [each], transaction)",
        "try:\n                await self._call(each.handler, [each], transaction)\n"
        "            except ValueError:\n                pass",
    ),
    "a shared transaction calls the handler of its first event only": _one(
        "events behind the first one of a shared transaction are recorded and not handled",
        *("consumer-shared-kills", "accounted"),
        *(HandlerTransactions, "_call_in_turn"),
        "if time.monotonic() > until:",
        "if n:\n                break\n            if False:",
    ),
    "a batch leaves what waits": _one(
        "events of a batch that were not recorded for their key are left out",
        *("consumer-behind", "accounted"),
        *(Deliveries, "_many"),
        "    await self._one_by_one(behind)",
        "    pass",
    ),
    "a batch that fails is left": _one(
        "events of a batch that failed are not handled one by one",
        *("consumer-batch-refused", "accounted"),
        *(Deliveries, "_failed"),
        "await self._one(each)",
        "pass",
    ),
    "a batch does not look again": _one(
        "RECORD_MANY waits, and does not see what was put into the inbox while it waited",
        *("consumer-batch", "order"),
        *(ProcessedEvents, "record_many"),
        "if known and new:",
        "if False:",
        is_cheap=False,
    ),
    "a batch does not look at keys": _one(
        "RECORD_MANY records an event whose key has to wait",
        *("consumer-behind", "order"),
        *(Database, "_record_many"),
        "if not self._is_taken(self.keys[nth])",
        "if True",
    ),
    "a partition that has gone stays paused": _one(
        "a partition that goes during a pause is not taken up again when it comes back",
        *("consumer-two", "liveness"),
        *(Member, "wait"),
        "resume(paused)",
        "resume(self._client.assignment())",
    ),
    # Keys and the inbox.
    "no look at the key": _one(
        "RECORD records an event whose key has to wait",
        *("consumer-refused-once", "order"),
        *(Database, "_record"),
        "if rest is None and self._is_taken(self.keys[nth]):",
        "if False:",
    ),
    "behind a key is passed over": _one(
        "an event whose key has to wait is not put into the inbox",
        *("consumer-refused-once", "accounted"),
        *(Deliveries, "_one"),
        "        # It was not recorded because an earlier event of its key has to be handled first.\n"
        "        await self.settlement.hold([item])",
        "        await self.settlement.duplicates([item])",
    ),
    "received without a record": _one(
        "RECEIVE does not record the event",
        *("consumer-refused-once", "accounted"),
        *(Database, "_receive"),
        "new = self._insert(session, rest, ids)",
        "new = list(ids)",
    ),
    "claimed out of order": Break(
        "HEADS and CLAIM do not look for an earlier message of the key",
        *("consumer-refused-once", "order"),
        (
            Change(Database, "_heads", "first.setdefault(self.keys[nth], seq)", "first[str(seq)] = seq"),
            Change(Database, "_claim", "self._is_taken(self.keys[nth], before=seq) or ", ""),
        ),
    ),
    "a dead letter does not block": Break(
        "on_dead_letter=block, and CLAIM, HEADS and RECORD look only at waiting messages",
        *("consumer-blocks", "order"),
        (
            Change(Database, "_is_taken", '(state == "failed" and self.blocks)', "False"),
            Change(Database, "_heads", '(state == "failed" and self.blocks)', "False"),
        ),
    ),
    "settled in a transaction of its own": _one(
        "a message of the inbox is settled and committed, then handled",
        *("consumer-one", "accounted"),
        *(HandlerTransactions, "stored"),
        "began = await self.inbox.finish(transaction, seq, attempts)",
        "async with self.database.transaction() as first:\n"
        "                began = await self.inbox.finish(first, seq, attempts)",
    ),
    "handled though it is not ours": _one(
        "FINISH says that another process has the message, and it is handled anyway",
        *("consumer-slow", "once"),
        *(HandlerTransactions, "stored"),
        "if not began:",
        "if False:",
        is_cheap=False,
    ),
    "two settle one message": _one(
        "FINISH does not look whether another transaction has settled the message",
        *("consumer-slow", "once"),
        *(Database, "_finish"),
        'if self._is_locked(session, "row", seq):',
        "if False:",
    ),
    "received and not put in": _one(
        "receive() skips events",
        *("consumer-inbox", "accounted"),
        *(Work, "receive"),
        "await self.settlement.hold(wanted)",
        "pass",
    ),
    # Attempts.
    "attempts are not counted": _one(
        "CLAIM does not count: an event that ends the process is never found",
        *("consumer-kills", "liveness"),
        *(Database, "_claim"),
        "[begun + 1, False]",
        "[begun, False]",
    ),
    "never given up": _one(
        "an event all of whose attempts were cut off is tried again",
        *("consumer-kills", "liveness"),
        *(InboxWorker, "attempt"),
        "if waiting.attempts >= self.plan.max_attempts:",
        "if False:",
    ),
    "dead after the first attempt in the inbox": _one(
        "the first failure in the inbox makes a dead letter",
        *("consumer-inbox", "blame"),
        *(Settlement, "fail_stored"),
        'last = attempts >= self.plan.max_attempts or policy == "dead_letter"',
        "last = True",
    ),
    "received as dead": _one(
        "what is put into the inbox is a dead letter immediately",
        *("consumer-refused-once", "blame"),
        *(Inbox, "receive"),
        '"failed" if dead else "waiting"',
        '"failed"',
    ),
    "an outage counts": _one(
        "an attempt counts although the handler's service was unavailable",
        *("consumer-outage", "blame"),
        *(Settlement, "fail_stored"),
        "text, dead=dead, pause=pause)",
        "text, dead=dead)",
    ),
    "an outage kills": _one(
        "the last attempt makes a dead letter although the handler's service was unavailable",
        *("consumer-outage", "blame"),
        *(Settlement, "fail_stored"),
        "last and pause is None and await self._has_copy",
        "last and await self._has_copy",
    ),
    "held events are passed over": _one(
        "what arrives while a handler is paused is not put into the inbox",
        *("consumer-outage", "accounted"),
        *(Settlement, "hold"),
        "where = await self.receive(items)",
        "where = {}",
    ),
    "a late failure undoes a replay": _one(
        "MISSED does not look at the attempts",
        *("consumer-operator", "blame"),
        *(Database, "_is_our_attempt"),
        "state in OPEN and so_far == begun",
        'state == "waiting"',
    ),
    "counted before it is handled": _one(
        "a connection that is lost before the handler is called costs an attempt",
        *("consumer-refused", "blame"),
        *(DatabaseRetry, "attempt"),
        "elif isinstance(error, SetupError) or self.is_called or not is_outage(error):",
        "elif True:",
    ),
    "given up while it is handled": Break(
        "READ and MISSED do not check whether an attempt continues, and its own end does not count",
        *("consumer-outage-two", "blame"),
        (
            Change(
                Database,
                "_read",
                ' or not is_due or so_far != begun or self._is_locked(session, "row", seq)',
                "",
            ),
            Change(Database, "_is_our_attempt", "state in OPEN", 'state == "waiting"'),
            Change(Database, "_finish", 'state != "failed" or so_far != begun', "True"),
        ),
        is_cheap=False,
    ),
    # The crash guard.
    "nobody is suspect": _one(
        "the events in flight of a crashed process are handled like all others",
        *("consumer-kills", "liveness"),
        *(CrashGuard, "assigned"),
        "self._suspect |= dict.fromkeys(left, events)",
        "pass",
    ),
    "owned at once": _one(
        "a partition that another process left becomes ours before its events have passed",
        *("consumer-kills", "liveness"),
        *(CrashGuard, "assigned"),
        "queries.OWN_FREE",
        "queries.OWN",
    ),
    "each crash is the first": _one(
        "a partition that another process left is ours although its owners have crashed twice",
        *("consumer-kills", "liveness"),
        *(Database, "_own_free"),
        "owner, crashes + 1",
        "owner, 0",
    ),
    # The cache.
    "the cache is believed": _one(
        "what the cache knows is not looked up in the database",
        *("consumer-cache", "accounted"),
        *(Work, "_known"),
        "return await self.retry.run(lambda: self._processed.confirm(ids)) if ids else set()",
        "return {*ids}",
    ),
}
