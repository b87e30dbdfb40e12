"""The client of Kafka Connect where its workers use TLS with an authority of their own, and a login."""

from __future__ import annotations

import ssl
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_pipelines.debezium.connect import Connect
from outbox_pipelines.debezium.connector_reading import ask
from outbox_pipelines.errors import SetupError
from outbox_pipelines.settings import load_settings
from tests.debezium.worker import FakeWorker, answering
from tests.deploy.secured import Authority

_REFUSED = {"status": 401, "body": "<html>relay s@crab8</html>"}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def worker(authority: Authority) -> Iterator[FakeWorker]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue("worker"))
    with answering(context, get=["config"]) as made:
        yield made


def _with_login(worker: FakeWorker) -> str:
    return worker.url.replace("//", "//relay:s%40crab8@")


def _refusal(url: str) -> str:
    """What is reported: one line, without a secret."""
    said = ask(load_settings(connect_url=url)).error
    assert said is not None
    assert len(said.splitlines()) == 1, said
    assert "crab8" not in said
    return said


def test_an_authority_and_a_login(
    worker: FakeWorker, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    assert Connect(load_settings(connect_url=_with_login(worker)).require_connect()).config("shop") != {}
    assert worker.asked[0].login is not None
    assert b64decode(worker.asked[0].login.removeprefix("Basic ")) == b"relay:s@crab8"


def test_another_authority(worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a password that is sent to any server, and a message without a remedy."""
    other = tmp_path / "other"
    other.mkdir()
    for path in (Authority(other).path, tmp_path / "missing.pem"):
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        said = _refusal(_with_login(worker))
        assert "does not answer with a certificate that is trusted (" in said
        assert "name the file of its authority in SSL_CERT_FILE" in said
    assert worker.asked == []


def test_another_host(worker: FakeWorker, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    said = _refusal(_with_login(worker).replace("127.0.0.1", "localhost"))
    assert "not valid for 'localhost'): name the file of its authority" in said


def test_a_wrong_password(worker: FakeWorker, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    worker.answers["config"] = [_REFUSED]
    with pytest.raises(SetupError):
        Connect(_with_login(worker)).config("outbox")
    for url in (_with_login(worker), worker.url):
        said = _refusal(url)
        assert "refuses the credentials (HTTP 401)" in said
        assert "write user, colon, password and @ before the host" in said


def test_tls_on_one_side_alone(worker: FakeWorker) -> None:
    assert "does not answer (" in _refusal(_with_login(worker).replace("https", "http"))
    with answering(get=["config"]) as plain:
        said = _refusal(_with_login(plain).replace("http", "https"))
    assert "does not answer by TLS (" in said
    assert "write http:// in OUTBOX_CONNECT_URL" in said
