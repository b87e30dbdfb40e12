"""docs/reconciliation.md says what there is: every entry of the file, every finding and how bad it is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from outbox_pipelines.config.consumers import _ENTRIES, read_consumers
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.reconciliation import report
from outbox_pipelines.reconciliation.report import FindingKind

DOC = (Path(__file__).parents[2] / "docs" / "reconciliation.md").read_text()
WORDS = {Status.OK: "", Status.WARN: "warning", Status.ERROR: "error"}


def test_the_file_that_it_shows_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BILLING_READER", "postgresql://reader@db/billing")
    shown = DOC.partition("```toml\n")[2].partition("```")[0]
    consumers = read_consumers(tomllib.loads(shown)["consumers"])
    assert list(consumers) == ["billing", "shipping"]
    assert (consumers["billing"].source, consumers["billing"].group) == ("billing", "billing")
    assert set(re.findall(r"^(\w+) =", shown, re.MULTILINE)) == set(_ENTRIES)


@pytest.mark.parametrize(
    ("chapter", "kinds"),
    [
        ("## What it finds in the topics", report._OF_TOPICS),
        ("## What it finds at a consumer", report._OF_CONSUMER),
    ],
)
def test_each_finding_is_in_its_table(chapter: str, kinds: tuple[FindingKind, ...]) -> None:
    table = DOC.partition(chapter)[2].partition("\n## ")[0]
    said = {
        name: status.strip()
        for names, status in re.findall(r"^\| (`[^|]*) \| ([^|]*)\|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert said == {kind.name: WORDS[kind.status] for kind in kinds}
