"""A broker that knows who is who, by SCRAM over TLS and by certificates; and what docs/deploy.md grants."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from outbox_pipelines.local.kafka import Kafka
from outbox_pipelines.local.server import free_port
from tests.kafka_clients import AdminClient

DOC: Final = Path(__file__).parents[2] / "docs" / "deploy.md"
PASSWORD: Final = "long-enough"
_HERE: Final = ipaddress.ip_address("127.0.0.1")


class Authority:
    """Signs certificates; each is a file with its key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self._certificate = self._sign(self._name, self._key, is_authority=True)
        self.path = directory / "ca.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> Path:
        """The key and the certificate of `CN=name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + self._sign(subject, key).public_bytes(serialization.Encoding.PEM)
        path = self._directory / f"{name}.pem"
        path.write_bytes(pem)
        return path

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool = False
    ) -> x509.Certificate:
        # The clock of a test may be behind that of the machine.
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=2))
            .not_valid_after(now + dt.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )


@dataclass(frozen=True)
class Secured:
    """A broker; its plain listener, whose users may do everything, is for the tests alone."""

    kafka: Kafka
    authority: Authority
    scram: str
    tls: str

    def client(self, mechanism: str, name: str) -> tuple[str, dict[str, str]]:
        """The brokers, and OUTBOX_KAFKA_CONFIG, of a component."""
        config = {"ssl.ca.location": str(self.authority.path)}
        if mechanism == "scram":
            config |= {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512"}
            config |= {"sasl.username": name, "sasl.password": PASSWORD}
        else:
            pem = str(self.authority.issue(name))
            config |= {"security.protocol": "SSL", "ssl.key.location": pem, "ssl.certificate.location": pem}
        return (self.scram if mechanism == "scram" else self.tls), config

    def allow(self, mechanism: str, name: str, components: tuple[str, ...], **names: str) -> None:
        """Grants what the documentation's table has for these components.

        Args:
            names: what stands for the table's names.
        """
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap})
        if mechanism == "scram":
            info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
            upsert = UserScramCredentialUpsertion(name, info, PASSWORD.encode())
            for done in admin.alter_user_scram_credentials([upsert]).values():
                done.result(600)
        principal = f"User:{name}" if mechanism == "scram" else f"User:CN={name}"
        bindings = [
            AclBinding(kind, resource, pattern, principal, "*", operation, AclPermissionType.ALLOW)
            for component, kind, resource, pattern, operation in _documented(names)
            if component in components
        ]
        assert bindings, f"docs/deploy.md has no rights for {components}"
        for made in admin.create_acls(bindings).values():
            made.result(600)


_ROW: Final = re.compile(
    r"^\| ([\w, ]+?) \| (topic|group|transactional id) \| `([^`]+)` \| ([A-Z_, ]+) \|$", re.M
)
_KINDS: Final = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
}


def _documented(names: dict[str, str]) -> Iterator[tuple[str, Any, str, Any, Any]]:
    known = {key.replace("_", "-"): value for key, value in names.items()}
    for component, kind, name, operations in _ROW.findall(DOC.read_text()):
        prefix = name.endswith("*")
        pattern = ResourcePatternType.PREFIXED if prefix else ResourcePatternType.LITERAL
        for operation in operations.split(", "):
            yield (
                component,
                _KINDS[kind],
                name[:-1] if prefix else known[name],
                pattern,
                AclOperation[operation],
            )


@contextmanager
def secured(directory: Path) -> Iterator[Secured]:
    """A broker that refuses what was not granted."""
    authority = Authority(directory)
    scram, tls = free_port(), free_port()
    kafka = Kafka(directory / "kafka")
    listeners = f"PLAINTEXT://127.0.0.1:{kafka.port},SASL_SSL://127.0.0.1:{scram},SSL://127.0.0.1:{tls}"
    kafka.settings = {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{kafka._controller_port}",
        "advertised.listeners": listeners,
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL,CONTROLLER:PLAINTEXT"
        ),
        # The first that it finds is not the plain one.
        "inter.broker.listener.name": "PLAINTEXT",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "auto.create.topics.enable": "false",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": authority.issue("broker"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": authority.path,
        "listener.name.ssl.ssl.client.auth": "required",
    }
    try:
        kafka.start()
        yield Secured(kafka, authority, f"127.0.0.1:{scram}", f"127.0.0.1:{tls}")
    finally:
        kafka.stop()
