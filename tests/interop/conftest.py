"""Dapr's sidecar for these tests, with an application and the components of its own for each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbox_pipelines.errors import SetupError
from outbox_pipelines.local import Stack
from outbox_pipelines.settings import load_settings
from tests.interop import build
from tests.interop.sidecar import App, Sidecar, kafka

# Starts a sidecar for an application, with these settings of its component for Kafka.
Start = Callable[..., Sidecar]


@pytest.fixture(scope="session")
def daprd() -> Path:
    try:
        return build.daprd(load_settings())
    except SetupError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def start(daprd: Path, stack: Stack, tmp_path: Path) -> Iterator[Start]:
    """Starts a sidecar and its application; both end with the test."""
    with ExitStack() as ends:

        def start(
            app: App | None,
            *,
            app_id: str = "shop",
            components: dict[str, str] | None = None,
            **settings: object,
        ) -> Sidecar:
            port = ends.enter_context(app.serving()) if app else None
            # By default it tries a message again after 5 s.
            ours = {"kafka": kafka(stack.kafka, uuid.uuid4().hex, **{"backOffDuration": "100ms", **settings})}
            sidecar = Sidecar(daprd, tmp_path / uuid.uuid4().hex, app_id, port, ours | (components or {}))
            ends.callback(sidecar.stop)
            sidecar.start()
            return sidecar

        yield start
