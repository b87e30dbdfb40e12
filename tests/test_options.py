"""The types of option values, in all commands."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from outbox_pipelines.cli.main import cli


def _numbers(command: click.Command, name: str) -> Iterator[tuple[str, click.Parameter]]:
    """Yield each parameter that is a number with a fraction, with the name of its command."""
    for parameter in command.params:
        if isinstance(parameter.type, click.types.FloatParamType):
            yield name, parameter
    if isinstance(command, click.Group):
        for each, below in command.commands.items():
            yield from _numbers(below, f"{name} {each}")


_FOUND = dict(_numbers(cli, "outbox"))


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
@pytest.mark.parametrize("name", [*_FOUND])
def test_a_duration_is_positive_and_finite(name: str, value: str) -> None:
    """Guards against a command that waits without end: no time is later than a deadline of nan."""
    parameter = _FOUND[name]
    with pytest.raises(click.BadParameter):
        parameter.type.convert(value, parameter, None)


def test_the_durations_are_found() -> None:
    """Guards against a test of no option at all."""
    assert {"outbox shards set", "outbox cdc setup", "outbox adopt switch"} <= _FOUND.keys()
