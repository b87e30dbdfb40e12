"""Where the files for operators are, and how the tests read them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from outbox_pipelines.config.file import VARIABLE
from outbox_pipelines.settings import Settings, load_settings, variable

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"


def documents(path: Path) -> list[dict[str, Any]]:
    """Of a file in YAML."""
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


def chart_heading(manifest: str) -> str:
    """Return the first line of a manifest that `make chart` has rendered; another chart has another one."""
    found = hashlib.sha256(manifest.encode())
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        found.update(f"\n{path.relative_to(CHART)}\n".encode() + path.read_bytes())
    return f"# Written by `make chart`, {found.hexdigest()[:16]}: change deploy/chart, not this file.\n"


def rules() -> list[dict[str, Any]]:
    """Prometheus's, recording and alerting."""
    (found,) = documents(DEPLOY / "prometheus" / "rules.yml")
    return [rule for group in found["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana" / "outbox.json").read_text())


def metrics_in(expression: str) -> set[str]:
    """The names of metrics in PromQL, recorded ones included; without those of labels."""
    bare = re.sub(
        r"\{[^}]*\}|\b(?:by|without|on|ignoring)\s*\([^)]*\)|\"[^\"]*\"|\[[^\]]*\]", " ", expression
    )
    return set(re.findall(r"\b[a-z_]*:?outbox_\w+(?::\w+)*", bare))


def panels() -> Iterator[dict[str, Any]]:
    for panel in dashboard()["panels"]:
        if panel["type"] != "row":
            yield panel


@functools.cache
def _program(name: str) -> click.Command:
    # Here, because each takes a second.
    match name:
        case "outbox":
            from outbox_pipelines.cli.main import cli

            return cli
        case "dagster":
            from dagster._cli import create_dagster_cli

            return create_dagster_cli()  # type: ignore[no-untyped-call, no-any-return]
        case "dagster-daemon":
            from dagster._daemon.cli import create_dagster_daemon_cli

            return create_dagster_daemon_cli()
        case "dagster-webserver":
            from dagster_webserver.cli import dagster_webserver

            return dagster_webserver
    raise LookupError(name)


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command of ours or of Dagster's that a command line begins with, and the rest of it.

    Raises:
        LookupError: there is none.
    """
    command = _program(words[0].rpartition("/")[2])
    rest = words[1:]
    while isinstance(command, click.Group):
        if command.invoke_without_command and (not rest or rest[0].startswith("-")):
            break
        command = command.commands[rest[0]]
        rest = rest[1:]
    return command, rest


def check_command(words: list[str], *, is_whole: bool = False) -> None:
    """Raises where the command does not exist, or has no such option; if it is whole, where it lacks one."""
    here = [word.replace("/etc/outbox/", f"{DEPLOY / 'dagster'}/") for word in words]
    command, rest = command_of(here)
    context = click.Context(command)
    found, arguments, _ = command.make_parser(context).parse_args(list(rest))
    assert arguments == []
    for parameter in command.params:
        is_left_out = is_whole and parameter.required
        assert not is_left_out or found.get(parameter.name) not in (None, ()), (words, parameter.name)
        # A page names a value as the command's help does: ID.
        is_given = parameter.name in found and found[parameter.name] != parameter.metavar
        if isinstance(parameter, click.Option) and is_given:
            parameter.type_cast_value(context, found[parameter.name])


def check_settings(names: set[str]) -> None:
    """Every `OUTBOX_…` is a setting."""
    known = {variable(name) for name in Settings.model_fields} | {VARIABLE}
    ours = {name for name in names if name.startswith("OUTBOX_")}
    assert ours <= known, ours - known


def settings_of(environment: dict[str, str]) -> Settings:
    """As a process with this environment reads them.

    Raises:
        SetupError: one is refused.
    """
    check_settings(set(environment))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("OUTBOX_")]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        return load_settings()
