"""Run suites over a DataFrame by a Checkpoint of Great Expectations, in the user's project if there is one.

Invariants:
- `great_expectations` is imported at the first run: it takes seconds.
- A finding has ids, numbers and names of columns, and no other values of events; only the error of an
  expectation that cannot be evaluated may have one.
- An expectation that cannot be evaluated is not met.
- One process at a time uses a project: its configuration and pages are files.
"""

from __future__ import annotations

import fcntl
import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outbox_pipelines.core.secret import first_line
from outbox_pipelines.core.text import counted, plain
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.rules import Status

if TYPE_CHECKING:
    import pandas as pd

    from outbox_pipelines.settings import OutboxSettings

MOST_IDS: Final = 20
"""Ids that a finding names."""
_LOCK: Final = ".outbox.lock"
# Great Expectations has one current context in a process.
_ONE: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one expectation."""

    suite: str
    check: str
    """The check that the expectation belongs to; empty in the user's suite."""
    expectation: str
    """Its name in Great Expectations, and its columns."""
    status: Status
    """OK if it is met, otherwise its severity."""
    found: str
    """What was found: the number of rows, or the observed value."""
    rows: int
    """Rows that do not meet it; 0 if it concerns no single rows."""
    ids: tuple[str, ...]
    """The ids of the first of them."""

    @property
    def row(self) -> dict[str, str | int]:
        """The result as a row of a table."""
        return {
            "expectation": self.expectation,
            "result": self.status.name.lower(),
            "found": self.found,
            "rows": self.rows,
            "ids": ", ".join(self.ids),
        }

    @property
    def text(self) -> str:
        """The result in one line."""
        ids = f": {', '.join(self.ids)}" if self.ids else ""
        return f"{self.expectation}: {self.found}{ids}"


def run(
    name: str, frame: pd.DataFrame, expectations: Sequence[Any], *, own: str = "", project: Path | None = None
) -> list[Finding]:
    """Validate a frame, and return a finding for each expectation.

    Args:
        name: of the suite and of its Checkpoint.
        frame: the batch. The column `id`, if there is one, identifies rows.
        own: the name of a suite of the user, which is added if the project has it.
        project: the directory of a Great Expectations project, which gets the suite, the results and the
            pages. It is created if it does not exist.

    Raises:
        SetupError: the project cannot be read or written.
    """
    with _ONE, _project(project):
        return _run(_context(project), name, frame, expectations, own)


def suite_name(settings: OutboxSettings, what: str) -> str:
    """Return the name of a suite of an outbox, as `outbox_orders_day`; the user's suite is `NAME_own`."""
    return f"outbox_{what}" if settings.name == "outbox" else f"outbox_{settings.name}_{what}"


def worst(findings: Iterable[Finding]) -> Status:
    """Return the highest severity."""
    return max((each.status for each in findings), default=Status.OK)


def summary(findings: Iterable[Finding]) -> str:
    """Return the expectations that are not met, or that all are."""
    found = list(findings)
    wrong = [each.text for each in sorted(found, key=lambda each: -each.status) if each.status]
    return "; ".join(wrong) or (
        f"{counted(len(found), 'expectation')} met" if found else "nothing to compare with yet"
    )


def pages(project: Path) -> Path:
    """Return the start page of a project's data docs."""
    return project / "gx" / "uncommitted" / "data_docs" / "local_site" / "index.html"


def _run(
    context: Any, name: str, frame: pd.DataFrame, expectations: Sequence[Any], own: str
) -> list[Finding]:
    import great_expectations as gx
    from great_expectations.checkpoint import UpdateDataDocsAction
    from great_expectations.exceptions import DataContextError

    is_project = not isinstance(context, gx.data_context.EphemeralDataContext)
    batch = _batch(context, name)
    suites = [context.suites.add_or_update(gx.ExpectationSuite(name=name, expectations=list(expectations)))]
    if own:
        with suppress(DataContextError):
            suites.append(context.suites.get(own))
    result_format = {
        "result_format": "SUMMARY",
        "partial_unexpected_count": MOST_IDS,
        "exclude_unexpected_values": True,
        **({"unexpected_index_column_names": ["id"]} if "id" in frame.columns else {}),
    }
    actions = [UpdateDataDocsAction(name="update_data_docs")] if is_project else []
    found = []
    # One for each suite: what is wrong with the user's does not stop ours.
    for suite in suites:
        validation = gx.ValidationDefinition(name=suite.name, data=batch, suite=suite)
        checkpoint = gx.Checkpoint(
            name=suite.name,
            validation_definitions=[context.validation_definitions.add_or_update(validation)],
            actions=actions,
            result_format=result_format,
        )
        ran = context.checkpoints.add_or_update(checkpoint)
        try:
            results = ran.run(batch_parameters={"dataframe": frame}).run_results.values()
        except TypeError as error:
            why = f"cannot be stored: {error}. Write `mostly` instead of an expectation of quantiles"
            found.append(Finding(suite.name, "", "all expectations", Status.ERROR, plain(why), 0, ()))
        else:
            found += [_finding(suite.name, each) for result in results for each in result.results]
    return found


def _batch(context: Any, name: str) -> Any:
    """Return the batch definition of a project; it is made once, because it is written to the project."""
    try:
        source = context.data_sources.get(name)
    except KeyError:
        source = context.data_sources.add_pandas(name)
    try:
        return source.get_asset(name).get_batch_definition(name)
    except (LookupError, KeyError):
        return source.add_dataframe_asset(name).add_batch_definition_whole_dataframe(name)


def _finding(suite: str, result: Any) -> Finding:
    config = result.expectation_config
    found: Mapping[str, Any] = result.result or {}
    error = _error(result.exception_info or {})
    rows = int(found.get("unexpected_count") or 0)
    # Great Expectations' "critical" is the default severity.
    severity = Status.ERROR if config.severity in (None, "critical") else Status.WARN
    columns = ", ".join(
        str(value) for name, value in config.kwargs.items() if name in ("column", "column_A", "column_B")
    )
    condition = config.kwargs.get("row_condition")
    where = f" where {_condition(condition)}" if condition else ""
    if error:
        said = f"cannot be evaluated: {error}"
    elif "unexpected_count" in found:
        said = f"{rows:,} of {int(found.get('element_count') or 0):,} rows do not meet it"
    else:
        said = f"found {_observed(found.get('observed_value'))}{_limits(config.kwargs)}"
    return Finding(
        suite=suite,
        check=str((config.meta or {}).get("check", "")),
        expectation=plain(f"{config.type}({columns}){where}"),
        status=Status.OK if result.success else severity,
        found=plain(said),
        rows=rows,
        ids=tuple(map(plain, _ids(found.get("partial_unexpected_index_list") or []))),
    )


def _ids(found: Sequence[Any]) -> list[str]:
    ids: list[str] = []
    for each in found:
        value = each.get("id") if isinstance(each, dict) else each
        ids += [
            # pandas has NaN for a missing text.
            str(one) if isinstance(one, str) else "no id"
            for one in (value if isinstance(value, list) else [value])
        ]
    return [*dict.fromkeys(ids)][:MOST_IDS]


def _error(info: Mapping[str, Any]) -> str:
    """Return why an expectation could not be evaluated; empty if it was."""
    # One entry, or one for each metric.
    for each in [info] if "raised_exception" in info else info.values():
        if each.get("raised_exception"):
            return str(each.get("exception_message") or "no reason given").strip().partition("\n")[0]
    return ""


def _observed(value: Any) -> str:
    if isinstance(value, dict) and "quantiles" in value:
        pairs = zip(value["quantiles"], value["values"], strict=True)
        return ", ".join(f"{_number(found)} as the quantile {quantile}" for quantile, found in pairs)
    return _number(value)


def _limits(given: Mapping[str, Any]) -> str:
    limits = [
        f"at {word} {_number(given[name])}"
        for name, word in (("min_value", "least"), ("max_value", "most"))
        if given.get(name) is not None
    ]
    return f", expected {' and '.join(limits)}" if limits else ""


def _number(value: Any) -> str:
    try:
        return f"{float(value):,.3f}".rstrip("0").rstrip(".")
    except (TypeError, ValueError):
        # Such as the distinct values of a column, which are data of events.
        return "no number: see the data docs"


def _condition(condition: Any) -> str:
    if isinstance(condition, dict) and "column" in condition:
        name, operator = condition["column"].get("name"), condition.get("operator", "")
        condition = f"{name} {operator} {condition.get('parameter', '')}"
    return textwrap.shorten(str(condition), 200)


def _context(project: Path | None) -> Any:
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig

    if project is None:
        context: Any = gx.get_context(mode="ephemeral")
    else:
        try:
            context = gx.get_context(mode="file", project_root_dir=str(project))
        except Exception as error:  # noqa: BLE001 - whatever Great Expectations finds wrong with the files
            raise SetupError(
                f"the Great Expectations project {project} (OUTBOX_EXPECTATIONS) cannot be read: "
                f"{first_line(error)}"
            ) from None
    context.variables.progress_bars = ProgressBarsConfig(globally=False, metric_calculations=False)
    return context


@contextmanager
def _project(project: Path | None) -> Iterator[None]:
    """Keep other processes from using the project."""
    if project is None:
        yield
        return
    try:
        project.mkdir(parents=True, exist_ok=True)
        with (project / _LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise SetupError(
            f"the Great Expectations project {project} (OUTBOX_EXPECTATIONS) cannot be written "
            f"({error.strerror}): name a directory that runs may write"
        ) from None
