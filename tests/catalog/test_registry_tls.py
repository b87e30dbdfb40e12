"""A schema registry behind TLS: an authority of its own, and a client certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from outbox_pipelines.errors import RefusedError, SetupError
from outbox_pipelines.registry import Registry, SchemaRegistry, Subject
from outbox_pipelines.settings import make_settings
from tests.deploy.secured import Authority
from tests.registry import serving

SUBJECT = Subject("orders-placed", "placed", '{"title": "placed"}')


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def _other(tmp_path: Path) -> Authority:
    (tmp_path / "other").mkdir()
    return Authority(tmp_path / "other")


def _context(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue("registry"))
    return context


def _find(url: str, **given: Any) -> int | None:
    return Registry(make_settings(registry_url=url, **given), seconds=5.0).find(SUBJECT)


def test_an_authority_of_its_own(authority: Authority, tmp_path: Path) -> None:
    """Guards against a registry that is not verified, and an unknown authority that is waited for."""
    with serving(_context(authority)) as registry:
        registry.add(SUBJECT.name, SUBJECT.text)
        assert _find(registry.url, registry_ca=authority.path) == 1
        ours = SchemaRegistry(registry.url, ca=authority.path)
        assert ours.reader(b"\0\0\0\0\1") is None
        for given in ({}, {"registry_ca": _other(tmp_path).path}):
            with pytest.raises(RefusedError, match=r"cannot be verified: .* in OUTBOX_REGISTRY_CA$"):
                _find(registry.url, **given)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_certificate(authority: Authority, tmp_path: Path, version: ssl.TLSVersion) -> None:
    """Guards against a certificate that is not sent, and a missing one that is taken for an outage."""
    context = _context(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.path)
    context.minimum_version = context.maximum_version = version
    pem = authority.issue("relay")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    before, begin, after = pem.read_text().partition("-----BEGIN CERTIFICATE")
    key.write_text(before)
    certificate.write_text(begin + after)
    strange = _other(tmp_path).issue("relay")
    with serving(context) as registry:
        registry.add(SUBJECT.name, SUBJECT.text)
        given = {"registry_ca": authority.path}
        assert _find(registry.url, registry_certificate=pem, **given) == 1
        assert _find(registry.url, registry_certificate=certificate, registry_key=key, **given) == 1
        ours = SchemaRegistry(registry.url, ca=authority.path, certificate=certificate, key=key)
        assert ours.reader(b"\0\0\0\0\1") is None
        for more in ({}, {"registry_certificate": strange}):
            with pytest.raises(RefusedError, match=r"alert.*in OUTBOX_REGISTRY_CERTIFICATE$"):
                _find(registry.url, **given, **more)


def test_files_that_cannot_be_used(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a service that waits at a terminal for a password, and a key that nothing uses."""
    pem = authority.issue("relay")
    key = serialization.load_pem_private_key(pem.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    url = "https://127.0.0.1"
    older, bare, missing = tmp_path / "older.pem", tmp_path / "bare.pem", tmp_path / "missing.pem"
    older.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    bare.write_text("-----BEGIN CERTIFICATE" + pem.read_text().partition("-----BEGIN CERTIFICATE")[2])
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\n")
    strange = _other(tmp_path).issue("relay")
    cases: list[tuple[dict[str, Path], str]] = [
        ({"certificate": pem, "key": locked}, f"KEY cannot be used: {locked} is encrypted: decrypt it"),
        ({"certificate": pem, "key": older}, f"KEY cannot be used: {older} is encrypted: decrypt it"),
        ({"certificate": pem, "key": missing}, f"KEY cannot be used: {missing} cannot be read: No such file"),
        ({"certificate": pem, "key": bare}, f"KEY cannot be used: {bare} has no private key"),
        ({"certificate": pem, "key": strange}, f"KEY cannot be used: {strange}: "),
        ({"certificate": bare}, f"CERTIFICATE cannot be used: {bare} has no private key: .*, or set OUTBOX_"),
        ({"certificate": locked}, f"CERTIFICATE cannot be used: {locked} has no certificate"),
        ({"certificate": pem, "ca": locked}, f"CA cannot be used: {locked} has no certificate"),
        ({"certificate": pem, "ca": broken}, f"CA cannot be used: {broken}: "),
    ]
    for given, says in cases:
        with pytest.raises(SetupError, match=f"^OUTBOX_REGISTRY_{says}"):
            _find(url, **{f"registry_{name}": path for name, path in given.items()})
    with pytest.raises(SetupError, match="without OUTBOX_REGISTRY_CERTIFICATE: set that"):
        make_settings(registry_url=url, registry_key=locked)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(SetupError, match=rf"^SSL_CERT_FILE cannot be used: {missing}: "):
        _find(url)
