"""The old table as a proven file, and its end."""

from __future__ import annotations

from pathlib import Path

import duckdb
import psycopg
import pytest

from outbox_pipelines.existing.adopt import steps
from tests.existing import guides
from tests.existing.adopt.conftest import Adopted, Make

KEY = "00000000-0000-0000-0000-000000000001"


def _switched(make: Make, tmp_path: Path, guide: guides.Guide = guides.A) -> Adopted:
    adopted = make(guide, archive=str(tmp_path / "archive"))
    adopted.write(*((KEY, n) for n in range(5)))
    adopted.run("adopt", "prepare")
    adopted.switch()
    adopted.drain()
    return adopted


def test_archive_and_drop(make: Make, tmp_path: Path) -> None:
    """Guards against rows that are dropped and are nowhere else."""
    for guide in (guides.A,):
        adopted = _switched(make, tmp_path, guide)
        archive = {"OUTBOX_ARCHIVE": str(tmp_path / "archive")}
        said = adopted.run("adopt", "finish", **archive)
        assert "5 rows of public.outbox_adopted in _outbox/adopted/" in said
        # The file that has them is found again.
        assert adopted.run("adopt", "finish", **archive) == said
        new = adopted.write((KEY, 5))
        said = adopted.run("adopt", "finish", "--drop", **archive)
        assert said.endswith("is dropped; public.outbox is a view of the append-only outbox\n")
        assert "was dropped already" in adopted.run("adopt", "finish", "--drop", **archive)
        (file,) = (tmp_path / "archive" / "_outbox" / "adopted").iterdir()
        rows = duckdb.execute(f"SELECT payload FROM '{file}' ORDER BY created_at").fetchall()
        assert rows == [(f'{{"n": {n}}}',) for n in range(5)]
        new += adopted.write((KEY, 6))
        with adopted.connect() as connection:
            found = connection.execute("SELECT id::text FROM outbox ORDER BY created_at").fetchall()
        assert [event_id for (event_id,) in found] == new
        adopted.relay()
        assert adopted.numbers() == {KEY: list(range(7))}
        for words in ("back", "switch", "drain", "plan"):
            assert adopted.refuse("adopt", words)[1].endswith("dropped: nothing is left to do or to undo")


@pytest.mark.extended
def test_keys_of_a_drain_that_was_killed(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against keys that are forgotten with the table; new events do not wait for their copy."""
    adopted = make(guides.A, archive=str(tmp_path / "archive"))
    insert = (
        "INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload, idempotency_key) "
        f"VALUES ('Order', '{KEY}', 'x', '{{\"n\": 0}}', 'k')"
    )

    def killed(*_: object) -> int:
        raise KeyboardInterrupt

    with adopted.connect() as connection:
        connection.execute(insert.encode())
        adopted.run("adopt", "prepare")
        adopted.switch()
        with monkeypatch.context() as patch:
            patch.setattr(steps, "_copy_keys", killed)
            with pytest.raises(KeyboardInterrupt):
                adopted.drain()
        assert adopted.state() == "adopted"
        steps.finish(adopted.settings, drop=True, seconds=30, say=print)
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute(insert.encode())


def test_other_shapes_can_be_dropped(make: Make, tmp_path: Path) -> None:
    """Guards against a default or a partition that keeps the table."""
    adopted = _switched(make, tmp_path, guides.C)
    adopted.run("adopt", "finish", "--drop", OUTBOX_ARCHIVE=str(tmp_path / "archive"))
    assert adopted.write((KEY, 5)) == ["6"]


@pytest.mark.extended
def test_partitions_can_be_dropped(make: Make, tmp_path: Path) -> None:
    """Guards against triggers on partitions, which the table's end does not remove."""
    adopted = _switched(make, tmp_path, guides.E)
    adopted.run("adopt", "finish", "--drop", OUTBOX_ARCHIVE=str(tmp_path / "archive"))
    assert len(adopted.write((KEY, 5))) == 1


@pytest.mark.extended
def test_an_unpublished_row_stays(make: Make, tmp_path: Path) -> None:
    """Guards against a dead letter that is dropped with the table; the way back is open until then."""
    adopted = _switched(make, tmp_path)
    with adopted.connect() as connection:
        connection.execute(
            "UPDATE outbox_adopted SET published_at = NULL, retry_count = 9, "
            "last_error = 'outbox: dead letter: x' WHERE payload ->> 'n' = '3'"
        )
    archive = {"OUTBOX_ARCHIVE": str(tmp_path / "archive")}
    said = adopted.refuse("adopt", "finish", "--drop", **archive)[1]
    assert "has 1 dead letter" in said
    adopted.back()
    with adopted.connect() as connection:
        connection.execute("UPDATE outbox SET retry_count = 0 WHERE retry_count = 9")
    assert adopted.relay(table=True).events == 1


@pytest.mark.extended
def test_a_corrected_dead_letter(make: Make, tmp_path: Path) -> None:
    """Guards against a refused drop after which no row can be marked, so that there is no way on."""
    adopted = _switched(make, tmp_path)
    with adopted.connect() as connection:
        connection.execute(
            "UPDATE outbox_adopted SET published_at = NULL, retry_count = 9, "
            "last_error = 'outbox: dead letter: x'"
        )
    archive = {"OUTBOX_ARCHIVE": str(tmp_path / "archive")}
    assert "has 5 dead letters" in adopted.refuse("adopt", "finish", "--drop", **archive)[1]
    assert adopted.run("adopt", "drain").startswith("0 rows published")
    with adopted.connect() as connection:
        connection.execute("UPDATE outbox_adopted SET retry_count = 0")
    assert "`outbox adopt drain`" in adopted.refuse("adopt", "finish", "--drop", **archive)[1]
    assert adopted.run("adopt", "drain").startswith("5 rows published")
    adopted.run("adopt", "finish", "--drop", **archive)


@pytest.mark.extended
def test_a_drop_that_is_refused(make: Make, tmp_path: Path) -> None:
    """Guards against a table whose rows stay locked up after a view or the archive prevented its end."""
    adopted = _switched(make, tmp_path)
    update = b"UPDATE outbox_adopted SET retry_count = 0"
    (tmp_path / "file").touch()
    with adopted.connect() as connection:
        code, said = adopted.refuse(
            "adopt", "finish", "--drop", OUTBOX_ARCHIVE=str(tmp_path / "file" / "archive")
        )
        assert code == 2, said
        connection.execute(update)
        connection.execute("CREATE VIEW recent AS SELECT * FROM outbox_adopted")
        code, said = adopted.refuse("adopt", "finish", "--drop", OUTBOX_ARCHIVE="none")
        assert (code, "(view public.recent depends on table public.outbox_adopted): drop what" in said) == (
            2,
            True,
        ), said
        connection.execute(update)
        connection.execute("DROP VIEW recent")
    adopted.run("adopt", "finish", "--drop", OUTBOX_ARCHIVE="none")


def test_marks_while_the_table_is_archived(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a proof of rows that change after it."""
    adopted = _switched(make, tmp_path)
    seen = []

    def archived(*_: object) -> str:
        with adopted.connect() as connection:
            for statement in ("UPDATE outbox_adopted SET retry_count = 0", "TRUNCATE outbox_adopted"):
                with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is being archived"):
                    connection.execute(statement.encode())
                seen.append(statement)
        return ""

    monkeypatch.setattr(steps, "_archived", archived)
    given = adopted.settings.model_copy(update={"archive": str(tmp_path / "archive")})
    steps.finish(given, drop=True, seconds=10, say=print)
    assert len(seen) == 2


def test_without_an_archive(make: Make, tmp_path: Path) -> None:
    """Guards against a table that is dropped because of a setting that was forgotten."""
    adopted = _switched(make, tmp_path)
    code, said = adopted.refuse("adopt", "finish", "--drop")
    assert (code, said) == (
        2,
        "outbox: no archive configured: set OUTBOX_ARCHIVE to a directory, s3://bucket/path, gs://… or az://…",
    )
    assert "add --drop" in adopted.refuse("adopt", "finish", OUTBOX_ARCHIVE="none")[1]
    adopted.run("adopt", "finish", "--drop", OUTBOX_ARCHIVE="none")


def test_an_adopted_table_is_not_cleaned(make: Make, tmp_path: Path) -> None:
    """Guards against rows of the old table or of the view that are removed without the proof of `finish`."""
    adopted = make(guides.A)
    adopted.write((KEY, 1))
    adopted.relay(table=True)
    with adopted.connect() as connection:
        connection.execute("UPDATE outbox SET published_at = now() - interval '1 day'")
    adopted.run("adopt", "prepare")
    adopted.switch()
    cleaning = {"OUTBOX_CLEAN_AFTER_HOURS": "1", "OUTBOX_ARCHIVE": str(tmp_path / "archive")}
    for drain in (adopted.drain, lambda: None):
        code, said = adopted.refuse("table", "clean", **cleaning)
        assert code == 2
        assert "public.outbox is a view of the append-only outbox, whose days are dropped by" in said
        drain()
    adopted.run("adopt", "finish", "--drop", **cleaning)
    assert (
        "public.outbox was adopted by the append-only outbox"
        in adopted.refuse("table", "clean", **cleaning)[1]
    )
