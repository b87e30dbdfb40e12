"""Draws two plots of an archive of flights: `python examples/plots.py ARCHIVE DIRECTORY`.

How many flights left in each hour, and how late they were. The archive of docs/queries.md will do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from outbox_pipelines.days.archive import Archive, open_archive


def departures(archive: Archive) -> pd.DataFrame:
    """Flights that left, by hour (UTC) and airport: a row an hour, a column an airport."""
    frame = archive.dataframe(
        event_type="flight.departed", columns=["created_at", "event_type", "payload"], parse=True
    )
    hour = frame.created_at.dt.floor("h")
    origin = frame.payload.str["origin"]
    counts = frame.groupby([hour, origin.rename("origin")]).size().unstack(fill_value=0)
    return counts.asfreq("h", fill_value=0)


def delays(archive: Archive) -> pd.DataFrame:
    """Each flight that left: its airport, and how many minutes late. From two events of the same flight."""
    return archive.query("""
        SELECT payload ->> 'origin' AS origin,
               date_diff('minute', max((payload ->> 'at')::timestamptz)
                                       FILTER (event_type = 'flight.scheduled'),
                                   max(created_at) FILTER (event_type = 'flight.departed')) AS minutes
        FROM events GROUP BY payload ->> 'flight', origin HAVING minutes IS NOT NULL
    """).df()


def main(url: str, directory: Path) -> None:
    """Writes departures.png and delays.png."""
    archive = open_archive(url)
    directory.mkdir(parents=True, exist_ok=True)

    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    counts = departures(archive)
    axes.stackplot(counts.index, counts.T.to_numpy(), labels=list(counts.columns), step="post")
    axes.set(title="Departures from New York", xlabel="UTC", ylabel="flights an hour")
    axes.legend(loc="upper left", ncols=3)
    figure.savefig(directory / "departures.png", dpi=120)

    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    for origin, minutes in delays(archive).groupby("origin").minutes:
        share = minutes.sort_values().rank(method="first", pct=True) * 100
        axes.plot(minutes.sort_values(), share, label=origin)
    axes.set(
        title="How late flights leave", xlabel="minutes late, at most", ylabel="% of flights", xlim=(-20, 120)
    )
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.legend(loc="lower right")
    figure.savefig(directory / "delays.png", dpi=120)
    plt.close("all")


if __name__ == "__main__":
    plt.switch_backend("Agg")
    main(sys.argv[1], Path(sys.argv[2]))
