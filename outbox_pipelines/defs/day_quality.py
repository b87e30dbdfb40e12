"""The checks of an archived day's events, by Great Expectations."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from outbox_pipelines.core.text import markdown
from outbox_pipelines.defs import pages, places
from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import day_of, one_line
from outbox_pipelines.quality.expectations.day_suite import CHECKS, OWN

if TYPE_CHECKING:
    from outbox_pipelines.quality.expectations.archived_day import Result

# Every process that loads the definitions would print it.
warnings.filterwarnings("ignore", "Specifying a partitions_def on an AssetCheckSpec", dg.PreviewWarning)

_MORE: Final = """\
{about}

Great Expectations judges the events of the archived day: of a day of more than 100,000 events a sample, and
what is rare or unusual in it. The result says so. Each day has its own result.

When it fails: the metadata has each expectation, the number of rows that do not meet it, and the ids of the
first ones; `outbox archive query` shows the events. Published events cannot be changed: correct the writer.
`validate_with` refuses such events before they are written (docs/catalog.md). More: docs/days.md, data
quality.
"""
_OWN: Final = """\
The suite of the outbox in the Great Expectations project of OUTBOX_EXPECTATIONS, which its owner writes."""


def day_checks(outbox: Outbox) -> dg.AssetChecksDefinition:
    """Return the checks of an archived day."""
    key = outbox.key("archive")
    abouts = CHECKS | ({OWN: _OWN} if outbox.is_set("expectations") else {})

    @dg.multi_asset_check(
        specs=[
            dg.AssetCheckSpec(
                name,
                asset=key,
                description=outbox.text(_MORE.format(about=about)),
                blocking=name in outbox.blocking_checks,
                partitions_def=outbox.days,
            )
            for name, about in abouts.items()
        ],
        name=outbox.name_of("check_archived_day"),
        can_subset=True,
        pool=outbox.pool,
    )
    def day_checks(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        started = time.monotonic()
        day = day_of(context)
        with one_line(outbox):
            from outbox_pipelines.quality.expectations.archived_day import validate

            result = validate(outbox.load_settings(), day)
        numbers: dict[str, Any] = {
            "events": result.sample.events,
            "examined": len(result.sample.frame),
            "sample": str(result.sample),
            "seconds": round(time.monotonic() - started, 3),
            **({"data_docs": dg.MetadataValue.path(str(result.pages))} if result.pages else {}),
            **places.mark(context, outbox),
        }
        for name in sorted(each.name for each in context.selected_asset_check_keys):
            yield _evaluated(outbox, name, result, numbers)

    return day_checks


def _evaluated(outbox: Outbox, name: str, result: "Result", numbers: dict[str, Any]) -> dg.AssetCheckResult:
    from outbox_pipelines.quality.expectations.checkpoint import summary, worst
    from outbox_pipelines.quality.rules import Status

    findings = result.findings.get(name, [])
    status = worst(findings)
    # Dagster blocks only what follows an ERROR.
    is_error = status is Status.ERROR or name in outbox.blocking_checks
    return dg.AssetCheckResult(
        check_name=name,
        asset_key=outbox.key("archive"),
        passed=status is Status.OK,
        severity=dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
        description=markdown(f"{summary(findings)} ({result.sample})"),
        metadata={**numbers, "expectations": pages.table([each.row for each in findings])},
    )
