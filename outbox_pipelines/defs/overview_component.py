"""The overview of a project's outboxes as a component: for outboxes in files of their own.

Invariants:
- It defines the asset `outboxes` and its sensor only; each outbox stays with its component.
"""

# No postponed annotations here: Dagster reads those of the fields as written.
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster.components.scaffold.scaffold import Scaffolder, ScaffoldRequest

from outbox_pipelines.defs import overview
from outbox_pipelines.defs.component import outboxes_of
from outbox_pipelines.defs.outbox import Automation


class OverviewScaffolder(Scaffolder[Any]):
    """Writes `defs.yaml` for `dg scaffold defs`."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write the file into the new folder."""
        request.target_path.mkdir(parents=True, exist_ok=True)
        (request.target_path / "defs.yaml").write_text(
            f"type: {request.type_name}\n\n"
            "attributes:\n"
            "  automation: running  # the sensor starts with the code location\n"
        )


@dg.scaffold_with(OverviewScaffolder)
@dataclass
class OutboxesOverview(dg.Component, dg.Resolvable):
    """The asset `outboxes`: a row for each `OutboxComponent` of the project, the worst first."""

    automation: Automation = "stopped"
    """Whether the sensor starts with the code location."""

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the asset and its sensor."""
        outboxes = outboxes_of(context.component_tree)
        is_running = self.automation == "running"
        status = dg.DefaultSensorStatus.RUNNING if is_running else dg.DefaultSensorStatus.STOPPED
        return dg.Definitions(assets=overview.assets(outboxes), sensors=overview.sensors(outboxes, status))
