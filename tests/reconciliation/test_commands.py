"""`outbox reconcile DAY`, as an operator types it."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from outbox_pipelines.cli.main import cli
from outbox_pipelines.reconciliation import messages
from tests.reconciliation.place import DAY, TODAY, Place


def outbox(place: Place, *arguments: str, **environment: str) -> Result:
    none: dict[str, str | None] = {name: None for name in os.environ if name.startswith("OUTBOX_")}
    ours = {**place.outbox.environment, "OUTBOX_CONSUMERS": json.dumps(place.consumers)}
    return CliRunner().invoke(cli, ["reconcile", *arguments], env={**none, **ours, **environment})


def test_a_clean_day_exits_with_0_and_leaves_nothing_behind(place: Place, tmp_path: Path) -> None:
    place.write(3)
    place.relay()
    place.consumer()
    (tmp_path / "work").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "work"))
        done = outbox(place, str(DAY))
    assert done.exit_code == 0, done.output
    assert done.stdout == (
        f"{DAY}: 3 events in the table, 3 messages read\n"
        "topics: 3 compared, all present\n"
        "billing: 3 compared, all present\n"
    )
    assert list((tmp_path / "work").iterdir()) == []


def test_a_difference_exits_with_1_and_says_what_helps(place: Place) -> None:
    ids = place.write(2)
    place.relay()
    place.consumer(ids[1:])
    (lost,) = place.write(1)
    place.pass_over()
    done = outbox(place, str(DAY))
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert "  ERROR 1 missing: recorded as published, but not in any topic" in lines
    (example,) = [line for line in lines if lost in line]
    assert example.startswith(f"    {lost}  seq ")
    assert example.endswith(f"  order.placed  {place.topic}")
    assert "  ERROR 1 missing: in the topic, but skipped: never recorded" in lines
    (example,) = [line for line in lines if ids[0] in line]
    assert f"{place.topic}, partition " in example
    assert sum(line.startswith("    → ") for line in lines) == 2
    done = outbox(place, str(DAY), "--json", "--consumer", "billing")
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert (said["day"], said["status"], said["events"]) == (str(DAY), "ERROR", 3)
    assert [side["name"] for side in said["sides"]] == ["topics", "billing"]
    (finding,) = said["sides"][1]["findings"]
    assert (finding["name"], finding["count"], finding["examples"][0]["id"]) == ("missing", 1, ids[0])


def test_what_cannot_be_exits_with_2_and_one_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SECONDS", 1.0)
    place.name()
    place.outbox.write(1)
    tomorrow, today = str(TODAY + timedelta(1)), str(TODAY)
    for arguments, environment, said in (
        ([tomorrow], {}, f"outbox: {tomorrow} has not begun: choose a past day, or today\n"),
        (["2001-01-01"], {}, "outbox: 2001-01-01 is not a day of the outbox"),
        (
            [today, "--consumer", "shipping"],
            {},
            "outbox: no consumer is named 'shipping': there is billing",
        ),
        ([today], {"OUTBOX_KAFKA": "127.0.0.1:1"}, "outbox: no broker answers at 127.0.0.1:1 (OUTBOX_KAFKA)"),
        ([today], {"OUTBOX_KAFKA": ""}, "outbox: no Kafka is named"),
        (
            [today],
            {"OUTBOX_DSN": "host=127.0.0.1 port=1"},
            "outbox: cannot connect to the database (OUTBOX_DSN)",
        ),
    ):
        done = outbox(place, *arguments, **environment)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert done.stderr.startswith(said)
        assert len(done.stderr.splitlines()) == 1


def test_without_room_it_says_where_to_find_some(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    place.outbox.write(1)
    place.name()
    done = outbox(place, str(TODAY))
    assert done.exit_code == 2
    assert "No such file or directory" in done.stderr
    assert done.stderr.endswith("set TMPDIR to a directory with a few GB of free space\n")


@pytest.mark.extended
def test_when_consumers_handled_the_events(place: Place, tmp_path: Path) -> None:
    """Guards against a question that needs a look into each consumer's database."""
    of_day = place.write(3)
    place.write(2, day=DAY + timedelta(1))
    place.relay()
    place.consumer()
    file = tmp_path / "handled.parquet"
    done = outbox(place, str(DAY), "--handled", str(file))
    assert done.exit_code == 0, done.output
    rows = pq.read_table(file).to_pylist()
    assert {row["event_id"] for row in rows} == set(of_day)
    assert {row["consumer"] for row in rows} == {"billing"}
    ((first, last),) = place.rows("SELECT min(processed_at), max(processed_at) FROM processed_events")
    assert all(first <= row["handled_at"] <= last for row in rows)
    os.mkfifo(tmp_path / "pipe")
    for name in ("no/file", "pipe"):
        # Before it looks for the day, which does not exist.
        nowhere = outbox(place, "1999-01-01", "--handled", str(tmp_path / name))
        assert (nowhere.exit_code, "cannot be written" in nowhere.stderr) == (2, True)
    assert (tmp_path / "pipe").is_fifo()
