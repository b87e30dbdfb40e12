"""Texts for users have plain words, and one for each thing: see docs/glossary.md."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
import yaml

from outbox_pipelines.cli.main import cli
from outbox_pipelines.settings import Settings

ROOT: Final = Path(__file__).parents[2]
# A retired word, as a pattern, and what to write instead.
WORDS: Final = {
    r"anew": "again",
    r"anybody|no one|nobody": "name the role, the process or the user",
    r"somebody|someone else|whoever": "name the role, the process or the user",
    r"at hand": "available",
    r"besides": "in addition",
    r"by (?:itself|themselves)": "automatically",
    r"(?<!thing )(?<!where )else(?=[,;:.]|$)": "otherwise",
    r"told": "reported, notified",
    r"says? of": "reports about",
    r"stands? in": "is in, is recorded in",
    r"mend(?:s|ed|ing)?": "correct, fix, restore",
    r"meanwhile": "until then",
    r"on (?:its|their) way": "in flight",
    r"(?:go|goes|went|going) out": "is published",
    r"(?:give|gives|gave|given|giving) up": "becomes a dead letter; is abandoned; stops",
    r"(?:put|puts|set) aside": "parked, kept",
    r"as (?:it|they) should be": "correct",
    r"for ?ever": "permanently",
    r"(?:is|are) so": "repeat the condition",
    r"no entry": "cannot connect",
    r"(?:find|finds|is|are) away": "unavailable",
    r"(?:is|are) gone": "does not exist, has ended",
    r"catalogues?": "event catalog",
    r"goes? on": "continues",
    r"passed over": "skipped",
    r"under way": "in progress",
    r"dies|died|deaths?": "crashes, crashed",
}
PATTERN: Final = re.compile("|".join(rf"(\b(?:{word})\b)" for word in WORDS), re.IGNORECASE)
# Retired in the code, too: in docstrings, comments and names.
IN_CODE: Final = {
    r"look(?:s|ed|ing)?[ _]after": "advance, schedule",
    r"hear_news|deal_with|(?:is_)?dealt_with": "refresh, settle",
    r"under way": "in progress",
    r"(?:on|of)_death|death_pause|died of|died_alone": "crash",
    r"that went|go(?:es)? like": "published",
    r"stand-still": "all work has stopped",
    r"who has lost": "a relay that lost",
    r"to blame": "the cause",
    r"on[ _]their[ _]way": "in flight; still parked",
    r"(?:is|are|was|be)[ _]away|_away": "unavailable",
    r"_aside(?:_\w+)?": "parked",
}
CODE_PATTERN: Final = re.compile(
    "|".join(rf"((?<![A-Za-z])(?:{word})(?![A-Za-z]))" for word in IN_CODE), re.IGNORECASE
)
# Texts in which such a word is a name: a user of the system, a step of an SQL function.
NAMES: Final = {"nobody", "given up"}


def found(place: str, text: str) -> list[str]:
    """A line for each retired word in a text."""
    return [
        f"{place}: {match[0]!r}: write {list(WORDS.values())[(match.lastindex or 1) - 1]}"
        for match in PATTERN.finditer(re.sub(r"`[^`]*`", "`", text))
    ]


def prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines of a page with their numbers, without blocks of code and addresses of links."""
    is_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"\]\([^)]*\)", "]", line)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The texts in a module with their lines, without docstrings and names."""
    tree = ast.parse(source)
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documents
            and node.value not in NAMES
        ):
            yield from enumerate(node.value.splitlines(), node.lineno)


def helps(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """What `--help` prints of a command and those under it."""
    yield f"{path} --help", command.help or ""
    yield from (
        (f"{path} --help, {option.name}", option.help or "")
        for option in command.params
        if isinstance(option, click.Option)
    )
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from helps(each, f"{path} {name}")


def test_pages() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    assert len(pages) > 20
    assert [
        word
        for page in pages
        for number, line in prose(page.read_text())
        for word in found(f"{page.relative_to(ROOT)}:{number}", line)
    ] == []


def test_messages() -> None:
    """Errors, logs, metrics, checks and what Dagster shows. Modules of SQL have no texts for users."""
    files = (ROOT / "outbox_pipelines").rglob("*.py")
    modules = [path for path in files if not path.name.endswith(("queries.py", "_sql.py"))]
    assert len(modules) > 200
    assert [
        word
        for path in modules
        for number, text in messages(path.read_text())
        for word in found(f"{path.relative_to(ROOT)}:{number}", text)
    ] == []


def test_code() -> None:
    """Guards against retired words that return in docstrings, comments and names."""
    assert all(map(CODE_PATTERN.search, ("# Who has lost it, looks after it.", "def _look_after(self):")))
    assert [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: {[*IN_CODE.values()][(match.lastindex or 1) - 1]}"
        for path in (ROOT / "outbox_pipelines").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in CODE_PATTERN.finditer(line)
    ] == []


def test_help_and_settings() -> None:
    texts = [*helps(cli, "outbox")]
    assert len(texts) > 150
    settings = [
        (f"OUTBOX_{name.upper()}", each.description or "") for name, each in Settings.model_fields.items()
    ]
    assert all(text for _, text in settings)
    assert [word for place, text in [*texts, *settings] for word in found(place, text)] == []


def test_alerts_and_dashboards() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    annotations = [
        (f"rules.yml, {rule['alert']}", " ".join(rule["annotations"].values()))
        for group in rules["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(annotations) > 10
    dashboard = json.loads((ROOT / "deploy/grafana/outbox.json").read_text())
    panels = [
        ("outbox.json", f"{panel['title']}: {panel.get('description', '')}") for panel in dashboard["panels"]
    ]
    assert [word for place, text in [*annotations, *panels] for word in found(place, text)] == []


@pytest.mark.parametrize(
    "text", ["Kafka is gone.", "It was Told so", "publish it, else: wait", "the relay died 3 times"]
)
def test_a_retired_word_is_found(text: str) -> None:
    """Guards against a pattern that finds nothing."""
    assert len(found("here", text)) == 1
    assert found("here", f"`{text}`, nothing else, `is gone`") == []
