"""What Great Expectations says of the last hour."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from outbox_pipelines.cli.main import cli
from outbox_pipelines.quality.expectations import hour
from outbox_pipelines.settings import load_settings
from tests.schema.servers import Database


def record(database: Database, latency: str, *, minutes: int = 0) -> None:
    """A hundred seconds of progress some minutes ago, with this latency, an SQL expression of n."""
    database.rows(
        "INSERT INTO outbox_progress (shard, at, done, events, latency) "
        "SELECT 0, clock_timestamp() - make_interval(mins => %s, secs => n), pg_current_snapshot(), 10, "
        f"{latency} FROM generate_series(1, 100) n",
        minutes,
    )


def lose(database: Database, *, minutes: int) -> None:
    """A dead letter of some minutes ago."""
    database.rows(
        "INSERT INTO outbox_parked SELECT o.*, 'failed', 5, NULL, 'too large', now(), "
        "clock_timestamp() - make_interval(mins => %s) FROM outbox o LIMIT 1",
        minutes,
    )


def wrong(database: Database) -> list[str]:
    return sorted(each.expectation for each in hour.validate(load_settings(dsn=database.dsn)) if each.status)


@pytest.mark.parametrize(
    ("latency", "says"),
    [
        ("0.01", []),
        # One second of an hour is as late as an event can be without a warning.
        ("CASE WHEN n = 1 THEN 59 ELSE 0.01 END", []),
        ("CASE WHEN n = 1 THEN 61 ELSE 0.01 END", ["expect_column_max_to_be_between(latency_seconds)"]),
        ("CASE WHEN n <= 6 THEN 16 ELSE 0.01 END", ["expect_column_values_to_be_between(latency_seconds)"]),
        ("CASE WHEN n <= 60 THEN 2 ELSE 0.01 END", ["expect_column_median_to_be_between(latency_seconds)"]),
    ],
    ids=["well", "one late", "the maximum", "the 95th percentile", "the median"],
)
def test_the_lag_of_the_hour_is_judged_by_its_distribution(
    database: Database, latency: str, says: list[str]
) -> None:
    """Guards against an hour that is judged by its last second."""
    record(database, latency)
    # Older than an hour.
    record(database, "1000", minutes=61)
    assert wrong(database) == says


def test_failures_of_the_hour_are_counted(database: Database) -> None:
    """Guards against dead letters that were replayed at once, and so are in no check of the present state."""
    assert wrong(database) == []
    database.rows(
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'b', '{}')"
    )
    lose(database, minutes=61)
    assert wrong(database) == []
    database.rows("UPDATE outbox_parked SET failed_at = clock_timestamp() - interval '5 min'")
    assert wrong(database) == ["expect_column_sum_to_be_between(dead_letters)"]
    # To be tried again: the check `dead_letters` passes.
    database.rows("UPDATE outbox_parked SET state = 'replaying'")
    assert wrong(database) == ["expect_column_sum_to_be_between(dead_letters)"]
    database.rows("DELETE FROM outbox_parked")
    database.rows(
        "INSERT INTO outbox_released (seq, id, attempts) "
        "SELECT n, gen_random_uuid(), 1 FROM generate_series(1, 101) n"
    )
    assert wrong(database) == ["expect_column_sum_to_be_between(published_late)"]


def test_the_command_prints_what_is_wrong(database: Database, tmp_path: Path) -> None:
    record(database, "70")
    environment = {"OUTBOX_DSN": database.dsn, "OUTBOX_EXPECTATIONS": str(tmp_path / "quality")}
    result = CliRunner().invoke(cli, ["quality", "hour"], env=environment)
    assert result.exit_code == 1
    assert (
        "WARN  last_hour: expect_column_max_to_be_between(latency_seconds): found 70, expected at most 60"
        in (result.output.splitlines())
    )
    assert Path(result.output.splitlines()[-1].removeprefix("pages: ")).is_file()
