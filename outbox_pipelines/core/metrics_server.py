"""Serves a registry of metrics over HTTP, for Prometheus; and /healthz and /readyz, for supervisors.

Invariants:
- /healthz and /readyz ask no server: no outage fails them.
- There are at most `CONNECTIONS` threads; a silent client loses its thread after `SILENT` seconds.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)

from outbox_pipelines.errors import SetupError

# Seconds after which a client that sends nothing is disconnected.
SILENT: Final = 5.0
CONNECTIONS: Final = 32


@contextmanager
def serving(
    registry: CollectorRegistry, address: str, port: int, is_ready: Callable[[], bool] = lambda: True
) -> Iterator[str]:
    """Serve a registry while the block runs, with metrics of the process itself; yield its URL.

    Args:
        port: 0 for any free port.
        is_ready: whether /readyz succeeds.

    Raises:
        SetupError: the port cannot be opened.
    """
    # Otherwise each counter has a second metric with its creation time.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    ProcessCollector(registry=registry)
    build = Gauge("outbox_build_info", "1, with the version of the package", ["version"], registry=registry)
    build.labels(version("outbox-pipelines")).set(1)
    try:
        server = _Server((address, port), _Handler)
    except OSError as error:
        raise SetupError(
            f"OUTBOX_METRICS_PORT={port}: cannot listen on {address} ({error.strerror}): "
            "set a free port, and in OUTBOX_METRICS_ADDRESS an address of this host"
        ) from None
    server.set_app(_app(registry, is_ready))
    thread = threading.Thread(target=server.serve_forever, name="outbox-metrics-port", daemon=True)
    thread.start()
    try:
        yield f"http://{_host(address)}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _app(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> Callable[..., Any]:
    metrics = make_wsgi_app(registry)
    checks = {"/healthz": lambda: True, "/readyz": is_ready}

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        check = checks.get(environ["PATH_INFO"])
        if check is None:
            return metrics(environ, start)
        status, body = ("200 OK", b"ok\n") if check() else ("503 Service Unavailable", b"not ready\n")
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [body]

    return app


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class _Handler(WSGIRequestHandler):
    """Answers one request; waits for it `SILENT` seconds at most."""

    timeout = SILENT

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: scrapes are routine."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves at most `CONNECTIONS` clients at once, to limit the threads of the process."""

    daemon_threads = True
    # At the end, do not wait for a client that hangs.
    block_on_close = False

    def __init__(self, place: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(place, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that disconnects is not a problem of the server."""
