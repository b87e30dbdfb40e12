"""The archive as a resource of Dagster, for the user's assets downstream of an archived day."""

# No postponed annotations here: pydantic reads those of the fields.
from datetime import date
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

if TYPE_CHECKING:
    import duckdb
    import pandas as pd

    from outbox_pipelines.days.archive import Archive


class ArchiveResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The archived days of one outbox, read-only.

    Example:
        ```python
        @dg.asset(partitions_def=orders.days, deps=[orders.key("archive")])
        def revenue(context: dg.AssetExecutionContext, archive: ArchiveResource) -> None:
            placed = archive.dataframe(context.partition_key, event_type="order.placed", parse=True)
        ```
    """

    url: str = Field(description="The location of the archive, as in OUTBOX_ARCHIVE.")

    def open(self) -> "Archive":
        """Return the archive with all its days.

        Raises:
            SetupError: there is no archive, or it has no days.
            UnavailableError: the bucket does not answer.
        """
        # Imported here so that definitions load without DuckDB and pandas.
        from outbox_pipelines.days.archive import open_archive

        return open_archive(self.url)

    def dataframe(self, day: date | str, **options: Any) -> "pd.DataFrame":
        """Return the events of a day as a DataFrame.

        Args:
            day: a date, or the key of a partition.
            options: `columns`, `aggregate_type`, `aggregate_id`, `event_type` and `parse`, as in
                `Archive.dataframe`.

        Raises:
            SetupError: the day is not archived.
        """
        return self._having(day).dataframe(since=day, until=day, **options)

    def relation(self, day: date | str, **options: Any) -> "duckdb.DuckDBPyRelation":
        """Return the same as a DuckDB relation; nothing is read before rows are fetched."""
        return self._having(day).relation(since=day, until=day, **options)

    def _having(self, day: date | str) -> "Archive":
        from outbox_pipelines.errors import SetupError

        archive = self.open()
        if str(day) not in map(str, archive.days):
            raise SetupError(
                f"{day} is not in the archive {self.url}: materialize the partition of its asset first"
            )
        return archive
