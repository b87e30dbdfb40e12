"""Types of option values that several commands share."""

from __future__ import annotations

from datetime import date

import click


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
