"""Alerts: one message when a problem begins, one when it is resolved; sent to each address of OUTBOX_ALERTS.

Invariants:
- The caller keeps what was sent, so that a restart sends nothing twice.
- A problem is reported after it has lasted for a while, and resolved after it has been absent for as long.
- A problem that comes and goes is reported the third time, and resolved after a longer absence.
- What an address has not accepted is kept for it alone, and sent again before what is new. An address that
  does not answer delays no other one.
- Addresses contain passwords: they are never shown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from outbox_pipelines.core.secret import redacted
from outbox_pipelines.core.text import message as as_message
from outbox_pipelines.core.text import plain
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.rules import CheckResult, Status, chapter
from outbox_pipelines.settings import CheckSettings, OutboxSettings

# A problem that comes this often, each time within `_PATIENCE` times the delay of a message, is one problem.
_TIMES: Final = 3
_PATIENCE: Final = 10


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a person must act on."""

    key: str
    """Its name, always the same; short enough for a title."""
    text: str
    help: str
    """The command, or the address of Dagster's page, to resolve it."""


@dataclass(frozen=True, slots=True)
class Message:
    """A notification."""

    title: str
    body: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class Known:
    """A problem between two calls; times are Unix times."""

    text: str
    since: float
    """When it came, the last time."""
    is_reported: bool = False
    gone_at: float | None = None
    times: int = 1
    """How often it has come."""


def of_results(
    settings: CheckSettings, results: Iterable[CheckResult], asset: str = "outbox/health"
) -> list[Problem]:
    """Return the problems among these results: errors, not warnings.

    Args:
        asset: the path of Dagster's page with the checks, as `outbox/health`.
    """
    link = f"; {settings.ui_url.rstrip('/')}/assets/{asset}?view=checks" if settings.ui_url else ""
    return [
        Problem(
            result.rule.name,
            result.text,
            f"{result.rule.help} ({chapter(settings, result.rule.name)}){link}",
        )
        for result in results
        if result.status is Status.ERROR
    ]


def news(
    known: Mapping[str, Known], problems: Iterable[Problem], *, now: float, after: float, where: str
) -> tuple[list[Message], dict[str, Known]]:
    """Return what to send now, and what to keep once it is sent.

    Args:
        known: what the last call returned to keep.
        after: seconds that a problem must last, or be absent, before it is reported.
        where: names the outbox, for people who have several.
    """
    messages: list[Message] = []
    remembered: dict[str, Known] = {}
    present = {problem.key: problem for problem in problems}
    for problem in present.values():
        one = replace(known.get(problem.key) or Known("", now), text=problem.text)
        if one.gone_at is not None:
            one = replace(one, since=now, gone_at=None, times=one.times + 1)
        if not one.is_reported and (now - one.since >= after or one.times >= _TIMES):
            one = replace(one, is_reported=True)
            messages.append(Message(f"{where}: {problem.key}", f"{problem.text}\n→ {problem.help}", False))
        remembered[problem.key] = one
    for key, one in known.items():
        if key in present:
            continue
        gone_at = now if one.gone_at is None else one.gone_at
        is_calm = one.is_reported and one.times < _TIMES
        if now - gone_at < (after if is_calm else _PATIENCE * after):
            remembered[key] = replace(one, gone_at=gone_at)
        elif one.is_reported:
            messages.append(Message(f"{where}: {key} resolved", f"It was: {one.text}", True))
    return messages, remembered


def where(settings: OutboxSettings) -> str:
    """Return the name of the outbox for people: the database and its host, without a password."""
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(settings.require_dsn())
    schema = "" if settings.db_schema == "public" else f", schema {settings.db_schema}"
    name = "outbox" if settings.name == "outbox" else f"outbox {settings.name}"
    return (
        f"{name} in {given.get('dbname', 'the default database')} at {given.get('host', 'this host')}{schema}"
    )


def to_json(known: Mapping[str, Known]) -> dict[str, dict[str, Any]]:
    """Return what `news` returned to keep, for JSON."""
    return {key: asdict(one) for key, one in known.items()}


def from_json(kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Known]:
    """Return it from JSON."""
    return {key: Known(**one) for key, one in kept.items()}


# Dagster abandons a tick after 60 s, and one message to a mail server that is silent takes 15.
_SECONDS: Final = 20.0
# Of an address that has been down for long, the newest.
_MOST_KEPT: Final = 50
_MOST_CHARACTERS: Final = 300
# Apprise works in threads of its own, and passes the context on.
_SAID: Final[ContextVar[list[str]]] = ContextVar("said")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the messages to one address."""

    address: str
    """Without its secrets."""
    unsent: tuple[Message, ...]
    why: str
    """Why the first of them was not accepted, as far as that is known."""


def send(
    settings: CheckSettings, messages: Sequence[Message], kept: Mapping[str, Sequence[Message]] | None = None
) -> list[Outcome]:
    """Send messages to every address of OUTBOX_ALERTS.

    Args:
        kept: what was unsent before, by address.

    Raises:
        SetupError: there is no address, or apprise does not understand one.
    """
    receivers = channels(settings)
    until = time.monotonic() + _SECONDS

    def sent(channel: tuple[str, Any]) -> Outcome:
        shown, receiver = channel
        waiting = [*(kept or {}).get(shown, ()), *messages][-_MOST_KEPT:]
        said: list[str] = []
        _SAID.set(said)
        for number, message in enumerate(waiting):
            if time.monotonic() > until:
                return Outcome(shown, tuple(waiting[number:]), f"it took more than {_SECONDS:.0f} s")
            if not _accepts(receiver, message):
                why = plain(redacted("; ".join(dict.fromkeys(said))))
                return Outcome(shown, tuple(waiting[number:]), why[:_MOST_CHARACTERS])
        return Outcome(shown, (), "")

    with _TAKEN, ThreadPoolExecutor(len(receivers), "outbox-alerts") as threads:
        return list(threads.map(sent, receivers))


def _accepts(receiver: Any, message: Message) -> bool:
    import apprise

    kind = apprise.NotifyType.SUCCESS if message.is_over else apprise.NotifyType.FAILURE
    # As text: an error must not become markup in a mail.
    given = {"title": as_message(message.title), "body": "\n".join(map(as_message, message.body.split("\n")))}
    return bool(receiver.notify(**given, notify_type=kind, body_format=apprise.NotifyFormat.TEXT))


def channels(settings: CheckSettings) -> list[tuple[str, Any]]:
    """Return the addresses without their secrets, each with apprise's object for it.

    Raises:
        SetupError: there is no address, or apprise does not understand one.
    """
    import apprise

    given = settings.alerts.reveal().split()
    if not given:
        raise SetupError(
            "no addresses for notifications: set OUTBOX_ALERTS to one or more addresses of apprise"
        )
    found, wrong = [], []
    for number, address in enumerate(given, 1):
        with _TAKEN:
            receiver = apprise.Apprise()
            understood = receiver.add(address)
        if not understood:
            wrong.append(f"address {number}")
        found.append((f"address {number} ({address.partition('://')[0]}://…)", receiver))
    if wrong:
        raise SetupError(
            f"OUTBOX_ALERTS: apprise does not understand {', '.join(wrong)} of {len(given)}: write for "
            "example mailto://user:password@example.com or slack://…, separated by spaces"
        )
    return found


class _Heard(logging.Handler):
    """Keeps apprise's warnings and the errors behind them, for the address that is being sent to."""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage().strip()
        if record.levelno >= logging.WARNING or "Exception: " in line:
            _SAID.get([]).append(line.partition("Exception: ")[2] or line)


class _Taken:
    """While messages are sent, apprise's log lines, which may contain an address, stay out of other logs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = (logging.NOTSET, True)
        self._heard = _Heard(logging.DEBUG)

    def __enter__(self) -> None:
        logger = logging.getLogger("apprise")
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = logger.level, logger.propagate
                logger.addHandler(self._heard)
                logger.setLevel(logging.DEBUG)
                logger.propagate = False

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("apprise")
        with self._lock:
            self._users -= 1
            if not self._users:
                level, logger.propagate = self._before
                logger.setLevel(level)
                logger.removeHandler(self._heard)


_TAKEN: Final = _Taken()
