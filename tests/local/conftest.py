"""A local stack of its own for each test, ended with it; the jars are shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_pipelines.local import jars, stack_client
from outbox_pipelines.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the servers that are configured for the test run."""
    for name in ("OUTBOX_DSN", "OUTBOX_KAFKA", "OUTBOX_CONFIG", "OUTBOX_LOCAL_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings of a stack under the test's own directory; child processes see them too."""
    monkeypatch.setenv("OUTBOX_LOCAL_DIR", str(tmp_path / "local"))
    settings = load_settings()
    # On a fresh machine, the first command would also say that it fetches them.
    jars.jars(jars.KAFKA, settings.local_jars)
    yield settings
    stack_client.stop(stack_client.home_of(settings), force=True)


@pytest.fixture
def database_only(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The same with a Kafka that is given, for what does not need a broker: starts in half a second."""
    monkeypatch.setenv("OUTBOX_KAFKA", "kafka.invalid:9092")
    return settings.model_copy(update={"kafka": "kafka.invalid:9092"})
