"""Every fenced block of the pages is tested, or named here with the reason why not.

Invariants:
- Commands and settings are checked here, and run in test_page_commands.py. All other blocks are counted with
  the file that tests them, or named.
- So a new block fails until it has a test or a reason.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import Counter
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from outbox_pipelines.cli.main import cli
from tests.deploy.files import check_command, check_settings
from tests.docs.blocks import OTHERS, OURS, PAGES, ROOT, Block, blocks, program, simple

_MAKE_DOCS: Final = frozenset({"{eval-rst}", "mermaid"})
"""What `make docs` reads."""
TESTED: Final[dict[tuple[str, str], tuple[int, str]]] = {
    ("README.md", "python"): (2, "tests/test_readme.py"),
    ("CONTRIBUTING.md", "diff"): (4, "tests/docs/test_contributing.py"),
    ("docs/adopt.md", "python"): (2, "tests/existing/adopt/test_migrations.py"),
    ("docs/api-writer.md", "python"): (1, "tests/docs/test_api.py"),
    ("docs/catalog.md", "python"): (2, "tests/catalog/test_docs.py"),
    ("docs/catalog.md", "yaml"): (1, "tests/catalog/test_docs.py"),
    ("docs/consuming-failures.md", "python"): (1, "tests/consumer/test_guide.py"),
    ("docs/consuming-tuning.md", "python"): (3, "tests/consumer/test_guide.py"),
    ("docs/consuming.md", "python"): (5, "tests/consumer/test_guide.py"),
    ("docs/dagster.md", "python"): (4, "tests/defs/test_downstream.py"),
    ("docs/dagster.md", "yaml"): (1, "tests/defs/test_component.py"),
    ("docs/days.md", "python"): (1, "tests/defs/test_downstream.py"),
    ("docs/days.md", "sql"): (1, "tests/docs/test_page_commands.py"),
    ("docs/deploy.md", "sql"): (3, "tests/deploy/test_rights.py"),
    ("docs/deploy.md", "toml"): (1, "tests/deploy/test_rights.py"),
    ("docs/erasure.md", "python"): (1, "tests/docs/test_page_commands.py"),
    ("docs/existing-tables.md", "sql"): (5, "tests/existing/libraries.py"),
    ("docs/lint-writes.md", "python"): (4, "tests/lint/test_docs.py"),
    ("docs/lint-writes.md", "yaml"): (1, "tests/lint/test_docs.py"),
    ("docs/maintenance.md", "yaml"): (3, "tests/quality/test_operating.py"),
    ("docs/metrics.md", "python"): (1, "tests/consumer/test_metrics.py"),
    ("docs/metrics.md", "text"): (2, "tests/quality/test_operating.py"),
    ("docs/outboxes.md", "python"): (2, "tests/docs/test_page_commands.py"),
    ("docs/queries.md", "python"): (2, "tests/days/archive/test_queries_doc.py"),
    ("docs/queries.md", "sql"): (1, "tests/days/archive/test_queries_doc.py"),
    ("docs/queries.md", "text"): (3, "tests/days/archive/test_queries_doc.py"),
    ("docs/tutorial.md", "python"): (3, "tests/docs/test_tutorial.py"),
    ("docs/writing-events.md", "python"): (13, "tests/guide/test_writing_events.py"),
    ("docs/writing-events.md", "sql"): (1, "tests/guide/test_writing_events.py"),
}
"""By page and language: how many blocks the test of this file runs."""
NAMED: Final = {
    ("README.md", "Verified: nothing missing"): "tests/test_readme.py",
    ("README.md", " your application"): "a picture",
    ("CONTRIBUTING.md", "package "): "an example of a table of measurements",
    ("CONTRIBUTING.md", "def test_seq_is_a_header"): "needs the change that the diffs behind it make",
    ("docs/architecture.md", " business transaction"): "tests/docs/test_way_of_an_event.py",
    ("docs/catalog.md", "outbox: OUTBOX_CATALOG_FILE"): "tests/catalog/test_docs.py",
    ("docs/catalog.md", "event type      events"): "tests/catalog/test_docs.py",
    ("docs/catalog.md", "event type    change"): "tests/catalog/test_changes.py",
    ("docs/catalog.md", "    version: 2"): "tests/catalog/test_document.py",
    ("docs/catalog.md", "order.placed: payload"): "tests/catalog/test_docs.py",
    ("docs/consuming-tuning.md", "consumer.receive()"): "tests/consumer/test_inbox.py",
    ("docs/dapr.md", "apiVersion"): "needs Dapr: tests/interop/test_dapr_subscriber.py has its own files",
    ("docs/days.md", "events/event_date"): "names of files",
    (
        "docs/debezium-on-connect.md",
        "# Where the database",
    ): "needs Kafka Connect: tests/interop/connect_workers.py",
    (
        "docs/debezium-on-connect.md",
        "CREATE PUBLICATION",
    ): "needs Kafka Connect: tests/interop/connect_rest.py",
    ("docs/deploy.md", "map "): "needs nginx",
    ("docs/erasure.md", "    protected"): "tests/catalog/test_protected_members.py",
    ("docs/existing-tables.md", "error: app.outbox"): "tests/existing/test_mapping.py",
    ("docs/operating.md", "WARN "): "tests/quality/test_operating.py",
    ("docs/operating.md", "ERROR "): "tests/quality/test_operating.py",
    ("docs/outboxes.md", "OUTBOX   STATUS"): "tests/outboxes/test_commands.py",
    ("docs/queries.md", "pyiceberg"): "needs each engine: tests/interop/test_iceberg_readers.py",
    ("docs/queries.md", "Trino"): "needs each engine",
    ("docs/reconciliation.md", "2026-11-20: 48,212"): "tests/reconciliation/test_doc.py",
}
"""By page and beginning: which file tests it, or why none does."""
_TARGETS: Final = set(re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[0].split())
_EXTRAS: Final = {
    *tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"],
}
_VALUE: Final = re.compile(r"\$\((?:'[^']*'|[^()'])*\)|\$[A-Z]+\b")
ALL: Final = [block for page in PAGES for block in blocks(page)]
# deploy.md has grants: tests/deploy/test_rights.py.
SETTINGS: Final = [block for block in ALL if block.language == "toml" and block.page != "docs/deploy.md"]
COMMANDS: Final = [block for block in ALL if not block.language and block.lines]


def _id(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_tested_or_named(page: str) -> None:
    """Guards against an example that nobody has ever run."""
    unknown: Counter[str] = Counter()
    for block in blocks(page):
        is_named = any(page == of and block.text.startswith(begins) for of, begins in NAMED)
        if not (is_named or block in [*COMMANDS, *SETTINGS] or block.language in _MAKE_DOCS):
            unknown[block.language] += 1
            assert block.language, f"{_id(block)}: name it in NAMED, or begin it with a command"
    assert unknown == {language: count for (of, language), (count, _) in TESTED.items() if of == page}


def test_what_is_named_exists() -> None:
    """Guards against an entry for a block that is gone, and for a test that was moved."""
    for page, begins in NAMED:
        assert any(block.text.startswith(begins) for block in blocks(page)), (page, begins)
    reasons = [*NAMED.values(), *(path for _, path in TESTED.values())]
    paths = {path for reason in reasons for path in re.findall(r"tests/[\w/.]+", reason)}
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("block", COMMANDS, ids=_id)
def test_its_commands_exist(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a command, an option, a setting, an extra or a target that has another name by now."""
    monkeypatch.chdir(tmp_path)
    # Files that an option reads.
    for name in re.findall(r" (\w+\.\w+)", block.text):
        Path(name).touch()
    for line in block.lines:
        for each in [*re.findall(r"\$\((outbox [^)]*)\)", line), _VALUE.sub("2026-11-20", line)]:
            for words in simple(each):
                _check(words)


def _check(words: list[str]) -> None:
    check_settings({word.partition("=")[0] for word in words if re.match(r"OUTBOX_[A-Z_]+=", word)})
    typed = [*dropwhile(lambda word: re.match(r"export$|[A-Z_]+=", word), words)]
    # `systemd-run … /opt/outbox/venv/bin/outbox migrate` has one of ours.
    ours = [n for n, word in enumerate(typed) if program(word) in OURS and (n == 0 or "/bin/" in word)]
    if ours:
        given = takewhile(lambda word: word not in (">", ">>", "--"), typed[ours[0] :])
        check_command([word.removesuffix("…") or "x" for word in given], is_whole=True)
    elif typed:
        assert program(typed[0]) in OTHERS, words
        assert typed[0] != "make" or typed[1] in _TARGETS, words
        if typed[:2] == ["pip", "install"]:
            assert {*re.findall(r"\w+", "".join(re.findall(r"\[(.*)\]", " ".join(typed))))} <= _EXTRAS, words


@pytest.mark.parametrize("block", SETTINGS, ids=_id)
def test_a_file_of_settings_has_no_mistake(block: Block, tmp_path: Path) -> None:
    """Guards against an entry that was renamed, and a value that is refused."""
    file, secret = tmp_path / "outbox.toml", tmp_path / "secret"
    secret.write_text("dbname=billing")
    file.write_text(re.sub('"/run/secrets/\\w+"', f'"{secret}"', block.text))
    names = dict.fromkeys(["OUTBOX_DSN", *re.findall(r'env = "(\w+)"', block.text)], "dbname=shop")
    none = {name: None for name in os.environ if name.startswith("OUTBOX_")}
    done = CliRunner().invoke(cli, ["config", "check"], env={**none, **names, "OUTBOX_CONFIG": str(file)})
    assert (done.exit_code, done.output.rpartition(", ")[2]) == (0, "no mistake\n"), done.output
