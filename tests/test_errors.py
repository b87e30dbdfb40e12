"""One base for all errors that users can catch."""

from __future__ import annotations

import pytest

import outbox_pipelines
from outbox_pipelines import consumer, errors, writer
from outbox_pipelines.days.archive import open_archive


@pytest.mark.parametrize(
    "kind",
    [
        errors.SetupError,
        errors.NotReadyError,
        errors.UnavailableError,
        writer.AutocommitError,
        writer.InvalidEventError,
        writer.OutboxError,
        writer.PayloadTooLargeError,
        consumer.ConsumerError,
    ],
)
def test_one_base_catches_all(kind: type[Exception]) -> None:
    """Guards against a caller who must list the errors of each part."""
    assert issubclass(kind, outbox_pipelines.Error)


def test_the_archive_reader_raises_it() -> None:
    with pytest.raises(outbox_pipelines.Error, match="is not a directory"):
        open_archive("/nowhere")
