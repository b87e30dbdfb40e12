"""The log that the commands write to stderr, as text for people or as JSON; and lines that an outage repeats.

Invariants:
- Only the command `outbox` configures logging; a library must leave that to the application.
- No log line contains a secret, and no data in a text line can control the terminal.
- A command that fails prints the reason as one plain line, its last, in either format.
- A repeated line is limited by the code that logs it: each kind is logged once, then as a count each minute,
  until its end, which is logged only if its line was.
- The log of the Kafka client is shown only at level debug: the relay logs what operators need to know.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Final, Protocol, TextIO

from outbox_pipelines.core.secret import redacted
from outbox_pipelines.core.text import plain

outbox: Final[ContextVar[str]] = ContextVar("outbox", default="")
"""The outbox that this thread works for, if the process has several."""
_OURS: Final = logging.getLogger("outbox_pipelines")
_KAFKA: Final = logging.getLogger("outbox_pipelines.librdkafka")
# Progress of a command: shown at any level, without time and level.
_COMMAND: Final = logging.getLogger("outbox_pipelines.command")
# Attributes that every record has; all others were passed as `extra`.
_USUAL: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class LogSettings(Protocol):
    """What the log needs of the settings."""

    @property
    def log_format(self) -> str: ...
    @property
    def log_level(self) -> str: ...


def configure(settings: LogSettings) -> None:
    """Send the log to stderr as the settings say; a second call applies new settings."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Stderr)]:
        root.removeHandler(handler)
    handler = _Stderr()
    handler.setFormatter(_Json() if settings.log_format == "json" else _Text())
    root.addHandler(handler)
    _OURS.setLevel(settings.log_level.upper())
    _COMMAND.setLevel(logging.INFO)
    sys.excepthook = _uncaught
    _KAFKA.propagate = settings.log_level == "debug"


def say(message: str, **fields: object) -> None:
    """Print a line about the command's progress."""
    _COMMAND.info(message, extra=fields)


def inherit(body: Callable[[], None]) -> Callable[[], None]:
    """Return the body of a thread, for the outbox of the thread that starts it."""
    return partial(copy_context().run, body)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current stderr: tests replace it while a command runs."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        lines = [plain(record.getMessage())]
        if record.exc_info:
            lines += map(plain, self.formatException(record.exc_info).split("\n"))
        message = redacted("\n".join(lines))
        if name := outbox.get():
            message = f"{name}: {message}"
        if record.name == _COMMAND.name:
            return message
        return f"{_time(record, 'milliseconds')} {record.levelname.lower()}: {message}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _time(record, "microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        if name := outbox.get():
            fields["outbox"] = name
        if record.exc_info:
            fields["exception"] = redacted(self.formatException(record.exc_info))
        for key, value in vars(record).items():
            if key not in _USUAL:
                fields.setdefault(key, redacted(value) if isinstance(value, str) else value)
        return json.dumps(fields, default=lambda value: redacted(str(value)))


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected error with its stack and without secrets."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))


def _time(record: logging.LogRecord, precision: str) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec=precision).replace("+00:00", "Z")


_COUNT_SECONDS: Final = 60.0
# A kind can come from outside, such as an error's text: the oldest ones are forgotten.
_MOST_KINDS: Final = 100


@dataclass(slots=True)
class _Line:
    began: float
    logged: float
    repeated: int = 0
    """Since it was logged last."""


class RepeatedLines:
    """The repeated lines of one logger; can be used by several threads.

    A kind is whatever stays the same while the text of a line differs: an error's code, a topic.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lines: dict[Hashable, _Line] = {}
        self._lock = threading.Lock()

    def __contains__(self, kind: Hashable) -> bool:
        """Return whether a line of this kind was logged and has not ended."""
        return kind in self._lines

    def log(
        self,
        kind: Hashable,
        message: str,
        *given: object,
        level: int = logging.WARNING,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Log a line unless one of its kind was logged within the last minute.

        Args:
            given: what the message has placeholders for.
            extra: fields of the line.
        """
        now = time.monotonic()
        with self._lock:
            line = self._lines.get(kind)
            if line is None:
                while len(self._lines) >= _MOST_KINDS:
                    self._lines.pop(next(iter(self._lines)))
                self._lines[kind] = _Line(now, now)
            elif now - line.logged < _COUNT_SECONDS:
                line.repeated += 1
                return
            else:
                message += " (%d times in %.0f s)"
                given = (*given, line.repeated + 1, now - line.logged)
                line.logged, line.repeated = now, 0
        self._logger.log(level, message, *given, extra=extra)

    def end(self, kind: Hashable, message: str, *given: object) -> None:
        """Log that what the lines of a kind report has ended, if there were any, and after how long."""
        if kind not in self._lines:
            return
        with self._lock:
            line = self._lines.pop(kind, None)
        if line is not None:
            self._logger.warning(message + " after %.1f s", *given, time.monotonic() - line.began)
