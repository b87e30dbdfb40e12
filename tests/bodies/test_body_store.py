"""The store of large payloads: a directory and a bucket, with the same promises."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines import bodies as stores
from outbox_pipelines.bodies import Bodies, BodyError
from outbox_pipelines.errors import SetupError
from outbox_pipelines.writer import BodyStoreError, OutboxError
from outbox_pipelines.writer.references import Body, Reference, reference_of
from tests.days.archive import buckets

DAY = date(2026, 3, 1)


def stored(bodies: Bodies, content: bytes = b"content") -> Reference:
    [payload] = bodies.put(str(DAY), [Body("null", bodies, content, "text/plain")])
    reference = reference_of(json.loads(payload))
    assert reference is not None
    return reference


def test_what_is_stored_is_read(bodies: Bodies) -> None:
    """Guards against a body that is cut where a client sends it in parts, and an empty one that is not."""
    content = os.urandom(12_000_000)
    references = [stored(bodies, content), stored(bodies, b"")]
    assert [bodies.get(each) for each in references] == [content, b""]


def test_a_body_that_differs_or_is_missing(bodies: Bodies) -> None:
    """Guards against a handler that gets another content than was written, and a missing object that passes
    for an outage, whose event would be tried without end."""
    reference = stored(bodies)
    for wrong, why in (
        (reference._replace(size=8), "7 bytes in place of 8"),
        (reference._replace(sha256="0" * 64), "another sha256"),
        (reference._replace(key=f"{DAY}/other"), f"the body {DAY}/other is missing in "),
    ):
        with pytest.raises(BodyError, match=why):
            bodies.get(wrong)


def test_a_missing_bucket_is_an_unavailable_store(bucket: dict[str, str]) -> None:
    """Guards against events that become dead letters because the store's name is wrong."""
    bodies = Bodies("s3://no-such-bucket/x")
    reference = Reference(f"{DAY}/x", 1, "0" * 64)
    for request in (lambda: bodies.get(reference), lambda: stored(bodies)):
        with pytest.raises(BodyStoreError, match="bucket does not exist"):
            request()


def test_credentials_that_are_refused(bucket: dict[str, str]) -> None:
    """Guards against a refusal that is taken for a missing body."""
    bodies = Bodies(f"s3://{buckets.BUCKET}/x")
    with buckets.strict(bucket), pytest.raises(BodyStoreError) as refused:
        bodies.get(Reference(f"{DAY}/x", 1, "0" * 64))
    assert bucket["AWS_SECRET_ACCESS_KEY"] not in str(refused.value).split()


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({}, None),
        ([], None),
        ("outbox-body", None),
        ({"outbox-body": None}, "is not a reference"),
        ({"outbox-body": {"key": "2026-03-01/a", "size": 1}}, "is not a reference"),
        ({"outbox-body": {"key": "2026-03-01/../../etc/passwd", "size": 1, "sha256": "0" * 64}}, "is not a"),
        ({"outbox-body": {"key": "2026-03-01/.hidden", "size": 1, "sha256": "0" * 64}}, "is not a reference"),
        ({"outbox-body": {"key": "2026-03-01/a", "size": True, "sha256": "0" * 64}}, "is not a reference"),
        ({"outbox-body": {"key": "2026-03-01/a", "size": 1, "sha256": "A" * 64}}, "is not a reference"),
    ],
)
def test_what_is_a_reference(payload: Any, why: str | None) -> None:
    """Guards against a payload of others that reads any file of the store's machine."""
    if why is None:
        assert reference_of(payload) is None
    else:
        with pytest.raises(ValueError, match=why):
            reference_of(payload)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"url": "/no/such/directory"}, "is no directory: create it"),
        ({"url": "ftp://x/y"}, "cannot be opened: .*: give a directory"),
        ({"above_bytes": 1_000_001}, "above_bytes is 1000001: give 0 to 1,000,000 bytes"),
        ({"timeout": 0}, "timeout is 0: give a number of seconds"),
        ({"on_unavailable": "skip"}, 'give "fail" or "inline"'),
    ],
)
def test_wrong_arguments(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    """Guards against a store that fails at the first large payload, in production."""
    with pytest.raises(SetupError, match=why):
        Bodies(**{"url": str(tmp_path), **given})
    bodies = Bodies(str(tmp_path))
    with pytest.raises(OutboxError, match="bytes need their content type"):
        bodies.large(b"")
    with pytest.raises(OutboxError, match="a body of text/csv is a str: give bytes"):
        bodies.large("a,b", "text/csv")


def test_a_fork_of_a_process_that_used_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against workers that wait without end, because the client's threads are not in a fork."""
    bodies = Bodies(str(tmp_path))
    reference = stored(bodies)
    monkeypatch.setattr(stores, "_used_by", os.getpid() + 1)
    with pytest.raises(BodyStoreError, match="use the store in the forked processes only"):
        bodies.get(reference)
