"""A schema registry with Confluent's API, asked by Confluent's client.

    consumer = Consumer(…, registry=SchemaRegistry("https://registry:8081"))

Invariants:
- What it answers is in our words: what failed, why, and what to do. No message has a credential in it.
- A registry that does not answer is an `UnavailableError`; one that refuses or is none, a `SetupError`.
- A call takes a limited time, and is made once: who calls decides whether to call again.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from outbox_pipelines import Error
from outbox_pipelines.config.registry_files import FILES, unusable_files
from outbox_pipelines.core.outages import REGISTRY
from outbox_pipelines.core.secret import first_line
from outbox_pipelines.errors import RefusedError, SetupError, UnavailableError
from outbox_pipelines.settings import MessageSettings, load_settings

_Answer = TypeVar("_Answer")
# The registry's own codes of a 404: no such subject, version, schema, level of a subject.
_NOT_THERE: Final = frozenset({40401, 40402, 40403, 40408})
_LONGEST: Final = 500
_BASE64: Final = re.compile("[A-Za-z0-9+/]+=*")
# What a server says of a client's certificate, or of a missing one, by OpenSSL's names of TLS alerts.
_NO_CERTIFICATE: Final = re.compile(
    "ALERT_(BAD_CERT|CERT|UNSUPPORTED_CERT|UNKNOWN_CA|DECRYPT_ERROR|ACCESS_DENIED|HANDSHAKE_FAIL)"
)
# Of one schema; more than any has.
_MOST_IMPORTS: Final = 1000


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject, and the newest document that belongs under it."""

    name: str
    event_type: str
    text: str
    kind: Literal["JSON", "AVRO", "PROTOBUF"] = "JSON"
    """Whether the document is a JSON Schema, an Avro schema, or a file of Protobuf, as registries call it."""
    imports: tuple[Subject, ...] = ()
    """The files of Protobuf that this one needs; their names are what it imports."""
    message: str = ""
    """The full name of the message in a file of Protobuf."""

    def all_imports(self) -> dict[str, str]:
        """Return the texts of all files of Protobuf that this one needs, by their names."""
        texts: dict[str, str] = {}
        for each in self.imports:
            texts |= {each.name: each.text, **each.all_imports()}
        return texts


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest version of a subject."""

    version: int
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """A schema as the registry has it."""

    kind: str
    text: str
    imports: dict[str, str]
    """The texts of all files of Protobuf that this one needs, by what they are imported as."""


class SchemaError(Error):
    """The schema of a value is not in the registry, or is none that can be read."""


class IncompatibleError(SetupError):
    """The registry refuses a schema, which does not fit earlier ones of its subject."""


class InvalidSchemaError(SetupError):
    """The registry takes a schema for none."""


class NoSuchPathError(SetupError):
    """A server does not have the path: it is no registry, or an older one."""


class Registry:
    """The registry that the settings name.

    Args:
        seconds: how long each call may take.

    Raises:
        SetupError: none is named, its client is not installed, or the certificates cannot be read.
    """

    def __init__(self, settings: MessageSettings, *, seconds: float) -> None:
        if not settings.registry_url:
            raise SetupError("no schema registry is named: set OUTBOX_REGISTRY_URL, as https://registry:8081")
        try:
            from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
        except ImportError:
            raise SetupError(
                f"the client of {REGISTRY[4:]} is missing: pip install 'outbox-pipelines[registry]'"
            ) from None
        given: dict[str, Any] = {"url": settings.registry_url, "timeout": seconds, "max.retries": 0}
        if settings.registry_user_info:
            given["basic.auth.user.info"] = settings.registry_user_info.reveal()
        if settings.registry_token:
            given |= {
                "bearer.auth.credentials.source": "STATIC_TOKEN",
                "bearer.auth.token": settings.registry_token.reveal(),
                # Of Confluent Cloud; its client sends them with each token.
                "bearer.auth.logical.cluster": "",
                "bearer.auth.identity.pool.id": "",
            }
        for name, why in unusable_files(settings):
            raise SetupError(f"OUTBOX_{name.upper()} cannot be used: {why}")
        for name, option in FILES.items():
            if (path := getattr(settings, name)) is not None:
                given[f"{option}.location"] = str(path)
        if settings.registry_certificate is not None:
            # Otherwise OpenSSL asks the terminal for the password of an encrypted key.
            given["ssl.key.password"] = ""
        try:
            self._client = SchemaRegistryClient(given)
        except (OSError, ValueError) as error:
            # `ssl.SSLError` is an OSError.
            file = os.environ.get("SSL_CERT_FILE", "")
            raise SetupError(f"SSL_CERT_FILE cannot be used: {file}: {first_line(error)}") from None
        self._schema, self._reference = Schema, SchemaReference
        self._at = f"{REGISTRY} ({settings.registry_url})"

    def find(self, subject: Subject) -> int | None:
        """Return the id of this subject's document; None if the registry does not have it there."""
        found = self._find(subject)
        return None if found is None else found[0]

    def latest(self, subject: Subject) -> Latest | None:
        """Return the newest version of a subject; None if there is none."""

        def ask() -> Latest:
            found = self._client.get_latest_version(subject.name)
            return Latest(int(found.version or 0), str(found.schema.schema_str))

        return self._ask(subject, ask)

    def is_compatible(self, subject: Subject) -> bool | None:
        """Return whether the document fits earlier ones of its subject, by the subject's compatibility.

        None if only an attempt to register it shows that: it imports a file that is not registered, or the
        registry cannot compare compiled files.
        """
        if (document := self._document(subject)) is None:
            return None
        ask = self._client.test_compatibility_all_versions
        try:
            # Without a subject there is nothing that it could break.
            return self._ask(subject, lambda: ask(subject.name, document, True)) is not False
        except InvalidSchemaError:
            if subject.kind == "PROTOBUF":
                return None
            raise

    def compatibility(self, subject: Subject) -> str | None:
        """Return the compatibility that a subject has of its own."""
        return self._ask(subject, lambda: str(self._client.get_compatibility(subject.name)))

    def register(self, subject: Subject, compatibility: str) -> int:
        """Add the document to its subject, which first gets this compatibility if it has none; return its id.

        Raises:
            IncompatibleError: the registry refuses it.
        """
        for each in subject.imports:
            self.register(each, compatibility)
        document = self._document(subject)
        if self.compatibility(subject) is None:
            self._ask(subject, lambda: self._client.set_compatibility(subject.name, compatibility))
        schema_id = self._ask(
            subject, lambda: _id(self._client.register_schema(subject.name, document, True))
        )
        if schema_id is None:
            raise SetupError(f"{self._at} did not register {subject.name}: look into its log")
        return schema_id

    def schema(self, frame: bytes) -> Document | None:
        """Return the schema that a frame names; None if the registry does not have it.

        Args:
            frame: 0 and an id of 4 bytes, or 1 and a GUID of 16.
        """
        name = frame_name(frame)

        def get(**form: str) -> Any:
            if frame[0] == 0:
                return self._client.get_schema(int.from_bytes(frame[1:], "big"), **form)
            return self._client.get_schema_by_guid(name, **form)

        def ask() -> Document:
            found = get()
            imports: dict[str, str] = {}
            self._read_imports(found, imports)
            return Document(str(found.schema_type), _text(found, get), imports)

        try:
            return self._ask(Subject(name, "", ""), ask)
        except NoSuchPathError:
            # A registry without GUIDs does not have the schema, either; what is no registry has no types.
            self._ask(Subject(name, "", ""), lambda: [*map(str, self._client.get_schema_types())])
            return None

    def _read_imports(self, schema: Any, texts: dict[str, str]) -> None:
        for each in schema.references or ():
            if each.name not in texts and len(texts) < _MOST_IMPORTS:
                get = partial(self._client.get_version, each.subject, each.version)
                found = get().schema
                texts[str(each.name)] = _text(found, lambda **form: get(**form).schema)  # noqa: B023 - at once
                self._read_imports(found, texts)

    def _find(self, subject: Subject) -> tuple[int, int] | None:
        """Return the id and the version of this subject's document."""
        document = self._document(subject)

        def ask() -> tuple[int, int]:
            found = self._client.lookup_schema(subject.name, document, True)
            return _id(found.schema_id), int(found.version or 0)

        return None if document is None else self._ask(subject, ask)

    def _document(self, subject: Subject) -> Any:
        """Return what the client sends; None if a file that it imports is not registered."""
        references = []
        for each in subject.imports:
            if (found := self._find(each)) is None:
                return None
            references.append(self._reference(each.name, each.name, found[1]))
        return self._schema(subject.text, subject.kind, references)

    def _ask(self, subject: Subject, ask: Callable[[], _Answer]) -> _Answer | None:
        """Return an answer; None if the registry does not have what it is asked for."""
        from confluent_kafka.schema_registry import SchemaRegistryError

        try:
            return ask()
        except SchemaRegistryError as error:
            if error.http_status_code == 404 and error.error_code in _NOT_THERE:
                return None
            raise self._refusal(subject.name, error) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            # Of the client, which takes each answer for JSON of a registry.
            raise SetupError(f"{self._at} {_NO_REGISTRY}") from None
        except Exception as error:  # noqa: BLE001 - of the library that the client connects with
            cause = first_line(error)
            if "CERTIFICATE_VERIFY_FAILED" in cause:
                raise RefusedError(
                    f"{self._at} has a certificate that cannot be verified: name those of its authority in "
                    "OUTBOX_REGISTRY_CA"
                ) from None
            if _NO_CERTIFICATE.search(cause):
                raise RefusedError(
                    f"{self._at} refuses the TLS connection ({cause}): name a client certificate that it "
                    "trusts in OUTBOX_REGISTRY_CERTIFICATE"
                ) from None
            raise UnavailableError(f"{self._at} is unavailable: {cause or type(error).__name__}") from None

    def _refusal(self, subject: str, error: Any) -> SetupError:
        status = error.http_status_code
        said = " ".join(str(error.error_message or "").split())
        # -1: the answer is not JSON, and the client's message repeats it.
        said = "" if error.error_code == -1 or not said else f": {said[:_LONGEST]}"
        if status == 401:
            return RefusedError(
                f"{self._at} answers with HTTP 401 (unauthorized): correct OUTBOX_REGISTRY_USER_INFO or "
                "OUTBOX_REGISTRY_TOKEN"
            )
        if status == 403:
            return RefusedError(f"{self._at} denies access to subject {subject}: grant it to this user{said}")
        if status == 409:
            return IncompatibleError(f"{self._at} refuses the schema of {subject}{said}")
        if status == 422:
            return InvalidSchemaError(f"{self._at} takes the schema of {subject} for invalid{said}")
        if status in (408, 429) or status >= 500:
            return UnavailableError(f"{self._at} answers with HTTP {status} about subject {subject}{said}")
        kind = NoSuchPathError if status == 404 else SetupError
        return kind(f"{self._at} {_NO_REGISTRY} (HTTP {status})")


_NO_REGISTRY: Final = (
    "does not answer as a schema registry: correct OUTBOX_REGISTRY_URL, also its path (Apicurio's is "
    "/apis/ccompat/v7)"
)


# Ids, and GUIDs.
_ONLY_SOME: Final = ("", ", in a version that has GUIDs")


def frame_name(frame: bytes) -> str:
    """Return the id or the GUID of a frame, as text."""
    return str(int.from_bytes(frame[1:], "big") if frame[0] == 0 else uuid.UUID(bytes=frame[1:]))


class SchemaRegistry:
    """The registry of a `Consumer` for values in Avro and Protobuf; can be used by several threads.

    Args:
        url: its address. What is not given has the value of its setting, such as OUTBOX_REGISTRY_URL.
        user_info: user and password, `user:password`.
        token: its bearer token.
        ca: the file with certificates (PEM) that verify its certificate.
        certificate: the file with the client's certificate (PEM).
        key: the file with its private key (PEM), if that is not in the same file.
        timeout: seconds after which a request fails.

    Raises:
        SetupError: no address is given, an argument is invalid, or a package is not installed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        user_info: str | None = None,
        token: str | None = None,
        ca: Path | str | None = None,
        certificate: Path | str | None = None,
        key: Path | str | None = None,
        timeout: float = 5.0,
    ) -> None:
        settings = load_settings(
            registry_url=url,
            registry_user_info=user_info,
            registry_token=token,
            registry_ca=ca,
            registry_certificate=certificate,
            registry_key=key,
        )
        self._registry = Registry(settings, seconds=timeout)
        # They need packages that others do not have.
        from outbox_pipelines.formats.avro import decoding as avro
        from outbox_pipelines.formats.protobuf import decoding as protobuf

        self._avro_reader, self._protobuf_reader = avro.reader, protobuf.reader
        self._url = settings.registry_url
        self._known: dict[bytes, Callable[[bytes], Any] | None] = {}

    def knows(self, frame: bytes) -> bool:
        """Return whether `reader` returns without a request."""
        return frame in self._known

    def reader(self, frame: bytes) -> Callable[[bytes], Any] | None:
        """Return what reads values with this frame; None for JSON. The function raises `ValueError`.

        Raises:
            SetupError: the registry refuses, or as `UnavailableError` does not answer.
            SchemaError: it does not have the schema, or it is one that cannot be read.
        """
        if frame not in self._known:
            found = self._registry.schema(frame)
            if found is None:
                raise SchemaError(
                    f"the schema {frame_name(frame)} is not in the schema registry {self._url}: name the "
                    f"registry of the producer{_ONLY_SOME[frame[0]]}, and replay the event if it is a dead "
                    "letter"
                )
            self._known[frame] = self._reader(frame, found)
        return self._known[frame]

    def _reader(self, frame: bytes, found: Document) -> Callable[[bytes], Any] | None:
        if found.kind == "JSON":
            return None
        try:
            if found.kind == "AVRO":
                return self._avro_reader(found.text)
            if found.kind == "PROTOBUF":
                return self._protobuf_reader(found.text, found.imports)
        except ValueError as error:
            raise SchemaError(f"the schema {frame_name(frame)} {error}") from None
        raise SchemaError(f"the schema {frame_name(frame)} is for {found.kind}, which is not read")


def _text(found: Any, get: Callable[..., Any]) -> str:
    """Return the text of a schema; of Protobuf as base64, which some registries have on request alone.

    Others cannot convert what they have as base64.
    """
    text = str(found.schema_str)
    if found.schema_type == "PROTOBUF" and not _BASE64.fullmatch(text):
        text = str(get(fmt="serialized").schema_str)
    return text


def _id(given: Any) -> int:
    # It must fit the 4 bytes in front of a value.
    if type(given) is not int or not 0 <= given < 1 << 32:
        raise ValueError
    return given
