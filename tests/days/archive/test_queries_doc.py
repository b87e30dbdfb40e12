"""docs/queries.md: every question is asked, and answered as it says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from outbox_pipelines.cli.main import cli

PATH = Path(__file__).parents[3] / "docs" / "queries.md"
_QUESTION = re.compile(r"^```(sql|python)\n(.*?)^```\n^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Question(NamedTuple):
    """A query or a program, and what it prints."""

    line: int
    language: str
    source: str
    answer: list[str]


def _questions() -> list[Question]:
    text = PATH.read_text()
    return [
        Question(text.count("\n", 0, found.start()) + 1, found[1], found[2], found[3].splitlines())
        for found in _QUESTION.finditer(text)
    ]


QUESTIONS = _questions()


# Fifteen seconds for the archive; what a query answers is tested in test_query.py.
@pytest.mark.extended
@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: f"line {asked.line}")
def test_answers(flights_archive: Path, asked: Question, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a page of queries that fail, or whose answers are not those of the archive."""
    if asked.language == "sql":
        none: dict[str, str | None] = {name: None for name in os.environ if name.startswith("OUTBOX_")}
        environment = {**none, "OUTBOX_ARCHIVE": str(flights_archive)}
        printed = CliRunner().invoke(cli, ["archive", "query", asked.source], env=environment).output
    else:
        exec(compile(asked.source, PATH, "exec"), {"url": str(flights_archive)})
        printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == asked.answer


def test_all_questions_are_found() -> None:
    """Guards against answers that are not compared, because a block is written differently."""
    text = PATH.read_text()
    assert len(QUESTIONS) == 3
    assert len(re.findall(r"^```(?:sql|python|text)$", text, re.MULTILINE)) == 6
