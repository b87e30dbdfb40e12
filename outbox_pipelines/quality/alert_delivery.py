"""Sends messages to the addresses of OUTBOX_ALERTS, each separately.

Invariants:
- What an address has not accepted is kept for it alone, and sent again before what is new.
- An address that does not answer delays no other one.
- Addresses contain passwords: they are never shown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from outbox_pipelines.core.secret import redacted
from outbox_pipelines.core.text import message as as_message
from outbox_pipelines.core.text import plain
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.alerts import Message
from outbox_pipelines.settings import CheckSettings

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
