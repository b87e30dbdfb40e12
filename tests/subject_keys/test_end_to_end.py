"""A subject from the write on to the erasure: in Kafka, a replay, a restored day, and the archive."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.catalog.document import read_catalog
from outbox_pipelines.consumer import Consumer, Event
from outbox_pipelines.days.archive import open_archive
from outbox_pipelines.subject_keys import ERASED, SubjectKeys
from tests.conftest import wait_until
from tests.consumer.place import running
from tests.reconciliation.conftest import place
from tests.reconciliation.place import DAY, Place
from tests.replay.test_replays import WHY, dropped, typed
from tests.subject_keys.conftest import MASTER, OTHER

__all__ = ["place"]
CATALOG = """
events:
  order.placed:
    description: d
    producer: p
    owner: o
    protected: {email: aggregate_id, "lines[].to": buyer}
    schema:
      properties:
        email: {type: string}
        buyer: {type: integer}
        total: {type: number}
        lines: {type: array, items: {type: object, properties: {to: {type: string}}}}
"""
ORDER = {"email": "ann@example.com", "buyer": 7, "total": 5, "lines": [{"to": "Oslo"}]}
READ = {**ORDER, "email": ERASED}


@pytest.mark.slow
def test_one_subject_is_forgotten(
    place: Place, keys_dsn: str, forget: Callable[[object], Any], tmp_path: Path
) -> None:
    """Guards against a copy of an event in which a forgotten subject can be read, or a proof that fails."""
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    catalog = read_catalog(tmp_path / "catalog.yaml")
    keys = SubjectKeys(keys_dsn, master_key=MASTER, cache_seconds=0)
    payload = keys.protect_by(catalog, "order.placed", ORDER, aggregate_id=0)
    place.name()
    ids = place.write(1, keys=1, payload=json.dumps(payload))
    place.relay()
    seen: list[Any] = []
    consumer = Consumer(
        source="billing",
        topics=[place.topic],
        kafka={"bootstrap.servers": place.settings.kafka},
        dsn=place.settings.require_dsn(),
        keys=keys,
    )

    @consumer.on("order.placed", replays="handle")
    def placed(event: Event, connection: object) -> None:
        seen.append((event.id, event.payload))

    with running(consumer):
        wait_until(lambda: seen)
    assert seen == [(ids[0], ORDER)]
    assert "ann@example" not in str(place.messages())
    dropped(place)
    environment = {
        "OUTBOX_ARCHIVE": place.settings.archive,
        "OUTBOX_KEYS_DSN": keys_dsn,
        "OUTBOX_MASTER_KEY": MASTER,
        "OUTBOX_CATALOG_FILE": str(tmp_path / "catalog.yaml"),
    }

    def ask(sql: str, **more: str) -> Any:
        done = place.outbox.outbox("archive", "query", "--json", sql, **environment | more)
        assert done.returncode == 0, done.stderr
        [row] = json.loads(done.stdout)
        return row

    view = 'SELECT email, lines[1]."to" AS city, total FROM "order.placed"'
    assert ask(view) == {"email": "ann@example.com", "city": "Oslo", "total": 5}
    assert ask("SELECT decrypted(payload) ->> 'email' AS email FROM events") == {"email": "ann@example.com"}
    wrong = place.outbox.outbox("archive", "query", view, **environment | {"OUTBOX_MASTER_KEY": OTHER})
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "outbox: the master key is not that of the key store" in wrong.stderr
    frame = open_archive(place.settings.archive, keys=keys).dataframe(parse=True)
    assert frame.payload[0] == ORDER

    assert place.outbox.outbox("forget", "0", "--reason", "r", **environment).returncode == 0

    assert ask(view) == {"email": None, "city": "Oslo", "total": 5}
    frame = open_archive(place.settings.archive, keys=keys).dataframe(parse=True)
    assert frame.payload[0] == READ
    verified = place.outbox.outbox("archive", "verify", str(DAY), **environment)
    assert (verified.returncode, verified.stderr) == (0, "")
    done = typed(place, "--since", str(DAY), "--until", str(DAY), "--same-topic", *WHY)
    assert done.returncode == 0, done.stderr
    with running(consumer):
        wait_until(lambda: len(seen) == 2)
    assert seen[1] == (ids[0], READ)
    restored = place.outbox.outbox("archive", "restore", str(DAY), **environment)
    assert restored.returncode == 0, restored.stderr
    [(again,)] = place.rows(f"SELECT payload FROM outbox_restored_{DAY:%Y%m%d}")
    assert keys.decrypted(again) == READ
