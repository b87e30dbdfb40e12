"""Encrypted members of payloads in queries and data frames."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

from outbox_pipelines.days.archive import open_archive
from outbox_pipelines.subject_keys import ERASED, SubjectKeys
from tests.days.archive.reading import ONE, event, put_day
from tests.days.archive.test_query import ask
from tests.subject_keys.conftest import MASTER, forget, keys, keys_dsn, settings

__all__ = ["forget", "keys", "keys_dsn", "settings"]
FOREIGN = "outbox-encrypted:1:00000000-0000-0000-0000-000000000000:" + "A" * 40


@pytest.mark.slow
def test_what_cannot_be_decrypted_stays(keys: SubjectKeys, keys_dsn: str, tmp_path: Path) -> None:
    """Guards against one event that fails the query of a day, is taken for erased, or changes its digits."""
    payloads = [
        json.dumps(keys.protect({"a": "x", "n": 1}, {"a": 7})),
        f'{{"a": "{FOREIGN}", "n": 12345678901234567890.12345}}',
        '{"a": "outbox-erased", "n": null}',
        '{"n": 2}',
    ]
    rows = [{**event(ONE, n), "payload": payload} for n, payload in enumerate(payloads)]
    put_day(tmp_path, ONE, rows)
    archive = open_archive(str(tmp_path), keys=keys)
    sql = "SELECT decrypted(payload) FROM events ORDER BY seq"
    assert [text for (text,) in archive.query(sql).fetchall()] == [
        '{"a": "x", "n": 1}',
        payloads[1],
        '{"a": null, "n": null}',
        '{"n": 2}',
    ]
    assert archive.query("SELECT decrypted(NULL)").fetchall() == [(None,)]
    frame = archive.dataframe(parse=True).sort_values("seq")
    assert [each.get("a") for each in frame.payload] == ["x", FOREIGN, ERASED, None]
    away = open_archive(str(tmp_path), keys=SubjectKeys("host=127.0.0.1 port=1", master_key=MASTER))
    with pytest.raises(duckdb.Error, match="KeyStoreError: the key store"):
        away.query(sql).fetchall()
    asked = ask(tmp_path, sql, keys_dsn=keys_dsn, master_key=MASTER)
    said = "values stay encrypted: a member is encrypted with the key 00000000-0000-0000-0"
    assert (asked.exit_code, asked.stderr.count(said)) == (0, 1)
    without = ask(tmp_path, sql)
    assert without.exit_code == 2
    assert "set OUTBOX_KEYS_DSN and a master key" in without.stderr
    half = ask(tmp_path, "SELECT count(*) FROM events", keys_dsn=keys_dsn)
    assert half.exit_code == 0
    assert "no function decrypted: no master key is given" in half.stderr
