"""What is to be said about problems: one message when a problem begins, and one when it is resolved.

Invariants:
- The caller keeps what was sent, so that a restart sends nothing twice.
- A problem is reported after it has lasted for a while, and resolved after it has been absent for as long.
- A problem that comes and goes is reported the third time, and resolved after a longer absence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

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
