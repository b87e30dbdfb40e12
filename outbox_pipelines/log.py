"""What the commands write on stderr: lines for people, or for machines.

Invariants:
- Configured once, by the command `outbox`; a library that configures logging takes it from its user.
- Whatever is logged, no secret is in it, and of a line for people none of the data steers the terminal.
- A command that fails says why in one plain line, its last, whatever the format.
- What Kafka's client logs by itself shows only at the level debug: what people must know, the relay says.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, TextIO

from outbox_pipelines.secret import redacted
from outbox_pipelines.settings import Settings
from outbox_pipelines.text import plain

_OURS: Final = logging.getLogger("outbox_pipelines")
_KAFKA: Final = logging.getLogger("outbox_pipelines.librdkafka")
# What a command says of its progress: to be seen at any level, and without decoration.
_COMMAND: Final = logging.getLogger("outbox_pipelines.command")
# What every record has; all else came by `extra`.
_USUAL: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


def configure(settings: Settings) -> None:
    """Sends the log to stderr as the settings say; again: as they say now."""
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
    """Tells whoever runs the command how it goes on."""
    _COMMAND.info(message, extra=fields)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr now: whoever runs a command within a test replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        lines = [plain(record.getMessage())]
        if record.exc_info:
            lines += map(plain, self.formatException(record.exc_info).split("\n"))
        message = redacted("\n".join(lines))
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
        if record.exc_info:
            fields["exception"] = redacted(self.formatException(record.exc_info))
        for name, value in vars(record).items():
            if name not in _USUAL:
                fields.setdefault(name, redacted(value) if isinstance(value, str) else value)
        return json.dumps(fields, default=lambda value: redacted(str(value)))


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An error that nobody foresaw, with its stack and without secrets."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))


def _time(record: logging.LogRecord, precision: str) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec=precision).replace("+00:00", "Z")
