"""Proves that a day's file and its rows are equal, or says where they differ.

Invariants:
- The two sides are computed by different engines from different bytes: PostgreSQL from the table, DuckDB from
  the file as it lies in the archive. The manifest vouches for neither; it must agree with both.
- It writes nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

from outbox_pipelines.archive import sums
from outbox_pipelines.archive.manifest import Manifest, Sum, digest, read_manifest
from outbox_pipelines.archive.store import MANIFEST, Store, key
from outbox_pipelines.database import Connection
from outbox_pipelines.errors import AwayError, SetupError

# Enough to see what is wrong.
_BUCKETS: Final = 3
_ROWS: Final = 10


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of it."""

    day: date
    rows: int
    """Of the table; of the manifest where there was no table."""
    differences: tuple[str, ...]
    """A line each; empty: proven."""

    @property
    def equal(self) -> bool:
        return not self.differences


def prove(store: Store, day: date, connection: Connection, leaf: str, manifest_sha256: str | None) -> Proof:
    """Compares a partition with its file.

    Args:
        manifest_sha256: the manifest's digest that the database keeps; None: whatever lies there is compared.
    """
    with ThreadPoolExecutor(1) as threads:
        of_table = threads.submit(sums.of_table, connection, leaf)
        manifest, file_sums, differences = _file(store, day, manifest_sha256)
        table = of_table.result()
    if manifest is not None:
        differences += _against_manifest("the rows", table, manifest)
        if file_sums is not None and file_sums != table:
            with store.local(key(day, manifest.file)) as file:
                differences += _named(connection, leaf, file, table, file_sums)
    return Proof(day, sum(each.rows for each in table.values()), tuple(differences))


def verify(store: Store, day: date, manifest_sha256: str | None) -> Proof:
    """Compares a file with its manifest, where the rows are gone."""
    manifest, _, differences = _file(store, day, manifest_sha256)
    return Proof(day, manifest.rows if manifest else 0, tuple(differences))


def load(store: Store, day: date) -> tuple[Manifest, bytes] | None:
    """The manifest of a day, and its bytes; None where there is none.

    Raises:
        SetupError: it cannot be read, or is another day's.
    """
    stored = store.read(key(day, MANIFEST))
    return None if stored is None else (read_manifest(stored.content, day), stored.content)


def _file(
    store: Store, day: date, manifest_sha256: str | None
) -> tuple[Manifest | None, dict[int, Sum] | None, list[str]]:
    """The manifest, the sums of its file, and how the two differ."""
    try:
        loaded = load(store, day)
    except AwayError:
        raise
    except SetupError as error:
        return None, None, [str(error)]
    if loaded is None:
        return None, None, [f"{day} has no manifest in {store.url}"]
    manifest, stored = loaded
    differences = []
    if manifest_sha256 is not None and digest(stored) != manifest_sha256:
        differences.append(f"the manifest of {day} is not the one that was written: its digest differs")
    try:
        with store.local(key(day, manifest.file)) as file:
            differences += _bytes(file, manifest)
            try:
                found = sums.of_file(file)
            except sums.UnreadableError as error:
                return manifest, None, [*differences, f"{manifest.file} cannot be read: {error}"]
    except FileNotFoundError:
        return manifest, None, [*differences, f"{manifest.file} is missing in {store.url}"]
    return manifest, found, differences + _against_manifest(manifest.file, found, manifest)


def _bytes(file: Path, manifest: Manifest) -> list[str]:
    size = file.stat().st_size
    if size != manifest.size:
        return [f"{manifest.file} has {size:,} bytes, not {manifest.size:,}"]
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != manifest.sha256:
        return [f"{manifest.file} has changed since it was written: its sha256 is {found[:12]}…"]
    return []


def _against_manifest(what: str, found: dict[int, Sum], manifest: Manifest) -> list[str]:
    rows = sum(each.rows for each in found.values())
    differences = [] if rows == manifest.rows else [f"{what}: {rows:,}, the manifest says {manifest.rows:,}"]
    wrong = sorted(
        bucket for bucket in found | manifest.buckets if found.get(bucket) != manifest.buckets.get(bucket)
    )
    if wrong:
        differences.append(f"{what}: other sums than the manifest's in the buckets {_some(wrong)}")
    return differences


def _named(
    connection: Connection, leaf: str, file: Path, table: dict[int, Sum], found: dict[int, Sum]
) -> list[str]:
    """The rows in which table and file differ, of the first buckets that do."""
    wrong = sorted(bucket for bucket in table | found if table.get(bucket) != found.get(bucket))
    differences = [f"table and file differ in the buckets {_some(wrong)}"]
    for bucket in wrong[:_BUCKETS]:
        rows = Counter(sums.rows_of_table(connection, leaf, bucket))
        in_file = Counter(sums.rows_of_file(file, bucket))
        lines = _rows(list((rows - in_file).elements()), list((in_file - rows).elements()))
        differences += [f"bucket {bucket}: {line}" for line in lines[:_ROWS]]
        if len(lines) > _ROWS:
            differences.append(f"bucket {bucket}: and {len(lines) - _ROWS:,} more")
    return differences


def _rows(only_table: list[tuple[str, int, int]], only_file: list[tuple[str, int, int]]) -> list[str]:
    in_table = {(id, seq) for id, seq, _ in only_table}
    in_file = {(id, seq) for id, seq, _ in only_file}
    twice = Counter((id, seq) for id, seq, _ in only_file)
    lines = []
    for event in sorted(in_table | in_file, key=lambda event: event[1]):
        name = f"event {event[0]} (seq {event[1]})"
        if event not in in_file:
            lines.append(f"{name} is missing in the file")
        elif event not in in_table:
            lines.append(f"{name} is in the file {'once too often' if twice[event] == 1 else 'too often'}")
        else:
            lines.append(f"{name} differs")
    return lines


def _some(buckets: list[int]) -> str:
    shown = ", ".join(map(str, buckets[:_ROWS]))
    return shown if len(buckets) <= _ROWS else f"{shown} and {len(buckets) - _ROWS} more"
