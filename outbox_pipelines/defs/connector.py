"""Debezium's connector of an outbox: the asset, which exists only where Kafka Connect is named."""

# No postponed annotations here: Dagster reads those of the functions it decorates as written.
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import dagster as dg

from outbox_pipelines.defs.outbox import Outbox
from outbox_pipelines.defs.pages import one_line

if TYPE_CHECKING:
    from outbox_pipelines.debezium.connector_state import Connector

_CONNECTOR: Final = """\
Debezium's connector, which publishes the outbox from a Kafka Connect cluster (OUTBOX_CONNECT) instead of a
relay.

The sensor `health` observes it: its state, its worker, and how much of the server's log, and for how long, it
has not confirmed. Its checks find a task that failed, and one that reports RUNNING and sends nothing.

Use: look at the Checks; Observe asks Kafka Connect and the database now.

When a check fails: `outbox debezium status` names each problem with its remedy; docs/operating.md, connector.
"""


def connector(outbox: Outbox) -> dg.AssetsDefinition:
    """Return the asset `connector`, which asks when it is observed."""
    key = outbox.key("connector")
    spec = outbox.spec("connector", _CONNECTOR, {"debezium", "kafka"})

    @dg.multi_observable_source_asset(  # type: ignore[untyped-decorator]
        name=outbox.name_of("ask_connector"), specs=[spec]
    )
    def connector() -> Iterator[dg.ObserveResult]:
        with one_line(outbox):
            from outbox_pipelines.debezium.connector_reading import read

            found = read(outbox.load_settings())
        yield dg.ObserveResult(asset_key=key, metadata=numbers(found))

    return cast(dg.AssetsDefinition, connector)


def numbers(found: "Connector") -> dict[str, Any]:
    """Return the values to show and to plot."""
    running = [task for task in found.tasks if task.state == "RUNNING"]
    return {
        "state": found.state or ("unknown" if found.error else "none"),
        "tasks_running": len(running),
        "worker": ", ".join(dict.fromkeys(task.worker for task in found.tasks)) or "none",
        "unconfirmed_bytes": found.unconfirmed_bytes or 0,
        "unconfirmed_seconds": round(found.waiting_seconds, 1),
        "retained_bytes": found.retained_bytes or 0,
    }
