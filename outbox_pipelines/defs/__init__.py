"""The Dagster definitions. They are thin: the other packages do the work.

Invariants:
- Every definition is named in `outbox_definitions`; importing a module loads no driver, client or pandas.
- The description of every asset, job and sensor says what it does, when to use it, and what to do when it
  fails.
- Merged into a user's definitions, they change nothing there: they add no executor, and one resource, under
  the package's name.
"""

# No postponed annotations here: Dagster reads those of the functions it decorates as they stand.
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dagster as dg

    from outbox_pipelines.defs.resources import OutboxResource


def outbox_definitions(*, resource: "OutboxResource | None" = None) -> "dg.Definitions":
    """Return all definitions of an outbox, for a separate code location or to merge with yours.

    Args:
        resource: settings that differ from the environment's.

    Example:
        ```python
        defs = dg.Definitions.merge(outbox_definitions(), dg.Definitions(assets=[...]))
        ```
    """
    # Imported here because every module of this package imports this one first.
    import dagster as dg

    from outbox_pipelines.defs import first_day
    from outbox_pipelines.defs.resources import KEY, OutboxResource

    resource = resource or OutboxResource()
    # Before the modules below are imported: their days begin with the first day of this outbox.
    first_day.read_from(resource)

    from outbox_pipelines.defs import (
        alerts,
        archive,
        catalog,
        cleaning,
        day_quality,
        dropped,
        events,
        health,
        history,
        inbox,
        months,
        partitions,
        reconciliation,
        topics,
    )
    from outbox_pipelines.defs.relay import assets, dead_letters, jobs, sensors

    return dg.Definitions(
        assets=[
            events.application_tables,
            events.events,
            assets.relay,
            health.health,
            inbox.inbox,
            archive.archive,
            dropped.dropped,
            reconciliation.reconciliation,
            *topics.topics(resource),
        ],
        asset_checks=[
            day_quality.events_as_expected,
            catalog.event_types_documented,
            health.checks,
            inbox.handled,
            archive.archive_equals_table,
        ],
        jobs=[
            jobs.relay_session,
            jobs.relay_once,
            dead_letters.dead_letters_job,
            partitions.maintain_partitions,
            archive.archive_day,
            dropped.drop_day,
            cleaning.clean_table,
            months.make_months,
            reconciliation.reconcile_day,
            catalog.check_catalog,
            health.check_health,
            inbox.drain_inbox,
            history.purge_history,
        ],
        schedules=[
            partitions.maintain_partitions_schedule,
            archive.archive_days,
            dropped.drop_days,
            cleaning.clean_table_schedule,
            months.make_months_schedule,
            catalog.check_catalog_schedule,
            history.purge_history_schedule,
        ],
        sensors=[
            sensors.relay_supervisor,
            health.health_sensor,
            inbox.inbox_sensor,
            alerts.alerts_sensor,
        ],
        resources={KEY: resource},
    )
