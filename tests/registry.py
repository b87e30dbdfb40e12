"""A schema registry of a few dozen lines, to inject faults; tests/interop has a real one."""

from __future__ import annotations

import json
import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

_NOT_THERE = {"subject": 40401, "version": 40402, "schema": 40403, "level": 40408}


@dataclass
class FakeRegistry:
    """What it has, what it was asked for, and how it fails."""

    url: str = ""
    subjects: dict[str, list[str]] = field(default_factory=dict)
    """By name: its documents, oldest first."""
    ids: dict[str, int] = field(default_factory=dict)
    """By document."""
    levels: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    authorization: str | None = None
    """Header of the last request."""
    fails: tuple[int, str] | None = None
    """Status and body of each answer, for as long as it is set."""
    hangs: threading.Event | None = None
    """What each answer waits for."""
    kinds: dict[str, str] = field(default_factory=dict)
    """By document."""
    has_guids: bool = True
    references: dict[str, list[Any]] = field(default_factory=dict)
    """By document."""

    def add(self, subject: str, text: str, kind: str = "JSON") -> int:
        """Register a document."""
        self.kinds[text] = kind
        documents = self.subjects.setdefault(subject, [])
        if text not in documents:
            documents.append(text)
        return self.ids.setdefault(text, len(self.ids) + 1)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        kind, *rest = [unquote(part) for part in path.strip("/").split("/")]
        text, given = str((body or {}).get("schema")), str((body or {}).get("schemaType", "AVRO"))
        if method == "POST" and (body or {}).get("references"):
            self.references[text] = body["references"]
        match method, kind, rest:
            case "GET", "schemas", ["ids" | "guids" as way, name] if way == "ids" or self.has_guids:
                found = [text for text, one in self.ids.items() if name in (str(one), _guid(text))]
                return (200, self._known(found[0])) if found else _missing("schema")
            case "GET", "schemas", ["types"]:
                return 200, ["JSON", "AVRO", "PROTOBUF"]
            case "POST", "subjects", [subject, "versions"]:
                if self._is_narrower(subject, text):
                    return 409, {"error_code": 409, "message": "is incompatible with an earlier schema"}
                return 200, {"id": self.add(subject, text, given), "guid": _guid(text)}
            case "POST", "subjects", [subject]:
                if text not in self.subjects.get(subject, []):
                    return _missing("schema" if subject in self.subjects else "subject")
                version = self.subjects[subject].index(text) + 1
                return 200, {"subject": subject, "version": version, "id": self.ids[text], "schema": text}
            case "GET", "subjects", [subject, "versions", "latest"]:
                if subject not in self.subjects:
                    return _missing("subject")
                documents = self.subjects[subject]
                return 200, {"subject": subject, "version": len(documents), **self._known(documents[-1])}
            case "GET", "subjects", [subject, "versions", version]:
                known = self._known(self.subjects[subject][int(version) - 1])
                return 200, {"subject": subject, "version": int(version), **known}
            case "POST", "compatibility", ["subjects", subject, "versions"]:
                return 200, {"is_compatible": not self._is_narrower(subject, text)}
            case "GET", "config", [subject]:
                level = self.levels.get(subject)
                return (200, {"compatibilityLevel": level}) if level else _missing("level")
            case "PUT", "config", [subject]:
                self.levels[subject] = body["compatibility"]
                return 200, body
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _known(self, text: str) -> dict[str, Any]:
        about = {"schemaType": self.kinds[text], "references": self.references.get(text, [])}
        return {"schema": text, "id": self.ids[text], **about}

    def _is_narrower(self, subject: str, text: str) -> bool:
        documents = self.subjects.get(subject)
        if documents and self.kinds[documents[-1]] == "PROTOBUF":
            return False
        if not documents or self.levels.get(subject) == "NONE":
            return False
        before, after = (_required(json.loads(each)) for each in (documents[-1], text))
        return not after <= before


def _guid(text: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, text))


def _required(schema: Any) -> set[str]:
    fields = {each["name"] for each in schema.get("fields", ()) if "default" not in each}
    return fields | set(schema.get("required", ()))


def _missing(what: str) -> tuple[int, Any]:
    return 404, {"error_code": _NOT_THERE[what], "message": f"{what} not found"}


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[FakeRegistry]:
    """Serve a registry on the loopback address for as long as the block runs; with a context, by TLS."""
    registry = FakeRegistry()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = urlsplit(self.path).path
            registry.asked.append(f"{self.command} {path}")
            registry.authorization = self.headers.get("Authorization")
            if registry.hangs is not None:
                registry.hangs.wait(30)
            if registry.fails is not None:
                status, text = registry.fails
            else:
                status, found = registry.answer(self.command, path, json.loads(body) if body else None)
                text = json.dumps(found)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PUT = do  # noqa: N815

        def handle(self) -> None:
            with suppress(ssl.SSLError, ConnectionError):
                super().handle()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        registry.url = f"http{'s' if context else ''}://127.0.0.1:{server.server_port}"
        if context is not None:
            # The thread of a connection does the handshake: one that fails ends no other.
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield registry
        finally:
            if registry.hangs is not None:
                registry.hangs.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    """A registry of the test's own."""
    with serving() as found:
        yield found
