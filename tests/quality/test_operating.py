"""operating.md, maintenance.md and alerts in metrics.md: a chapter for each check, limits, output, names."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from outbox_pipelines.core.text import size
from outbox_pipelines.quality import alerts
from outbox_pipelines.quality.measurements import age
from outbox_pipelines.quality.rules import RULES, Rule, judge
from outbox_pipelines.settings import load_settings
from tests.defs.conftest import EVERYTHING, serving
from tests.deploy.files import DEPLOY, ROOT, check_command, check_settings
from tests.deploy.files import alerts as alerts_of_prometheus
from tests.quality.test_rules import SHARD, WELL

PAGE = ROOT / "docs" / "operating.md"
TEXT = PAGE.read_text()
MAINTENANCE = PAGE.with_name("maintenance.md").read_text()
ALERTS = PAGE.with_name("metrics.md").read_text().partition("## Alerts\n")[2].partition("\n## ")[0]
PAGES = TEXT + MAINTENANCE + ALERTS
ALL = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# In double ticks stands what is printed.
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PROSE = _FENCE.sub("", PAGES)


def anchors(path: Path) -> set[str]:
    """The headings of a page, as a link names them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_check_and_every_alert_has_its_chapter() -> None:
    """Guards against an alarm whose link leads nowhere."""
    names = {rule.name for rule in RULES} | {"database", "failed runs"}
    assert names <= set(re.findall(r"^### (.*)$", TEXT, re.MULTILINE))
    for alert in alerts_of_prometheus():
        page, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert page == "docs/operating.md"
        assert anchor in anchors(PAGE)
    assert set(re.findall(r"`(Outbox\w+)`", PAGES)) <= {alert["alert"] for alert in alerts_of_prometheus()}


@ALL
def test_the_table_has_the_limits_of_the_code(rule: Rule) -> None:
    """Guards against an operator who waits for an alarm that has another limit."""

    def limit(value: float | None) -> str:
        unit = " s" if rule.show is age else ""
        if rule.show is size and value is not None:
            return size(value)
        return "never" if value is None else f"{'below ' if rule.is_least else ''}{value:,.0f}{unit}"

    row = f"| [{rule.name}](#{rule.name}) | {limit(rule.warn)} | {limit(rule.error)} | "
    assert TEXT.count(row) == 1
    assert len(re.findall(r"^\| \[\w+\]\(#\w+\) \|", TEXT, re.MULTILINE)) == len(RULES) + 1


def test_what_is_shown_of_a_check_is_what_is_printed() -> None:
    """Guards against words that no command prints."""
    by_name = {rule.name: rule for rule in RULES}
    shown = re.findall(r"^(?:ERROR|WARN) +(\w+): (.*)\n +→ (.*)$", TEXT, re.MULTILINE)
    assert len(shown) > 3
    for name, text, help_ in shown:
        assert help_ == by_name[name].help
        says = re.escape(by_name[name].says).replace(r"\{\}", r"[\d.,]+ ?\w*").replace(r"\{s\}", "s?")
        assert re.match(says, text), text


def test_the_messages_that_are_shown_are_sent() -> None:
    """Guards against a sample that users set their filters by, and that never comes."""
    settings = load_settings(dsn="postgresql://127.0.0.1/shop", ui_url="https://dagster.example.com")
    found = replace(WELL, shards=[replace(SHARD, unowned_seconds=33.1)])
    problems = alerts.of_results(settings, judge(settings, found))
    where = alerts.where(settings)
    begins, known = alerts.news({}, problems, now=0.0, after=0.0, where=where)
    _, known = alerts.news(known, [], now=1.0, after=1.0, where=where)
    ends, _ = alerts.news(known, [], now=2.0, after=1.0, where=where)
    samples = [text for language, text in _FENCE.findall(ALERTS) if language == "text"]
    assert samples == [f"{each.title}\n\n{each.body}\n" for each in [*begins, *ends]]


def test_every_command_and_setting_exists() -> None:
    """Guards against a remedy that prints a usage error at night."""
    prompts = [
        line
        for _, text in _FENCE.findall(PAGES)
        for line in re.findall(r"(?:^\$ |/bin/| -- )(.*)$", text, re.MULTILINE)
    ]
    spans = [" ".join(span.split()) for span in _SPAN.findall(_PROSE)]
    commands = [line for line in [*prompts, *spans] if line.startswith(("outbox ", "dagster-daemon "))]
    assert len(commands) > 30
    for command in commands:
        check_command(shlex.split(command))
    check_settings(set(re.findall(r"OUTBOX_[A-Z_]*[A-Z]", PAGES)))
    for unit in re.findall(r"\b(outbox-relay@)", PAGES):
        assert (DEPLOY / "systemd" / f"{unit}.service").exists()


def test_every_link_and_picture_is_there() -> None:
    """Guards against links to pages and chapters that were renamed."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", PAGES) if not link.startswith("http")]
    assert len(links) > 30
    for link in links:
        name, _, anchor = link.partition("#")
        path = PAGE.parent / name if name else PAGE
        assert path.exists(), link
        assert not anchor or anchor in anchors(path), link
    pictures = {path.name for path in (PAGE.parent / "images").iterdir()}
    assert pictures == set(re.findall(r"!\[[^\]]+\]\(images/([^)]+)\)", PAGES))


def test_what_is_pasted_into_the_launchpad_fits() -> None:
    """Guards against a configuration that the launchpad refuses, and assets of other names."""
    import dagster as dg

    from outbox_pipelines.definitions import defs
    from outbox_pipelines.defs import outbox_definitions

    repository = defs.get_repository_def()
    samples = [text for language, text in _FENCE.findall(MAINTENANCE) if language == "yaml"]
    for job, sample in zip(("drop_day", "dead_letters", "replay_events"), samples, strict=True):
        dg.validate_run_config(repository.get_job(job), yaml.safe_load(sample))
    # With every part: some exist only where they have work.
    graph = outbox_definitions(serving(**EVERYTHING)).resolve_asset_graph()
    assets = {key.to_user_string() for key in graph.get_all_asset_keys()}
    named = set(re.findall(r"`(outbox/\w+)`", PAGES))
    assert named
    assert named <= assets


def test_every_name_is_one_of_the_code() -> None:
    """Guards against jobs, sensors, checks, columns and settings that are called otherwise by now."""
    names = {span for span in _SPAN.findall(_PROSE) if re.fullmatch(r"[a-z]+(_[a-z]+)+", span)}
    assert {"relay_supervisor", "archive_equals_table", "outbox_audit"} <= names
    sources = [*(ROOT / "outbox_pipelines").rglob("*.py"), *(ROOT / "sql").glob("*.sql")]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    assert names - words == {"pg_dump", "pg_upgrade"}
