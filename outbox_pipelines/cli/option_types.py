"""Types of option values that several commands share."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

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


class _Seconds(click.FloatRange):
    """A duration: more than nothing, and not endless."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


SECONDS = _Seconds(0, min_open=True)
