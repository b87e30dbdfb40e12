"""Great Expectations over a frame of one row, whose numbers SQL has aggregated.

Invariants:
- `great_expectations` and pandas are imported at the first validation: together they take seconds.
- A name's result is that of its worst failed expectation.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.rules import Rule, Status

_SEVERITIES: Final = {Status.WARN: "warning", Status.ERROR: "critical"}
_lock: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Expected:
    """The limits of a value, and the severity if it is outside."""

    name: str
    """The name of its check; also the column, unless `column` is set."""
    status: Status
    """WARN or ERROR."""
    least: float | None = None
    """The value is at least this."""
    below: float | None = None
    """The value is less than this."""
    column: str | None = None


def of_rules(rules: Iterable[Rule]) -> list[Expected]:
    """Return the expectations of the health rules; the columns have the rules' names."""
    return [
        Expected(rule.name, state, least=limit) if rule.is_least else Expected(rule.name, state, below=limit)
        for rule in rules
        for state, limit in ((Status.WARN, rule.warn), (Status.ERROR, rule.error))
        if limit is not None
    ]


def validate(suite: str, row: Mapping[str, float], expected: Sequence[Expected]) -> dict[str, Status]:
    """Return the status for each name in `expected`.

    Args:
        suite: name of the suite; one for each set of columns.
        row: values by column; every expected column must exist.

    Raises:
        ValueError: Great Expectations could not evaluate an expectation, such as one of a missing column.
    """
    # The context is not thread-safe.
    with _lock:
        batch = _definition(suite).get_batch(batch_parameters={"dataframe": _frame(row)})
        results = batch.validate(_suite(suite, expected), result_format="BASIC").results
    statuses = dict.fromkeys((each.name for each in expected), Status.OK)
    for result in results:
        meta = result.expectation_config.meta
        if result.exception_info.get("raised_exception", True):
            raise ValueError(f"{meta['name']}: {result.exception_info.get('exception_message')}")
        if not result.success:
            statuses[meta["name"]] = max(statuses[meta["name"]], Status[meta["status"]])
    return statuses


def data_docs(directory: Path, suites: Mapping[str, tuple[Mapping[str, float], Sequence[Expected]]]) -> Path:
    """Build Great Expectations' pages of these suites and their current results; return the start page.

    Each call adds a result to those in the directory.

    Args:
        directory: a Great Expectations project; created if it does not exist.
        suites: a row and its expectations, by the suite's name.

    Raises:
        SetupError: the directory cannot be created.
    """
    import great_expectations as gx
    from great_expectations.checkpoint import UpdateDataDocsAction

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"{directory} cannot be written ({error.strerror}): name another directory"
        ) from None
    context: Any = gx.get_context(mode="file", project_root_dir=str(directory))
    _quieten(context)
    for name, (row, expected) in suites.items():
        source = context.data_sources.add_or_update_pandas(name)
        definition = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe(name)
        suite = context.suites.add_or_update(_suite(name, expected))
        validation = context.validation_definitions.add_or_update(
            gx.ValidationDefinition(name=name, data=definition, suite=suite)
        )
        checkpoint = context.checkpoints.add_or_update(
            gx.Checkpoint(
                name=name,
                validation_definitions=[validation],
                actions=[UpdateDataDocsAction(name="update_data_docs")],
            )
        )
        checkpoint.run(batch_parameters={"dataframe": _frame(row)})
    return directory / "gx" / "uncommitted" / "data_docs" / "local_site" / "index.html"


@functools.cache
def _definition(name: str) -> Any:
    return (
        _context()
        .data_sources.add_pandas(name)
        .add_dataframe_asset(name)
        .add_batch_definition_whole_dataframe(name)
    )


@functools.cache
def _context() -> Any:
    import great_expectations as gx

    context = gx.get_context(mode="ephemeral")
    _quieten(context)
    return context


def _quieten(context: Any) -> None:
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context.variables.progress_bars = ProgressBarsConfig(globally=False, metric_calculations=False)


def _suite(name: str, expected: Sequence[Expected]) -> Any:
    import great_expectations as gx
    from great_expectations.expectations import ExpectColumnValuesToBeBetween

    return gx.ExpectationSuite(
        name=name,
        expectations=[
            ExpectColumnValuesToBeBetween(
                column=each.column or each.name,
                min_value=each.least,
                max_value=each.below,
                strict_max=each.below is not None,
                severity=_SEVERITIES[each.status],
                meta={"name": each.name, "status": each.status.name},
            )
            for each in expected
        ],
    )


def _frame(row: Mapping[str, float]) -> Any:
    import pandas

    return pandas.DataFrame([dict(row)])
