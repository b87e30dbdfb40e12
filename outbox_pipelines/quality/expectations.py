"""Great Expectations over a frame of one row, whose numbers SQL has aggregated.

Invariants:
- `great_expectations` and pandas are imported at the first validation: together they take seconds.
- A name's result is that of its worst failed expectation.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outbox_pipelines.quality.rules import Status

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
