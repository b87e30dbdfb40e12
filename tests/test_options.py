"""The types of option values, in all commands."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from outbox_pipelines.cli.main import cli
from outbox_pipelines.cli.options import TEXT


def _parameters(command: click.Command, name: str) -> Iterator[tuple[str, click.Parameter]]:
    """Yield each parameter of a command and of those below it, with the name of its command."""
    for parameter in command.params:
        yield name, parameter
    if isinstance(command, click.Group):
        for each, below in command.commands.items():
            yield from _parameters(below, f"{name} {each}")


_ALL = list(_parameters(cli, "outbox"))
_FOUND = {name: each for name, each in _ALL if isinstance(each.type, click.types.FloatParamType)}
# What an empty text means, where it is not refused.
_MAY_BE_EMPTY = {
    "outbox debezium config --password": "a role without one",
    "outbox lint-writes --exclude": "nothing is excluded",
}


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


def test_an_empty_text_is_refused() -> None:
    """Guards against the empty variable of a script that selects everything."""
    texts = {
        f"{name} {each.opts[0]}": each
        for name, each in _ALL
        if isinstance(each, click.Option) and not each.is_flag
    }
    plain = {name for name, each in texts.items() if isinstance(each.type, click.types.StringParamType)}
    assert plain == _MAY_BE_EMPTY.keys()
    refusing = {name: each for name, each in texts.items() if each.type is TEXT}
    assert {
        f"outbox {group}dead-letters {command} {option}"
        for group, command, option in [
            ("", "replay", "--error"),
            ("", "discard", "--aggregate-id"),
            ("", "list", "--event-type"),
            ("consumer ", "replay", "--source"),
        ]
    } <= refusing.keys()
    for parameter in refusing.values():
        for value in ("", " "):
            with pytest.raises(click.BadParameter, match="the text is empty"):
                parameter.type.convert(value, parameter, None)
