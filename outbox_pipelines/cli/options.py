"""The option `--outbox NAME`, which every command takes; types of option values that several commands share.

Invariants:
- Settings are loaded by the command that runs, not by its groups: its own `--outbox` decides, then those of
  its groups. `--help` and the list of commands need no settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any, Final, TypeVar

import click

from outbox_pipelines.core import log
from outbox_pipelines.outboxes import Outboxes, load_outboxes
from outbox_pipelines.settings import Settings, make_settings

_F = TypeVar("_F", bound=Callable[..., Any])
_NAME: Final = "outbox_pipelines.outbox"
_HELP: Final = "Outbox to use (name from outbox.toml; default: the only one)."


def add_to(
    command: click.Command,
    *,
    excluded: Collection[click.Command],
    many: Collection[click.Command],
    lists: Collection[click.Command],
    without: Mapping[click.Command, str],
) -> None:
    """Add the option to a command, and to the commands below it.

    Args:
        excluded: commands that need no settings, or load their own.
        many: commands that load several outboxes by `chosen`; the name is only recorded.
        lists: commands that take several names, and load the outboxes by `chosen_list`.
        without: commands for which a setting is None, whatever is set.
    """
    if command in excluded:
        return
    is_list = command in lists
    is_recorded = isinstance(command, click.Group) or is_list or command in many
    option = click.Option(
        ["--outbox"],
        metavar="NAME",
        type=TEXT,
        multiple=is_list,
        help=f"{_HELP} May be repeated." if is_list else _HELP,
        callback=_record if is_recorded else partial(_load, without=without.get(command)),
        expose_value=False,
        is_eager=True,
    )
    command.params.append(option)
    if isinstance(command, click.Group):
        for each in command.commands.values():
            add_to(each, excluded=excluded, many=many, lists=lists, without=without)


def chosen(context: click.Context) -> tuple[Outboxes, str | None]:
    """Return the outboxes, and the name that was given with the command; configure the log."""
    outboxes = load_outboxes()
    # If none can be used, the command says why, and the log has nothing to add.
    log.configure(next(iter(outboxes.settings.values()), None) or make_settings())
    return outboxes, context.meta.get(_NAME)


def chosen_list(context: click.Context) -> tuple[Outboxes, list[str]]:
    """Return the outboxes, and the names that were given with the command; configure the log."""
    outboxes, _ = chosen(context)
    given = context.meta.get(_NAME) or ()
    # A group's own option has one name.
    names: Sequence[str] = [given] if isinstance(given, str) else given
    return outboxes, list(dict.fromkeys(names))


def settings_of(context: click.Context, *, without: str | None = None) -> Settings:
    """Return the settings of the chosen outbox, and configure the log.

    Raises:
        SetupError: settings are wrong, or one of several outboxes must be chosen.
    """
    settings = load_outboxes(**({without: {}} if without else {})).get(context.meta.get(_NAME))
    log.configure(settings)
    return settings


def _record(context: click.Context, _: click.Parameter, name: Any) -> None:
    if name:
        context.meta[_NAME] = name


def _load(
    context: click.Context, parameter: click.Parameter, name: str | None, *, without: str | None
) -> None:
    _record(context, parameter, name)
    if not context.resilient_parsing:
        context.obj = settings_of(context, without=without)


class _Text(click.ParamType):  # type: ignore[type-arg]
    """A text that is not empty: the empty variable of a script must not select everything."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip():
            self.fail("the text is empty: give one, or leave the option out", param, ctx)
        return value


TEXT = _Text()


class _Day(click.ParamType):  # type: ignore[type-arg]
    """A UTC day, such as 2026-11-21."""

    name = "day"

    def convert(self, value: str | date, param: click.Parameter | None, ctx: click.Context | None) -> date:
        if isinstance(value, date):
            return value
        try:
            return date.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a day: write a date such as 2026-11-21", param, ctx)


DAY = _Day()


class _Seconds(click.FloatRange):
    """A duration: more than nothing, and not endless."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


SECONDS = _Seconds(0, min_open=True)


def seconds_option(text: str) -> Callable[[_F], _F]:
    """Return the option `--wait-seconds` of a command that waits a minute at most by default."""
    return click.option("--wait-seconds", "seconds", type=SECONDS, default=60.0, show_default=True, help=text)
