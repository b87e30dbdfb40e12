"""docs/deploy.md: what it names is there."""

from __future__ import annotations

import re

from tests.deploy.files import DEPLOY, ROOT, check_command, check_settings

TEXT = (ROOT / "docs" / "deploy.md").read_text()


def test_it_names_what_exists() -> None:
    """Guards against a page that was right once."""
    files = set(re.findall(r"\b(?:deploy|locks)/[\w./-]*\w", TEXT))
    assert len(files) > 5
    assert {name for name in files if not (ROOT / name).exists()} == set()
    check_settings(set(re.findall(r"OUTBOX_[A-Z_]*[A-Z]", TEXT)))
    commands = set(re.findall(r"`(outbox [a-z][a-z -]*[a-z])(?: N)?`", TEXT))
    assert {"outbox migrate", "outbox migrate --check", "outbox shards set"} <= commands
    for command in commands:
        check_command(command.split())
    check_command(["dagster", "instance", "migrate"])
    functions = "".join(path.read_text() for path in (ROOT / "sql").glob("*.sql"))
    for name in re.findall(r"outbox_grant_\w+", TEXT):
        assert f"FUNCTION {name}(" in functions
    links = re.findall(r"\]\((?!http)([^)#]+)", TEXT)
    assert "operating.md" in links
    assert {link for link in links if not (ROOT / "docs" / link).exists()} == set()


def test_it_names_every_unit_and_alert_that_it_speaks_of() -> None:
    """Guards against commands for units that have other names."""
    for unit in re.findall(r"\b(outbox-(?:relay@|dagster-\w+))", TEXT):
        assert (DEPLOY / "systemd" / f"{unit}.service").exists(), unit
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text()
    for alert in re.findall(r"`(Outbox(?!Resource)[A-Z]\w+)`", TEXT):
        assert f"alert: {alert}\n" in rules
