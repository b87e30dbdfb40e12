"""Dapr's sidecar and an application behind it, both on the loopback address.

Invariants:
- No placement, no scheduler, no name resolution: pub/sub and state alone, on the loopback address.
- The application answers what a test has chosen, and keeps every request.
"""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from outbox_pipelines.local.server import Server, free_port

# Of the components; a test has one of each.
PUBSUB: Final = "events"
STORE: Final = "store"
# By default a sidecar announces itself to the local network. There is no such component: it continues.
_CONFIGURATION: Final = """
apiVersion: dapr.io/v1alpha1
kind: Configuration
metadata: {name: local}
spec: {nameResolution: {component: none}}
"""


@dataclass(frozen=True)
class Request:
    """What the application received: names of headers in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> Any:
        return json.loads(self.body)


# The answer to a request: a status code, and a body that is sent as JSON. Status 0 closes the connection.
Answer = tuple[int, Any]


@dataclass
class App:
    """An application of Dapr: it names its subscriptions and keeps what is posted to it.

    Attributes:
        subscriptions: what it answers at `/dapr/subscribe`.
        answer: chooses the answer to an event; success without one.
        received: every posted request, in the order of arrival.
    """

    subscriptions: list[dict[str, Any]]
    answer: Callable[[Request], Answer] = lambda request: (200, {"status": "SUCCESS"})
    received: list[Request] = field(default_factory=list)

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Serve on a free port of the loopback address, which is yielded."""
        app = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Headers and body are sent together: the second of two small packets waits for an acknowledgment.
            wbufsize = -1

            def do_GET(self) -> None:
                found = self.path == "/dapr/subscribe"
                self._send(200 if found else 404, app.subscriptions if found else {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.path, headers, body)
                app.received.append(request)
                self._send(*app.answer(request))

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _send(self, status: int, value: Any) -> None:
                body = json.dumps(value).encode()
                self.close_connection = not status
                if not status:
                    return
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield server.server_port
            finally:
                server.shutdown()
                thread.join()


class Sidecar(Server):
    """daprd, ready when its API answers: its components are loaded then, and its subscriptions requested.

    Args:
        program: the file of daprd.
        directory: for its log and its components.
        app_port: where the application listens; None for an application that is not attached.
        components: their files, by name.
    """

    name = "daprd"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    def __init__(
        self, program: Path, directory: Path, app_id: str, app_port: int | None, components: Mapping[str, str]
    ) -> None:
        super().__init__(directory)
        self._program = program
        self._app = ["--app-id", app_id, *(["--app-port", str(app_port)] if app_port else [])]
        self._components = components
        self._grpc, self._internal = free_port(), free_port()

    def prepare(self) -> None:
        resources = self.directory / "components"
        resources.mkdir(parents=True)
        for name, text in self._components.items():
            (resources / f"{name}.yaml").write_text(text)
        (self.directory / "config.yaml").write_text(_CONFIGURATION)

    def launch(self) -> None:
        command: list[str | Path] = [self._program, *self._app]
        command += ["--resources-path", self.directory / "components", "--enable-metrics=false"]
        command += ["--config", self.directory / "config.yaml"]
        command += [
            "--dapr-listen-addresses",
            "127.0.0.1",
            "--dapr-internal-grpc-listen-address",
            "127.0.0.1",
        ]
        command += ["--dapr-http-port", str(self.port), "--dapr-grpc-port", str(self._grpc)]
        command += ["--dapr-internal-grpc-port", str(self._internal), "--dapr-graceful-shutdown-seconds", "1"]
        with self._alone() as lock:
            self._spawn([*command, "--disable-builtin-k8s-secret-store"], lock)

    def answers(self) -> bool:
        try:
            return self.call("GET", "/v1.0/healthz")[0] == 204
        except OSError:
            return False

    def call(self, method: str, path: str, value: Any = None) -> tuple[int, bytes]:
        """Call Dapr's HTTP API; return status code and body."""
        body = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


def component(name: str, kind: str, version: str, metadata: Mapping[str, object]) -> str:
    """The file of a component: JSON, which is YAML too."""
    return json.dumps(
        {
            "apiVersion": "dapr.io/v1alpha1",
            "kind": "Component",
            "metadata": {"name": name},
            "spec": {
                "type": kind,
                "version": version,
                "metadata": [{"name": key, "value": str(value)} for key, value in metadata.items()],
            },
        }
    )


def kafka(brokers: str, group: str, **more: object) -> str:
    """The component of Kafka."""
    metadata = {
        "brokers": brokers,
        "authType": "none",
        "consumerGroup": group,
        "initialOffset": "oldest",
        **more,
    }
    return component(PUBSUB, "pubsub.kafka", "v1", metadata)
