"""What Great Expectations says of an archived day's events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from outbox_pipelines.config.rules import Rule
from outbox_pipelines.errors import SetupError
from outbox_pipelines.quality.expectations import archived_day, checkpoint, day_suite, sample
from outbox_pipelines.quality.rules import Status
from outbox_pipelines.settings import Settings
from outbox_pipelines.writer.references import Reference
from tests.catalog.conftest import CATALOG
from tests.quality.expectations.archived import DAY, event, write

# As in P2, 2.1: an image that launches a job, and markup.
HOSTILE = "```\n![x](/graphql?query=mutation) <script>alert(1)</script>"


def documented(settings: Settings, folder: Path) -> Settings:
    (folder / "catalog.yaml").write_text(
        CATALOG.replace("producer: shop", "producer: shop\n    aggregate_type: order")
    )
    return settings.model_copy(update={"catalog_file": folder / "catalog.yaml"})


def wrong(result: archived_day.Result) -> dict[str, tuple[Status, list[str]]]:
    """The checks that are not met, with the ids that they name."""
    return {
        check: (checkpoint.worst(findings), sorted({id for each in findings for id in each.ids}))
        for check, findings in result.findings.items()
        if checkpoint.worst(findings)
    }


def test_a_sound_day_meets_all(tmp_path: Path) -> None:
    """Guards against a check that finds something in a day that is in order."""
    large = Reference(f"{DAY}/body", 1_000_000, "0" * 64).payload()
    rows = [*(event(n) for n in range(49)), event(49, payload=large)]
    settings = write(tmp_path / "archive", rows)
    result = archived_day.validate(documented(settings, tmp_path), DAY)
    assert wrong(result) == {}
    assert str(result.sample) == "all 50 events"
    assert [*result.findings] == [*day_suite.CHECKS]
    assert all(result.findings[check] for check in day_suite.CHECKS if check != "volume_as_usual")
    assert checkpoint.summary(result.findings["volume_as_usual"]) == "nothing to compare with yet"


def test_an_empty_day_meets_all(tmp_path: Path) -> None:
    """Guards against sums and shares of nothing."""
    assert wrong(archived_day.validate(write(tmp_path, []), DAY)) == {}


def test_each_check_finds_its_own(tmp_path: Path) -> None:
    """Guards against an expectation that is never evaluated: each kind is planted once."""
    twice = str(uuid4())
    rows = [event(n) for n in range(300)]
    planted = {
        "early": event(300, created_at=event(0)["created_at"] - timedelta(hours=1)),  # type: ignore[operator]
        "late": event(312, created_at=event(0)["created_at"] + timedelta(days=1)),  # type: ignore[operator]
        "no_id": event(313, id=None),
        "unknown": event(301, event_type=HOSTILE),
        "elsewhere": event(311, aggregate_type="invoice"),
        "nameless": event(302, aggregate_id=""),
        "invalid": event(303, payload='{"total": 0}'),
        "no_time": event(304, payload='{"total": 1, "at": "soon"}'),
        "unparsed": event(305, payload='{"total": ' + "[" * 3000 + "]" * 3000 + "}"),
        "reference": event(314, payload='{"outbox-body": {}}'),
        "list": event(306, event_type="order.shipped", payload="[]"),
        "dead": event(307, status="FAILED", published_at=None),
        "same_seq": event(0, id=str(uuid4()), idempotency_key="a"),
        "same_key": event(308, idempotency_key="a"),
    }
    rows += [*planted.values(), event(309, id=twice), event(310, id=twice)]
    found = wrong(archived_day.validate(documented(write(tmp_path / "archive", rows), tmp_path), DAY))
    id = {name: str(row["id"]) for name, row in planted.items()}
    assert found == {
        "ids_unique": (
            Status.ERROR,
            sorted({twice, str(rows[0]["id"]), id["same_seq"], id["same_key"], "no id"}),
        ),
        "times_within_day": (Status.ERROR, [id["early"], id["late"]]),
        "types_known": (Status.WARN, sorted([id["unknown"], id["elsewhere"], id["nameless"]])),
        "payloads_valid": (
            Status.WARN,
            sorted(id[name] for name in ("invalid", "no_time", "unparsed", "reference", "list")),
        ),
        "no_dead_letters": (Status.WARN, [id["dead"]]),
    }


def test_a_name_is_not_empty(tmp_path: Path) -> None:
    """Guards against an empty name, which without an event catalog nothing else finds."""
    names = ("aggregate_type", "aggregate_id", "event_type", "idempotency_key")
    rows = [{**event(n), name: ""} for n, name in enumerate(names)]
    found = wrong(archived_day.validate(write(tmp_path, rows), DAY))
    assert found == {"types_known": (Status.WARN, [row["id"] for row in rows])}


def test_each_version_is_judged_by_its_own_schema(tmp_path: Path) -> None:
    """Guards against archived events that are reported because their type has a newer schema."""
    settings = write(
        tmp_path / "archive",
        [
            event(0, payload='{"sum": 1}', version=1),
            event(1, payload='{"total": 1}', version=1),
            event(2, version=2),
            event(3),
            event(4, payload='{"sum": 1}', version=2),
            event(5, payload='{"sum": 1}'),
        ],
    )
    settings = documented(settings, tmp_path)
    path = tmp_path / "catalog.yaml"
    earlier = "producer: shop\n    version: 2\n    versions: {1: {required: [sum]}}"
    path.write_text(path.read_text().replace("producer: shop", earlier))
    ids = [str(event(n)["id"]) for n in (1, 4, 5)]
    assert wrong(archived_day.validate(settings, DAY)) == {"payloads_valid": (Status.WARN, ids)}


@pytest.mark.parametrize(("one", "all_others"), [(True, False), (False, True)])
def test_a_payload_may_be_null_where_it_is_a_tombstone(tmp_path: Path, one: bool, all_others: bool) -> None:
    """Guards against tombstones that are reported, or null payloads of other types that are not."""
    rows = [event(n, event_type=name, payload="null") for n, name in enumerate(("order.gone", "order.paid"))]
    rules = {"order.gone": Rule(tombstones=one)}
    settings = write(tmp_path, rows).model_copy(update={"tombstones": all_others, "event_types": rules})
    wrong_row = rows[1 if one else 0]
    assert wrong(archived_day.validate(settings, DAY)) == {
        "payloads_valid": (Status.WARN, [str(wrong_row["id"])])
    }


@pytest.mark.parametrize(
    ("late", "seconds", "fails"),
    [(60, 20, True), (40, 20, False), (4, 100, True), (0, 0, False)],
    ids=["the median", "not the median", "the 99th percentile", "none"],
)
def test_the_lag_is_judged_by_its_distribution(
    tmp_path: Path, late: int, seconds: float, fails: bool
) -> None:
    """Guards against a day that is judged by one event, and one whose latency is not looked at."""
    rows = [event(n) for n in range(100)]
    for row in rows[:late]:
        row["published_at"] = row["created_at"] + timedelta(seconds=seconds)  # type: ignore[operator]
    found = wrong(archived_day.validate(write(tmp_path, rows), DAY))
    assert [*found] == (["delivery_in_time"] if fails else [])


@pytest.mark.parametrize(("rejected", "fails"), [(1, False), (2, True)])
def test_rejections_are_judged_by_their_share(tmp_path: Path, rejected: int, fails: bool) -> None:
    """Guards against a day with many rejections, all of which were published in time, without a word."""
    rows = [event(n, attempts=int(n < rejected)) for n in range(100)]
    result = archived_day.validate(write(tmp_path, rows), DAY)
    ids = sorted(str(row["id"]) for row in rows[:rejected])
    assert wrong(result) == ({"delivery_in_time": (Status.WARN, ids)} if fails else {})


@pytest.mark.parametrize(("events", "fails"), [(10, True), (50, False), (400, True)])
def test_the_volume_is_compared_with_the_days_before(tmp_path: Path, events: int, fails: bool) -> None:
    """Guards against a day that lost most of its events, or has too many, without a word."""
    for before in range(1, 5):
        earlier = DAY - timedelta(before)
        write(tmp_path, [event(n, earlier) for n in range(100)], earlier)
    found = wrong(archived_day.validate(write(tmp_path, [event(n) for n in range(events)]), DAY))
    assert [*found] == (["volume_as_usual"] if fails else [])


def test_a_sample_has_what_is_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a duplicate or a rare type that a sample leaves out, and a distorted distribution."""
    monkeypatch.setattr(sample, "MOST", 200)
    twice = str(uuid4())
    rows = [event(n) for n in range(4000)]
    planted = [
        event(4000, id=twice),
        event(4001, id=twice),
        event(4002, event_type="order.shipped", payload="[]"),
        event(4003, status="FAILED"),
        event(4004, id=None),
    ]
    for before in range(1, 4):
        earlier = DAY - timedelta(before)
        write(tmp_path / "archive", [event(n, earlier) for n in range(1400)], earlier)
    settings = documented(write(tmp_path / "archive", rows + planted), tmp_path)
    result = archived_day.validate(settings, DAY)
    assert not result.sample.is_whole
    assert 100 < result.sample.random < 320
    assert len(result.sample.frame) < 400
    assert str(result.sample).startswith(f"a sample: {result.sample.random} of 4,005 events at random, and ")
    # The sum of the weights is the day's number of events, three times the median is 4,200.
    assert result.sample.frame["weight"].sum() == pytest.approx(4005)
    assert wrong(result) == {
        "ids_unique": (Status.ERROR, sorted([twice, "no id"])),
        "payloads_valid": (Status.WARN, [planted[2]["id"]]),
        "no_dead_letters": (Status.WARN, [planted[3]["id"]]),
    }


def test_what_is_added_to_a_sample_does_not_distort_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a red check for a day of which one event in 250 was late: all of these are unusual."""
    monkeypatch.setattr(sample, "MOST", 400)
    rows = [event(n) for n in range(8000)]
    for row in rows[::250]:
        row["attempts"] = 1
    assert wrong(archived_day.validate(write(tmp_path, rows), DAY)) == {}


def test_payloads_are_limited_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a few thousand large payloads that fill the memory."""
    monkeypatch.setattr(sample, "MOST_BYTES", 100_000)
    monkeypatch.setattr(sample, "LONGEST", 5_000)
    long = [event(n, payload='{"pad": "' + "x" * 10_000 + '"}') for n in range(100)]
    found = sample.read(write(tmp_path, [*long, *(event(n) for n in range(100, 200))]), DAY)
    assert found.random < 100
    assert found.frame["payload"].str.len().max() < 5_000


def test_columns_of_the_user_replace_none_of_the_frame(tmp_path: Path) -> None:
    """Guards against a table with a column `weight`, of which no day can be judged."""
    added: dict[str, Any] = {"weight": 70, "Latency_Seconds": 1000, "grams": 5}
    settings = write(tmp_path, [event(n, **added) for n in range(3)], added=[*added])
    found = sample.read(settings, DAY).frame
    assert (found["weight"].sum(), found["latency_seconds"].max(), found["grams"].sum()) == (3, 0.1, 15)
    assert "Latency_Seconds" not in found.columns


def test_a_day_that_is_not_archived_is_named(tmp_path: Path) -> None:
    settings = write(tmp_path, [])
    with pytest.raises(SetupError, match="2026-11-19 is not archived: run `outbox archive day 2026-11-19`"):
        archived_day.validate(settings, DAY - timedelta(1))


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    settings = write(tmp_path, [event(1)])
    (file,) = tmp_path.rglob("*.parquet")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(SetupError, match=r"file of 2026-11-20 cannot be read .*: run `outbox archive verify"):
        archived_day.validate(settings, DAY)


# --- a project of the user --------------------------------------------------------------------------------


def own_suite(project: Path, name: str = "outbox_day_own", expectations: Sequence[Any] = ()) -> None:
    """What a user writes, by Great Expectations alone."""
    import great_expectations as gx
    from great_expectations import expectations as gxe

    context = gx.get_context(mode="file", project_root_dir=str(project))
    context.suites.add(
        gx.ExpectationSuite(
            name=name,
            expectations=[*expectations]
            or [
                gxe.ExpectColumnValuesToMatchRegex(column="aggregate_id", regex=r"^\d$", severity="critical"),
                gxe.ExpectColumnValuesToBeInSet(
                    column="event_type", value_set=["order.placed"], meta={"check": "types_known"}
                ),
                gxe.ExpectColumnMaxToBeBetween(column="missing", max_value=1, severity="warning"),
            ],
        )
    )


@pytest.mark.extended
def test_a_suite_of_the_user_is_added(tmp_path: Path) -> None:
    """Guards against a project whose suite is left out, replaced, or works at the first run only."""
    project = tmp_path / "quality"
    own_suite(project)
    odd = event(50, aggregate_id="many", event_type=HOSTILE, payload='{"html": "<script>alert(2)</script>"}')
    settings = write(tmp_path / "archive", [*(event(n) for n in range(50)), odd])
    settings = settings.model_copy(update={"expectations": project})
    for _ in range(2):
        result = archived_day.validate(settings, DAY)
        assert wrong(result) == {
            "types_known": (Status.ERROR, [odd["id"]]),
            day_suite.OWN: (Status.ERROR, [odd["id"]]),
        }
    found = {each.expectation: each for each in result.findings[day_suite.OWN]}
    by_regex = found["expect_column_values_to_match_regex(aggregate_id)"]
    missing = found["expect_column_max_to_be_between(missing)"]
    assert by_regex.found == "1 of 51 rows do not meet it"
    # What cannot be evaluated is not met.
    assert missing.status is Status.WARN
    assert "cannot be evaluated" in missing.found
    assert result.pages == checkpoint.pages(project)
    written = [page.read_text() for page in result.pages.parent.rglob("*.html")]
    assert len([*result.pages.parent.glob("validations/**/*.html")]) == 4
    assert any("aggregate_id" in page for page in written)
    # The pages are opened in a browser: no value of an event is markup there.
    assert not [page for page in written if "<script>alert" in page]


def test_a_suite_that_cannot_be_stored_stops_no_other(tmp_path: Path) -> None:
    """Guards against an expectation of the user that takes the results of all others away."""
    from great_expectations import expectations as gxe

    ranges = {"quantiles": [0.5], "value_ranges": [[None, 1]]}
    own_suite(
        tmp_path / "quality",
        expectations=[gxe.ExpectColumnQuantileValuesToBeBetween(column="seq", quantile_ranges=ranges)],
    )
    settings = write(tmp_path / "archive", [event(1)]).model_copy(
        update={"expectations": tmp_path / "quality"}
    )
    result = archived_day.validate(settings, DAY)
    assert [*wrong(result)] == [day_suite.OWN]
    (finding,) = result.findings[day_suite.OWN]
    assert "Write `mostly` instead of an expectation of quantiles" in finding.found


@pytest.mark.extended
def test_outboxes_share_a_project(tmp_path: Path) -> None:
    """Guards against the suite of one outbox that judges another one's days."""
    own_suite(tmp_path / "quality", "outbox_orders_day_own")
    settings = write(tmp_path / "archive", [event(1, aggregate_id="many")])
    settings = settings.model_copy(update={"expectations": tmp_path / "quality"})
    assert wrong(archived_day.validate(settings, DAY)) == {}
    orders = settings.model_copy(update={"name": "orders"})
    assert day_suite.OWN in wrong(archived_day.validate(orders, DAY))


def test_a_project_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    settings = write(tmp_path / "archive", [])
    (tmp_path / "file").write_text("")
    settings = settings.model_copy(update={"expectations": tmp_path / "file" / "quality"})
    with pytest.raises(SetupError, match=r"cannot be written .*: name a directory that runs may write"):
        archived_day.validate(settings, DAY)
