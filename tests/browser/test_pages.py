"""An operator's day in Dagster's pages, in a real browser, on the real thing."""

from __future__ import annotations

import json
import re
from datetime import date
from typing import TYPE_CHECKING, Final

from outbox_pipelines.writer import emit
from tests.browser.conftest import SCREENSHOTS
from tests.browser.place import EVENTS_A_DAY, PAST, Place
from tests.conftest import wait_until
from tests.relay.topic import NOISE, change_topic, create_topic

if TYPE_CHECKING:
    from playwright.sync_api import Page


# Each answer of Dagster costs some 30 ms of a core, and what is waited for takes seconds.
_PACE: Final = 1.0


def _materialize(page: Page, days: str) -> None:
    """Chooses these days of the archive, and launches them."""
    page.goto("/assets/outbox/archive?view=partitions")
    page.get_by_role("button", name="Materialize").first.click()
    dialog = page.get_by_role("dialog")
    chosen = dialog.get_by_placeholder("No matching partitions")
    chosen.fill(days)
    chosen.press("Enter")
    dialog.get_by_role("button", name="Launch").click()
    dialog.wait_for(state="detached")


def _rows_archived(served: Place, day: date) -> int | None:
    found = [*served.archive.glob(f"_outbox/manifests/*{day}*.json")]
    return json.loads(found[0].read_text())["rows"] if found else None


def _runs_of(served: Place, job: str) -> list[str]:
    """The states of a job's runs, the newest first."""
    found = served.ask(
        "query($job: String!) {runsOrError(filter: {pipelineName: $job}) {... on Runs {results {status}}}}",
        job=job,
    )
    return [run["status"] for run in found["runsOrError"]["results"]]


def _launch(page: Page, job: str, config: str) -> None:
    page.goto(f"/locations/outbox/jobs/{job}/playground")
    editor = page.locator(".CodeMirror").first
    editor.click()
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.keyboard.insert_text(config)
    page.get_by_role("button", name="Launch Run").click()


def _see_check(page: Page, name: str, verdict: str) -> None:
    page.goto(f"/assets/outbox/health?view=checks&checkDetail={name}")
    page.get_by_text(verdict, exact=True).last.wait_for()


def test_days_are_archived_by_hand(page: Page, served: Place) -> None:
    days = PAST[1:3]
    _materialize(page, f"[{days[0]}...{days[-1]}]")

    def backfill() -> dict[str, str]:
        found = served.ask("{partitionBackfillsOrError {... on PartitionBackfills {results {id status}}}}")
        (newest, *_) = found["partitionBackfillsOrError"]["results"]
        return newest  # type: ignore[no-any-return]

    wait_until(
        lambda: backfill()["status"].startswith("COMPLETED"),
        seconds=150,
        pace=_PACE,
        what="the backfill's end",
    )
    assert backfill()["status"] == "COMPLETED_SUCCESS"
    assert [_rows_archived(served, day) for day in days] == [EVENTS_A_DAY] * len(days)
    page.goto(f"/runs/b/{backfill()['id']}")
    page.get_by_text("100% completed").first.wait_for()
    page.goto(f"/assets/outbox/archive?view=partitions&partition={days[0]}")
    page.get_by_text("megabytes").first.wait_for()
    page.get_by_text("[Show Markdown]").first.click()
    picture = page.locator("img[src^='data:image/svg+xml']").first
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 0


def test_a_dead_letter_is_seen_and_replayed(page: Page, served: Place) -> None:
    create_topic(served.outbox, of="invoice", **{"max.message.bytes": "10000"})
    with served.outbox.connect(autocommit=False) as connection:
        emit(connection, "invoice", 7, "invoice.sent", {"lines": NOISE})

    def letters() -> int:
        with served.outbox.connect() as connection:
            row = connection.execute("SELECT count(*) FROM outbox_parked").fetchone()
            assert row is not None
            return int(row[0])

    def status() -> str | None:
        found = served.ask(
            '{assetNodeOrError(assetKey: {path: ["outbox", "health"]}) {... on AssetNode {assetChecksOrError '
            "{... on AssetChecks {checks {name executionForLatestMaterialization {status}}}}}}}"
        )
        checks = found["assetNodeOrError"]["assetChecksOrError"]["checks"]
        (check,) = [each for each in checks if each["name"] == "dead_letters"]
        execution = check["executionForLatestMaterialization"]
        return execution and str(execution["status"])

    wait_until(lambda: status() == "FAILED", seconds=300, pace=_PACE, what="the red check")
    _see_check(page, "dead_letters", "Failed")
    page.get_by_text("1 dead letter (1 × ").wait_for()
    page.get_by_text("outbox dead-letters list").first.wait_for()
    page.screenshot(path=SCREENSHOTS / "a_failed_check.png")

    # Corrected, and tried again.
    change_topic(served.outbox, of="invoice", **{"max.message.bytes": "1000000"})
    _launch(
        page,
        "dead_letters",
        "{ops: {act_on_dead_letters: {config: {action: replay, everything: true, reason: topic is wider}}}}",
    )
    wait_until(lambda: letters() == 0, seconds=300, pace=_PACE, what="the replay")
    (message,) = served.outbox.messages("invoice")
    assert message.key == "7"
    page.goto("/assets/outbox/health?view=checks&checkDetail=dead_letters")
    # Days were archived by runs of the same job. While the new one is in progress, so is the check.
    before = len(_runs_of(served, "__ASSET_JOB"))
    page.locator("button", has_text=re.compile(r"^Execute$")).click()

    def is_executed() -> bool:
        runs = _runs_of(served, "__ASSET_JOB")
        return len(runs) > before and runs[0] == "SUCCESS"

    wait_until(is_executed, seconds=300, pace=_PACE, what="the check's run")
    wait_until(lambda: status() == "SUCCEEDED", seconds=300, pace=_PACE, what="the green check")
    _see_check(page, "dead_letters", "Passed")


def test_lineage(page: Page) -> None:
    # Of all assets.
    page.set_viewport_size({"width": 1400, "height": 1100})
    page.goto("/locations/outbox/asset-groups/outbox/lineage")
    for asset in ("events", "relay", "archive", "dropped", "replays", "health"):
        page.get_by_text(asset, exact=True).first.wait_for()
    # The edges between them are drawn.
    page.locator("svg path").first.wait_for(state="attached")
    page.get_by_text(re.compile("[1-9][0-9]* / 19 Passed")).wait_for()


def test_the_relay_has_plots(page: Page, served: Place) -> None:
    """The sensor has started sessions automatically, and their reports are a curve."""
    # The last test of all: by now one has ended.
    wait_until(
        lambda: "SUCCESS" in _runs_of(served, "relay_session"),
        seconds=300,
        pace=_PACE,
        what="an ended session",
    )
    page.goto("/assets/outbox/relay?view=overview")
    page.get_by_role("button", name="Plots").click()
    page.get_by_text("events_per_second").first.wait_for()
    drawn = page.locator("canvas").first
    drawn.wait_for()
    # Something else than the background is on it.
    assert page.evaluate(
        "canvas => new Set(new Uint32Array(canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size > 5",
        drawn.element_handle(),
    )
