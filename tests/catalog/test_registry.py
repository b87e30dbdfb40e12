"""How the errors of a schema registry are reported."""

from __future__ import annotations

import builtins
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from outbox_pipelines.errors import RefusedError, SetupError, UnavailableError
from outbox_pipelines.registry import (
    IncompatibleError,
    InvalidSchemaError,
    NoSuchPathError,
    Registry,
    Subject,
)
from outbox_pipelines.settings import make_settings
from tests.registry import FakeRegistry

pytestmark = pytest.mark.slow

SUBJECT = Subject("orders/ö-placed", "placed", '{"title": "placed"}')
_HTML = "<html>Bad gateway</html>"


def _registry(url: str, seconds: float = 5.0, **given: Any) -> Registry:
    return Registry(make_settings(registry_url=url, **given), seconds=seconds)


def test_a_document_is_found_once_it_is_registered(registry: FakeRegistry) -> None:
    """Guards against a name of a subject that is not escaped, and a level of a subject that is replaced."""
    ours = _registry(registry.url)
    assert (ours.find(SUBJECT), ours.latest(SUBJECT), ours.compatibility(SUBJECT)) == (None, None, None)
    assert ours.register(SUBJECT, "FULL") == 1
    assert registry.subjects == {SUBJECT.name: [SUBJECT.text]}
    assert registry.levels == {SUBJECT.name: "FULL"}
    registry.levels[SUBJECT.name] = "NONE"
    assert ours.register(SUBJECT, "FULL") == 1
    assert ours.compatibility(SUBJECT) == "NONE"
    # Another process, which has nothing of these answers.
    assert _registry(registry.url).find(SUBJECT) == 1


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (
            401,
            '{"error_code": 401, "message": "no"}',
            RefusedError,
            r"answers with HTTP 401 .*: correct OUTBOX",
        ),
        (403, _HTML, RefusedError, "denies access to subject orders/ö-placed"),
        (404, _HTML, NoSuchPathError, "does not answer as a schema registry.*Apicurio's.*404"),
        (
            409,
            '{"error_code": 409, "message": "narrower"}',
            IncompatibleError,
            "of orders/ö-placed: narrower",
        ),
        (422, '{"error_code": 42201, "message": "bad"}', InvalidSchemaError, "for invalid: bad"),
        (429, "", UnavailableError, "answers with HTTP 429 about subject orders/ö-placed$"),
        (500, '{"error_code": 50001, "message": "disk full"}', UnavailableError, "HTTP 500 .*: disk full"),
        (502, _HTML, UnavailableError, "HTTP 502 about subject orders/ö-placed$"),
        (302, "", SetupError, "does not answer as a schema registry.*302"),
        (200, _HTML, SetupError, "does not answer as a schema registry"),
        (200, "[]", SetupError, "does not answer as a schema registry"),
        (200, "", SetupError, "does not answer as a schema registry"),
        (200, '{"id": "x"}', SetupError, "does not answer as a schema registry"),
        (200, "{}", SetupError, "does not answer as a schema registry"),
    ],
)
def test_what_the_registry_refuses_is_said_in_our_words(
    registry: FakeRegistry, status: int, body: str, kind: type[SetupError], says: str
) -> None:
    """Guards against an outage that counts as a mistake, a mistake that is waited for, and a proxy's page."""
    registry.fails = status, body
    with pytest.raises(SetupError, match=says) as refused:
        _registry(registry.url).find(SUBJECT)
    assert type(refused.value) is kind
    assert "<html>" not in str(refused.value)


def test_a_registry_that_does_not_answer_is_unavailable(registry: FakeRegistry) -> None:
    """Guards against a call that waits without end."""
    registry.hangs = threading.Event()
    with pytest.raises(UnavailableError, match="is unavailable: timed out"):
        _registry(registry.url, 0.1).find(SUBJECT)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(UnavailableError, match=r"is unavailable: .*refused"):
        _registry(f"http://127.0.0.1:{port}").find(SUBJECT)
    # One of several addresses is enough.
    registry.hangs.set()
    assert _registry(f"http://127.0.0.1:{port},{registry.url}").find(SUBJECT) is None


def test_credentials_reach_the_registry_and_no_message(registry: FakeRegistry) -> None:
    """Guards against a password or a token that an error repeats."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"registry_user_info": "ann:s3cr:et-1"}, "Basic YW5uOnMzY3I6ZXQtMQ=="),
        ({"registry_token": "t0ken-123"}, "Bearer t0ken-123"),
    ]
    for given, sent in cases:
        registry.fails = 500, '{"error_code": 1, "message": "of s3cr:et-1 and t0ken-123"}'
        with pytest.raises(UnavailableError) as refused:
            _registry(registry.url, **given).find(SUBJECT)
        assert registry.authorization == sent
        assert "s3cr" not in str(refused.value)
        assert "t0ken" not in str(refused.value) or "registry_token" not in given


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a traceback where a package or a file is missing."""
    with pytest.raises(SetupError, match="set OUTBOX_REGISTRY_URL"):
        _registry("")
    with pytest.raises(SetupError, match=r"^OUTBOX_REGISTRY_CA cannot be used: "):
        _registry("https://127.0.0.1", registry_ca=tmp_path / "missing.pem")
    original = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "confluent_kafka.schema_registry":
            raise ImportError
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SetupError, match=r"pip install 'outbox-pipelines\[registry\]'"):
        _registry("http://127.0.0.1")
