"""What cannot be cleaned: one line that says what to correct, and nothing is removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outbox_pipelines.errors import SetupError
from tests.existing import textbook
from tests.existing.cleaning.conftest import MONTHS, MONTHS_MAPPING, SOME, Cleaning, Make
from tests.pgbouncer import pgbouncer


@pytest.fixture
def plain(make: Make) -> Cleaning:
    cleaning = make(textbook.PUBLISHED_AT, textbook.PUBLISHED_AT_MAPPING)
    cleaning.execute(SOME)
    return cleaning


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clean_after_hours": None}, r"OUTBOX_CLEAN_AFTER_HOURS is not set: set the number of hours"),
        ({"archive": ""}, r"OUTBOX_ARCHIVE is not set: name a directory or bucket .* or none"),
        ({"table": {}}, r"OUTBOX_TABLE is not set"),
    ],
)
def test_settings(plain: Cleaning, settings: dict[str, object], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        plain.clean(**settings)
    assert plain.execute("SELECT count(*) FROM events") == [(22,)]


def test_a_role_that_may_not_delete(plain: Cleaning) -> None:
    with (
        plain.role("SELECT, UPDATE ON events") as dsn,
        pytest.raises(SetupError, match=r"GRANT SELECT, UPDATE, DELETE ON public.events TO cleaner_\w+$"),
    ):
        plain.clean(dsn=dsn)


def test_a_role_without_rights_to_partitions(make: Make) -> None:
    """Guards against a bare refusal of the database: rights to the parent are enough for the relay."""
    cleaning = make(MONTHS, MONTHS_MAPPING)
    with (
        cleaning.role("SELECT, UPDATE, DELETE ON events") as dsn,
        pytest.raises(
            SetupError,
            match=r"may not delete rows of public.events_01: GRANT .* \(likewise for 2 more partitions\)",
        ),
    ):
        cleaning.clean(dsn=dsn)


def test_a_table_without_a_time(make: Make) -> None:
    mapping = textbook.STATUS_MAPPING.replace('created_at = "made_at"\n', "").replace(
        'processed_at = "sent_at"\n', ""
    )
    with pytest.raises(SetupError, match="has no time of publishing: name processed_at or created_at"):
        make(textbook.STATUS, mapping).clean()


def test_a_pooler_in_transaction_mode(plain: Cleaning, tmp_path: Path) -> None:
    """Guards against a lock of the pooler's session: two clean-ups would have it."""
    direct = plain.table.settings.require_dsn()
    with pgbouncer(direct, tmp_path, pool_mode="transaction", default_pool_size=1) as dsn:
        refused = plain.table.outbox.outbox("table", "clean", **plain.environment | {"OUTBOX_DSN": dsn})
    assert refused.returncode == 2
    assert "through a pooler in transaction mode" in refused.stderr
    assert plain.execute("SELECT count(*) FROM events") == [(22,)]


def test_by_command(plain: Cleaning, tmp_path: Path) -> None:
    run = plain.table.outbox.outbox
    refused = run("table", "clean", **plain.environment | {"OUTBOX_CLEAN_AFTER_HOURS": "-1"})
    assert refused.returncode == 2
    assert "OUTBOX_CLEAN_AFTER_HOURS" in refused.stderr
    done = run("table", "clean", **plain.environment | {"OUTBOX_ARCHIVE": str(tmp_path / "archive")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("public.events: 10 rows deleted, the longest batch in ")
    assert "\n  archived in tables/public.events/rows-" in done.stdout
    again = json.loads(run("table", "clean", "--json", **plain.environment).stdout)
    assert again["deleted"] == 0
