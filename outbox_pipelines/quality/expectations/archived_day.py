"""Validate the events of an archived day."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from outbox_pipelines.catalog.document import require_catalog
from outbox_pipelines.quality.expectations import checkpoint, day_suite, sample
from outbox_pipelines.quality.expectations.checkpoint import Finding
from outbox_pipelines.settings import ProcessSettings


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a day."""

    sample: sample.Sample
    findings: dict[str, list[Finding]]
    """By check, in the order of `day_suite.CHECKS`. The user's suite is last, if there is one."""
    pages: Path | None
    """The start page of the data docs; None without a project."""


def validate(settings: ProcessSettings, day: date) -> Result:
    """Validate a day by a Checkpoint.

    Raises:
        SetupError: the day is not archived, the event catalog is invalid, or the project cannot be used.
        UnavailableError: the archive does not answer.
    """
    catalog = None if settings.catalog_file is None else require_catalog(settings)
    found = sample.read(settings, day, None if catalog is None else list(catalog.events))
    name = checkpoint.suite_name(settings, "day")
    project = settings.expectations
    findings = checkpoint.run(
        name,
        found.frame,
        day_suite.expected(settings, found, catalog),
        own=f"{name}_own",
        project=project,
    )
    by_check: dict[str, list[Finding]] = {check: [] for check in day_suite.CHECKS}
    for each in findings:
        # In the user's suite, `meta` may name one of our checks.
        by_check.setdefault(each.check if each.check in by_check else day_suite.OWN, []).append(each)
    return Result(found, by_check, None if project is None else checkpoint.pages(project))
