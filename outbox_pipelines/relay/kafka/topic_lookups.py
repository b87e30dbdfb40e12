"""The topics that the relay publishes to: whether they exist, what they accept, which are unavailable.

Invariants:
- A topic is looked up before the first message to it: the client would report a missing topic half a minute
  later, and for each message.
- A separate thread asks the brokers. The publishing thread waits for the first answer about a topic, which
  a broker gives immediately; for a missing topic it waits as long as `patience` allows. So a missing topic
  does not delay events of other topics.
- A missing topic, or one whose messages Kafka refuses, is unavailable as a whole, until it is found or
  accepts an event that is tried alone. One that accepts nothing while others do, as a partition has no leader
  or too few replicas in sync, is so until the brokers report it whole: no event is tried.
- Any thread may call any method.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable
from typing import Final

from outbox_pipelines.core import log
from outbox_pipelines.errors import UnavailableError
from outbox_pipelines.relay.core.outcomes import Refusal
from outbox_pipelines.relay.core.producers import OUTAGE_SECONDS
from outbox_pipelines.relay.kafka import client_errors
from outbox_pipelines.relay.kafka.topic_admin import TopicAdmin, Unavailable
from outbox_pipelines.relay.kafka.topic_state import (
    PartitionChange,
    Patience,
    Search,
    Topic,
    TopicRefusal,
    TopicUnavailableError,
)
from outbox_pipelines.settings import MessageSettings

_LOG = logging.getLogger(__name__)
# An available broker answers within milliseconds whether it has a topic.
_ANSWER_SECONDS: Final = 10.0
# A broker that creates topics automatically needs a moment for it.
_CREATION_SECONDS: Final = 3.0
# How often a missing topic is looked up: while it may be in creation, and later.
_CREATION_POLL: Final = 0.1
_AGAIN_SECONDS = 2.0
# How often a topic that could not be created is tried again: a permission is granted, a limit raised.
_CREATE_AGAIN_SECONDS = 30.0
# How often a topic that refuses messages is tried with one.
_TRIAL_SECONDS = 10.0
_REFRESH_SECONDS = 60.0
_OUTAGE_PAUSE: Final = 0.5
# Topics in one request to the brokers.
_AT_ONCE: Final = 500


class TopicLookups:
    """What the relay knows about the topics.

    Args:
        creation_seconds: how long a topic that the broker may be creating does not count as missing.
        answer_seconds: how long to wait for the first answer about a topic.

    Attributes:
        changed: every observed change of a number of partitions, in order.
    """

    def __init__(
        self,
        settings: MessageSettings,
        *,
        creation_seconds: float = _CREATION_SECONDS,
        answer_seconds: float = _ANSWER_SECONDS,
    ) -> None:
        self.changed: list[PartitionChange] = []
        self._creation_seconds = creation_seconds
        self._answer_seconds = min(answer_seconds, _ANSWER_SECONDS)
        self._admin = TopicAdmin(settings)
        self._patience = Patience()
        # Guards all of the following; only whether a topic is known is read without it.
        self._changed = threading.Condition()
        self._topics: dict[str, Topic] = {}
        self._searches: dict[str, Search] = {}
        self._new: list[str] = []
        self._doubted: dict[str, Topic] = {}
        """The known state of each doubted topic, until it is looked up again."""
        self._refusals: dict[str, TopicRefusal] = {}
        self._outages = 0
        self._outage = ""
        self._unanswered_since = math.inf
        self._has_changed = False
        self._refresh_due = time.monotonic() + _REFRESH_SECONDS
        self._halted_due = math.inf
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._end = False

    def connect(self) -> None:
        """Wait until a broker answers.

        Raises:
            UnavailableError: no broker answers, or the credentials are wrong.
        """
        self._admin.connect()

    def answers(self) -> bool:
        """Return whether a broker answers within a second."""
        return self._admin.answers()

    def idle(self) -> None:
        """Fetch the client's error reports while nothing is asked; they would accumulate otherwise."""
        self._admin.poll()

    def close(self) -> None:
        """End the lookups, and the client that asks."""
        with self._changed:
            self._end = True
            self._changed.notify_all()
        if self._thread is None:
            self._admin.close()

    @property
    def known(self) -> frozenset[str]:
        """The topics that were found and still exist."""
        with self._changed:
            return frozenset(self._topics)

    def doubt(self, name: str) -> None:
        """Look the topic up before its next use: Kafka has contradicted its known state."""
        with self._changed:
            if (topic := self._topics.pop(name, None)) is not None:
                self._doubted[name] = topic
            self._ask([name])

    def refresh(self) -> bool:
        """Return whether topics or limits have changed since the last call; raise what ended the look-ups."""
        if self._failure is not None:
            raise self._failure
        if not self._has_changed:
            return False
        self._has_changed = False
        return True

    def ask(self, names: Iterable[str]) -> None:
        """Have these topics looked up together, except those that are known or being looked up."""
        with self._changed:
            self._ask(names)

    def is_asked(self, name: str) -> bool:
        """Return whether the topic is known or being looked up."""
        return name in self._topics or name in self._searches

    def is_known(self, name: str) -> bool:
        """Return whether the topic was found and still exists."""
        return name in self._topics

    def find(self, name: str) -> Topic:
        """Return the topic for the flow of all events; wait briefly for an answer and for its creation.

        Raises:
            TopicUnavailableError: it does not exist yet, may not be written to, or refuses messages.
            UnavailableError: no broker answers.
        """
        with self._changed:
            if (refusal := self._refusals.get(name)) is not None:
                raise TopicUnavailableError(name, refusal.reason)
            topic = self._topics.get(name)
            if topic is None:
                topic = self._wait(name, self._patience.left())
            return topic

    def find_for_trial(self, name: str, seconds: float) -> Topic:
        """Return the topic for an event tried alone; wait longer for its creation, and ignore refusals.

        Raises:
            TopicUnavailableError: it does not exist, or the relay may not write to it.
            UnavailableError: no broker answers.
        """
        with self._changed:
            return self._topics.get(name) or self._wait(name, seconds, is_spent=False)

    def unavailable(self, name: str) -> str | None:
        with self._changed:
            if (refusal := self._refusals.get(name)) is not None:
                return refusal.reason
            if name in self._topics:
                return None
            self._ask([name])
            return self._searches[name].reason

    def may_be_found(self, name: str) -> bool:
        with self._changed:
            search = self._searches.get(name)
            is_outage = time.monotonic() - self._unanswered_since > OUTAGE_SECONDS
            is_final = search is not None and search.is_final
            return not (is_outage or is_final or name in self._refusals)

    def refuse(self, name: str, refusal: Refusal) -> None:
        """Mark the topic as unavailable: Kafka has refused a message because of its topic."""
        with self._changed:
            if refusal.code in client_errors.TOPIC_CHANGED:
                self._topics.pop(name, None)
                self._ask([name])
                self._searches[name].reason = self._searches[name].reason or "was deleted or created again"
            elif name not in self._refusals:
                _LOG.warning("topic %s refuses messages: %s", name, refusal.reason)
                self._refusals[name] = TopicRefusal(
                    f"refuses messages: {refusal.reason}", time.monotonic() + _TRIAL_SECONDS
                )

    def accept(self, name: str) -> None:
        with self._changed:
            if self._refusals.pop(name, None) is not None:
                _LOG.warning("topic %s accepts messages again", name)
                self._has_changed = True

    def refuse_halted(self) -> bool:
        """Mark topics of which a partition accepts nothing as unavailable; return whether there are any.

        Returns False without marking any if no known topic accepts messages: then Kafka is unavailable.
        """
        with self._changed:
            names = [name for name in self._topics if name not in self._refusals]
        found: dict[str, str] = {}
        for first in range(0, len(names), _AT_ONCE):
            found |= self._admin.halted(names[first : first + _AT_ONCE])
        halted = {name: reason for name, reason in found.items() if reason}
        if not halted or len(halted) == len(found):
            return False
        with self._changed:
            for name, reason in halted.items():
                _LOG.warning("topic %s %s", name, reason)
                self._refusals[name] = TopicRefusal(reason, math.inf)
            self._halted_due = time.monotonic() + _AGAIN_SECONDS
            self._start()
            self._changed.notify_all()
        return True

    def due_for_trial(self) -> list[str]:
        now = time.monotonic()
        with self._changed:
            due = [name for name, refusal in self._refusals.items() if refusal.trial_at <= now]
            for name in due:
                self._refusals[name].trial_at = now + _TRIAL_SECONDS
        return due

    # --- the methods below, up to those of the thread, are called with the condition locked ---

    def _ask(self, names: Iterable[str]) -> None:
        now = time.monotonic()
        for name in names:
            if name in self._topics:
                continue
            search = self._searches.get(name)
            if search is None:
                search = self._searches[name] = Search(now + self._creation_seconds)
            if not search.reason and name not in self._new:
                self._new.append(name)
        if self._new:
            self._start()
            self._changed.notify_all()

    def _wait(self, name: str, seconds: float, *, is_spent: bool = True) -> Topic:
        self._ask([name])
        outages = self._outages

        def is_answered() -> bool:
            search = self._searches.get(name)
            is_over = self._outages > outages or self._failure is not None or self._end
            return search is None or bool(search.reason) or is_over

        self._changed.wait_for(is_answered, self._answer_seconds)
        begun = time.monotonic()
        search = self._searches.get(name)
        if search is not None and search.reason and not (is_spent and search.is_waited_for):
            search.is_waited_for = search.is_waited_for or is_spent
            self._changed.wait_for(
                lambda: name not in self._searches or self._searches[name].is_final, seconds
            )
        if is_spent:
            self._patience.spend(time.monotonic() - begun)
        if self._failure is not None:
            # No event is the cause: `refresh` raises it.
            raise UnavailableError(f"topics are not looked up any more: {self._failure}")
        if (topic := self._topics.get(name)) is not None:
            return topic
        search = self._searches.get(name)
        if search is None or not search.reason:
            raise UnavailableError(
                self._outage or f"no broker has answered within {self._answer_seconds:g} s about topic {name}"
            )
        raise TopicUnavailableError(name, search.reason)

    def _start(self) -> None:
        if self._thread is None and not self._end:
            self._thread = threading.Thread(target=log.inherit(self._run), name="outbox-topics", daemon=True)
            self._thread.start()

    # --- the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                # A call that notifies may have changed how long to rest.
                if not (self._end or self._new):
                    self._changed.wait(self._rest())
                if self._end:
                    break
                names, self._new = self._new[:_AT_ONCE], self._new[_AT_ONCE:]
            try:
                if names:
                    self._look(names)
                else:
                    self._search()
                    self._refresh()
                    self._look_at_halted()
            except UnavailableError as error:
                self._note_outage(str(error))
            except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
        self._admin.close()

    def _rest(self) -> float:
        due = min(
            (search.due for search in self._searches.values() if search.reason), default=self._refresh_due
        )
        return max(0.0, min(due, self._refresh_due, self._halted_due) - time.monotonic())

    def _look(self, names: list[str]) -> None:
        """Ask about topics, and record the answers."""
        found = self._admin.describe(names)
        limits = self._admin.limits(name for name, what in found.items() if isinstance(what, int))
        now = time.monotonic()
        with self._changed:
            self._unanswered_since = math.inf
            for name, what in found.items():
                if isinstance(what, int):
                    self._searches.pop(name, None)
                    self._topics[name] = Topic(name, what, limits.get(name))
                    self._has_changed = True
                    if (before := self._doubted.pop(name, None)) is not None:
                        self._note_change(before, what, limits.get(name))
                elif (search := self._searches.get(name)) is not None:
                    self._note_absence(search, what, now)
            self._changed.notify_all()

    def _note_absence(self, search: Search, what: Unavailable, now: float) -> None:
        # The reason why the relay may not create it is more useful than that it is missing.
        if not (search.is_final and search.reason and what.is_missing):
            search.reason = what.reason
        search.is_final = search.is_final or not what.is_missing or now >= search.final_at
        if not search.create_at and what.is_missing:
            search.due = now
        else:
            # A thousand missing topics are asked for less often than one.
            pause = _AGAIN_SECONDS + 0.01 * len(self._searches)
            search.due = now + (pause if search.is_final else _CREATION_POLL)

    def _search(self) -> None:
        """Create missing topics, or have the broker create them, if enabled; then look them up again."""
        now = time.monotonic()
        with self._changed:
            due = [name for name, search in self._searches.items() if search.reason and search.due <= now]
            due = due[:_AT_ONCE]
            fresh = [name for name in due if self._searches[name].create_at <= now]
            create_again_at = now + _CREATE_AGAIN_SECONDS + 0.01 * len(self._searches)
        if fresh and self._admin.creates:
            refused = self._admin.create(fresh)
            with self._changed:
                for name in fresh:
                    search = self._searches[name]
                    search.create_at = create_again_at
                    if name in refused:
                        search.reason, search.is_final = refused[name], True
                    else:
                        search.final_at = max(search.final_at, time.monotonic() + self._creation_seconds)
        else:
            for name in fresh:
                # A thread waits for the first answer about another topic.
                if self._new or self._end:
                    return
                self._admin.provoke(name)
                with self._changed:
                    self._searches[name].create_at = create_again_at
        if due:
            self._look(due)

    def _refresh(self) -> None:
        """Ask about all known topics again, once a minute."""
        if time.monotonic() < self._refresh_due:
            return
        self._refresh_due = time.monotonic() + _REFRESH_SECONDS
        self._admin.poll()
        with self._changed:
            known = dict(self._topics)
        names = list(known)
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            found = self._admin.describe(some)
            limits = self._admin.limits(name for name, what in found.items() if isinstance(what, int))
            with self._changed:
                for name, what in found.items():
                    self._note_change(known[name], what, limits.get(name))

    def _look_at_halted(self) -> None:
        """Accept the topics of which all partitions take messages again."""
        if time.monotonic() < self._halted_due:
            return
        with self._changed:
            names = [name for name, refusal in self._refusals.items() if refusal.trial_at == math.inf]
            self._halted_due = time.monotonic() + _AGAIN_SECONDS if names else math.inf
        for name, reason in (self._admin.halted(names) if names else {}).items():
            if not reason:
                self.accept(name)

    def _note_change(self, before: Topic, what: int | Unavailable, limit: int | None) -> None:
        if isinstance(what, Unavailable):
            if what.is_missing:
                _LOG.warning("topic %s no longer exists", before.name)
                self._topics.pop(before.name, None)
                self._has_changed = True
            return
        after = Topic(before.name, what, before.largest if limit is None else limit)
        if after.partitions != before.partitions:
            self.changed.append(PartitionChange(before.name, before.partitions, after.partitions))
            _LOG.warning(
                "topic %s has %d partitions instead of %d: keys move to other partitions, so the order "
                "of an aggregate's messages holds before this change and after it, but not across it",
                *(before.name, after.partitions, before.partitions),
            )
        if after != before:
            self._topics[before.name] = after
            self._has_changed = True

    def _note_outage(self, reason: str) -> None:
        with self._changed:
            now = time.monotonic()
            self._outages, self._outage = self._outages + 1, reason
            self._unanswered_since = min(self._unanswered_since, now)
            for search in self._searches.values():
                search.due = max(search.due, now + _OUTAGE_PAUSE)
            # A caller that still needs the topic asks again.
            for name in [name for name, search in self._searches.items() if not search.reason]:
                del self._searches[name]
            self._new = []
            self._changed.notify_all()
