"""What it costs that members are encrypted for a person: in a writer, a consumer, and a query of the archive.

Invariants:
- Keys are cached, as those of subjects that were named in the last minute, where no row says otherwise.
- An encrypted payload is compared with the same one in clear, of the same run.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import time
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import psycopg

from benchmarks import archive_queries
from benchmarks.consumer_ways import AT_ONCE, once
from benchmarks.consumers import Place
from benchmarks.quick import sized
from benchmarks.servers import fresh_outbox
from benchmarks.table import Figure, Ratio, Row, microseconds, paired, rate
from benchmarks.writers import interleaved
from outbox_pipelines.days.archive import open_archive
from outbox_pipelines.settings import Settings
from outbox_pipelines.subject_keys import SubjectKeys, erasures
from outbox_pipelines.writer import emit

# As many as events before the first that is timed.
_SUBJECTS: Final = 5 * AT_ONCE
_MEMBERS: Final = ("customer.name", "customer.email")
# At once: how many events, in how many rounds.
_HANDLED: Final = sized({1: (500, 5), AT_ONCE: (5000, 5)}, {1: (200, 1), AT_ONCE: (1000, 1)})
_ARCHIVED: Final = sized(100_000, 10_000)
_ROUNDS: Final = sized(5, 3)
_QUERY: Final = "SELECT count({payload} ->> '$.customer.email') FROM events"


def measure(servers: Settings) -> list[Row]:
    """Rows of the table."""
    master = base64.b64encode(os.urandom(32)).decode()
    with fresh_outbox(servers) as settings:
        erasures.migrate(settings.model_copy(update={"keys_dsn": settings.dsn, "master_key": master}))
        with closing(SubjectKeys(settings.dsn.reveal(), master_key=master)) as keys:
            for subject in range(_SUBJECTS):
                _protected(keys, subject)
            return [*_written(settings, keys), *_handled(settings, keys), *_queried(keys)]


def _order(n: int) -> dict[str, Any]:
    customer = {"id": n % _SUBJECTS, "name": f"Ann Example {n}", "email": f"ann.{n}@example.com"}
    return {"total": n % 100, "state": "placed", "customer": customer}


def _protected(keys: SubjectKeys, n: int, subject: object = None) -> Any:
    return keys.protect(_order(n), dict.fromkeys(_MEMBERS, n % _SUBJECTS if subject is None else subject))


def _written(settings: Settings, keys: SubjectKeys) -> list[Row]:
    new = count()
    encrypted = _protected(keys, 0)
    with psycopg.connect(settings.dsn) as connection:
        write = partial(emit, connection, "order", 1, "order.placed")
        taken = interleaved(
            {
                "plain": lambda n: write(_order(n)),
                "protected": lambda n: write(_protected(keys, n)),
                "new": lambda n: write(_protected(keys, n, f"new {next(new)}")),
                "decrypted": lambda n: keys.decrypted(encrypted),
            },
            connection.commit,
        )
    plain = taken["plain"]
    rows = [Row("emit of an order, no commit", (microseconds(plain),))]
    for way, what in (("protected", "with two protected members"), ("new", "of a new subject")):
        figures = microseconds(taken[way]), microseconds(taken[way] - plain, "of which protecting")
        rows.append(
            Row(f"emit of an order {what}, no commit", figures, (Ratio(taken[way] / plain, "plain"),))
        )
    return [*rows, Row("two members decrypted", (microseconds(taken["decrypted"]),))]


def _handled(settings: Settings, keys: SubjectKeys) -> list[Row]:
    place = Place(settings)
    place.prepare()
    values = {
        "plain": lambda n: json.dumps(_order(n)),
        "protected": lambda n: json.dumps(_protected(keys, n)),
    }
    rows = []
    for at_once, (events, rounds) in _HANDLED.items():
        rates: dict[str, list[float]] = {way: [] for way in values}
        cpu: dict[str, list[float]] = {way: [] for way in values}
        for number in range(rounds):
            for way in sorted(values, reverse=bool(number % 2)):
                source = f"{way} {at_once} {number}"
                consume = once(None if at_once == 1 else at_once, source=source, keys=keys)
                found = place.run(consume, events, value=values[way])
                rates[way].append(found.rate)
                cpu[way].append(found.cpu)
        more = median(cpu["protected"]) - median(cpu["plain"])
        name = "one at a time" if at_once == 1 else f"{at_once} at a time"
        rows += [
            Row(f"consumer with keys, {name}: plain orders", (rate(rates["plain"]),)),
            Row(
                f"consumer with keys, {name}: two members decrypted",
                (rate(rates["protected"]), Figure(more, "µs more of CPU")),
                (Ratio(paired(rates["protected"], rates["plain"]), "plain"),),
            ),
        ]
    return rows


def _queried(keys: SubjectKeys) -> list[Row]:
    seconds: dict[str, list[float]] = {"payload": [], "decrypted(payload)": []}
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        payloads = [json.dumps(_protected(keys, n)) for n in range(_ARCHIVED)]
        archive_queries.write(Path(folder), 0, payloads)
        archive = open_archive(folder, keys=keys)
        for _ in range(_ROUNDS):
            for payload, taken in seconds.items():
                started = time.perf_counter()
                assert archive.query(_QUERY.format(payload=payload)).fetchall() == [(_ARCHIVED,)]
                taken.append(time.perf_counter() - started)
    plain, decrypted = seconds.values()
    what = f"archive: a member of {_ARCHIVED:,} payloads"
    return [
        Row(f"{what}, as it is", (Figure(median(plain) / _ARCHIVED * 1e6, "µs each"),)),
        Row(
            f"{what}, by decrypted(payload)",
            (Figure(median(decrypted) / _ARCHIVED * 1e6, "µs each"),),
            (Ratio(paired(decrypted, plain), "as it is"),),
        ),
    ]
