"""A command in this process answers as in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest

from tests.conftest import Outbox, clean_environment, command


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("migrate", "--check"), {}),
        # Nothing matched; usage; a setting; a question that has no answer; a command that is none.
        (("dead-letters", "show", "0192aaaa-0000-7000-8000-000000000000"), {}),
        (("shards", "set", "many"), {}),
        (("status",), {"OUTBOX_LEASE_SECONDS": "soon"}),
        *(
            pytest.param(words, {}, marks=pytest.mark.extended)
            for words in (
                ("partitions", "reopen", "2026-01-01"),
                ("raley",),
                # It loads its own settings.
                ("table", "check"),
                ("table", "describe", "none"),
            )
        ),
    ],
)
def test_it_answers_the_same(outbox: Outbox, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    """Guards against a shortcut that hides what a user would see."""
    here = outbox.outbox(*arguments, **environment)
    given = clean_environment() | outbox.environment | environment
    apart = subprocess.run(command(*arguments), env=given, capture_output=True, text=True, timeout=600)
    assert (here.returncode, here.stdout, here.stderr) == (apart.returncode, apart.stdout, apart.stderr)


def test_an_unexpected_error_ends_it_as_in_a_process(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error that a test takes for success."""
    from outbox_pipelines.relay import append_only

    def fails(_: object) -> None:
        raise ValueError("not thought of")

    monkeypatch.setattr(append_only, "measure", fails)
    done = outbox.outbox("status")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: not thought of")


def test_nothing_of_it_stays(outbox: Outbox) -> None:
    """Guards against a test that sees the settings, handlers or log of the one before."""

    def state() -> list[object]:
        handlers = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
        names = ("outbox_pipelines", "outbox_pipelines.command", "outbox_pipelines.librdkafka")
        levels = [(logging.getLogger(name).level, logging.getLogger(name).propagate) for name in names]
        streams = [sys.stdin, sys.stdout, sys.stderr, sys.argv, sys.excepthook]
        return [dict(os.environ), handlers, levels, list(logging.getLogger().handlers), streams]

    before = state()
    given = {"OUTBOX_LOG_LEVEL": "debug", "OUTBOX_LOG_FORMAT": "json"}
    assert outbox.outbox("relay", "--until-empty", **given).returncode == 0
    assert state() == before
