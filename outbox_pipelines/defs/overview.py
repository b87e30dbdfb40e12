"""The asset `outboxes`: a row for each outbox, and the sensor that keeps it current.

Invariants:
- The rows come from Dagster's storage alone: no database is read, and an outbox that is unavailable delays
  nothing.
"""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg

from outbox_pipelines.defs import ticks
from outbox_pipelines.defs.outbox import Outbox, plain_line
from outbox_pipelines.defs.ticks import HOUR
from outbox_pipelines.quality.measurements import age
from outbox_pipelines.quality.rules import RULES

KEY: Final = dg.AssetKey(["outboxes"])
# Twice as old as a measurement becomes while the sensor `health` runs.
_OLD_SECONDS: Final = 2 * HOUR
_AGAIN_SECONDS: Final = 300
_LINKS: Final = 10
_CHECKS: Final = ("database", *(rule.name for rule in RULES))
# Worst first.
_STATES: Final = ("ERROR", "WARN", "UNKNOWN", "OK")

_OUTBOXES: Final = """\
All outboxes of this code location: a row for each, the worst first, with its state, what is wrong, the lag,
the backlog, dead letters, late days, and when this was measured. Links lead to the checks of those that are
not OK.

The sensor `outboxes_overview` reports the table when the state of an outbox changes, every five minutes while
one that is not OK is measured again, and every hour. It reads what the sensor `health` of each outbox
(`outboxes_health`, if they share it) has reported, and no database.

Use: look here first; then open the checks of the outboxes that are not OK. Materialize reports the table now.
`outbox status --all` prints the same on a command line.

When a row is UNKNOWN: the outbox has not been measured for two hours. Its sensor `health` is off or new.
"""
_SENSOR: Final = """\
Reports the asset `outboxes` when the state of an outbox changes, at most every five minutes when the figures
of one that is not OK do, and every hour. Leave it on: a tick reads Dagster's storage only.
"""


def assets(outboxes: Sequence[Outbox]) -> list[dg.AssetsDefinition]:
    """Return the overview asset; none for one outbox, whose health shows the same."""
    shown = [outbox for outbox in outboxes if outbox.has("checks")]
    if len(outboxes) < 2:
        return []

    @dg.asset(
        key=KEY,
        deps=[outbox.key("health") for outbox in shown],
        group_name="outboxes",
        owners=sorted({owner for outbox in shown for owner in outbox.owners}),
        kinds={"postgres"},
        description=_OUTBOXES,
    )
    def overview(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        return dg.MaterializeResult(metadata=_metadata(rows(context.instance, shown, time.time()), shown))

    return [overview]


def sensors(outboxes: Sequence[Outbox], status: dg.DefaultSensorStatus) -> list[dg.SensorDefinition]:
    """Return the sensor of the overview; none for one outbox."""
    shown = [outbox for outbox in outboxes if outbox.has("checks")]
    if len(outboxes) < 2:
        return []

    @dg.sensor(
        name="outboxes_overview",
        target=dg.AssetSelection.assets(KEY),
        minimum_interval_seconds=30,
        default_status=status,
        description=plain_line(_SENSOR),
    )
    def overview_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        now = time.time()
        found = rows(context.instance, shown, now)
        before: dict[str, Any] = json.loads(context.cursor) if context.cursor else {}
        after: dict[str, Any] = {"states": {row["outbox"]: row["state"] for row in found}, "at": now}
        after["figures"] = [[*row.values()] for row in found if row["state"] != "OK"]
        is_due = _is_due(before, after)
        wrong = [f"{name} is {state}" for name, state in after["states"].items() if state != "OK"]
        return dg.SensorResult(
            asset_events=[dg.AssetMaterialization(KEY, metadata=_metadata(found, shown))] if is_due else [],
            skip_reason=dg.SkipReason(ticks.listed(wrong) or f"all {len(found)} outboxes are OK"),
            cursor=json.dumps(after if is_due else before),
        )

    return [overview_sensor]


def _is_due(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether the table is reported: 288 times a day at most while no state changes."""
    if before.get("states") != after["states"]:
        return True
    seconds: float = after["at"] - before["at"]
    return seconds >= (HOUR if before["figures"] == after["figures"] else _AGAIN_SECONDS)


def rows(instance: dg.DagsterInstance, outboxes: Sequence[Outbox], now: float) -> list[dict[str, Any]]:
    """Return the row of each outbox, the worst first."""
    from outbox_pipelines.defs.dagster_internals import latest_results

    keys = [dg.AssetCheckKey(outbox.key("health"), name) for outbox in outboxes for name in _CHECKS]
    results = latest_results(instance, keys)
    found = [_row(instance, outbox, results, now) for outbox in outboxes]
    return sorted(found, key=lambda row: (_STATES.index(row["state"]), row["outbox"]))


def _row(
    instance: dg.DagsterInstance,
    outbox: Outbox,
    results: Mapping[dg.AssetCheckKey, dg.AssetCheckEvaluation],
    now: float,
) -> dict[str, Any]:
    key = outbox.key("health")
    failed: dict[str, list[str]] = {"ERROR": [], "WARN": []}
    for name in _CHECKS:
        result = results.get(dg.AssetCheckKey(key, name))
        if result is not None and not result.passed:
            failed[result.severity.value].append(f"{name}: {result.description}")
    wrong = [*failed["ERROR"], *failed["WARN"]]
    state = next((state for state in ("ERROR", "WARN") if failed[state]), "OK")
    observed = instance.fetch_observations(key, limit=1).records
    at = observed[0].timestamp if observed else None
    if state == "OK" and (at is None or now - at > _OLD_SECONDS):
        # The results are those of a sensor that has stopped.
        state, wrong = "UNKNOWN", ["not measured: is its sensor health on?"]
    numbers: dict[str, Any] = {}
    if observed and (event := observed[0].asset_observation):
        numbers = {name: value.value for name, value in event.metadata.items()}
    lag = numbers.get("oldest_unpublished_seconds")
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return {
        "state": state,
        "outbox": outbox.name,
        "wrong": ticks.short(wrong[0]) + more if wrong else "",
        "lag": None if lag is None else age(lag),
        "backlog": numbers.get("unpublished"),
        "dead_letters": numbers.get("dead_letters"),
        "days_late": numbers.get("days_late"),
        # A time: the row is read long after it was written.
        "measured (UTC)": None if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}",
    }


def _metadata(found: list[dict[str, Any]], outboxes: Sequence[Outbox]) -> dict[str, Any]:
    states = [row["state"] for row in found]
    # A record cannot hold None.
    records = [
        dg.TableRecord({name: "-" if value is None else value for name, value in row.items()})
        for row in found
    ]
    counts = {f"outboxes_{state.lower()}": states.count(state) for state in _STATES}
    if not records:
        return counts
    schema = dg.TableSchema([dg.TableColumn(name, "string") for name in found[0]])
    keys = {outbox.name: outbox.key("health") for outbox in outboxes}
    links = {
        f"checks of {row['outbox']}": dg.MetadataValue.url(
            f"/assets/{'/'.join(keys[row['outbox']].path)}?view=checks"
        )
        for row in found[:_LINKS]
        if row["state"] != "OK"
    }
    return {"outboxes": dg.MetadataValue.table(records, schema=schema), **links, **counts}
