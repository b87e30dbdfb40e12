"""A registry of metrics over HTTP, for Prometheus to read.

Invariants:
- No client holds more than one of `CONNECTIONS` threads, and none for longer than it takes to ask.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app

from outbox_pipelines.errors import SetupError

# A client that says nothing for so long is not heard.
SILENT: Final = 5.0
CONNECTIONS: Final = 32


@contextmanager
def serving(registry: CollectorRegistry, address: str, port: int) -> Iterator[str]:
    """Serve a registry as long as the block, and yield its URL.

    Args:
        port: 0 for any that is free.

    Raises:
        SetupError: the port cannot be had.
    """
    # Else each counter has a twin that tells when it was made.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        server = _Server((address, port), _Handler)
    except OSError as error:
        raise SetupError(
            f"OUTBOX_METRICS_PORT={port}: {address} cannot be listened at ({error.strerror}): "
            "name a free port, and in OUTBOX_METRICS_ADDRESS an address of this machine"
        ) from None
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, name="outbox-metrics-port", daemon=True)
    thread.start()
    try:
        yield f"http://{_host(address)}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class _Handler(WSGIRequestHandler):
    """Answers one request, and waits for it `SILENT` at most."""

    timeout = SILENT

    def log_message(self, format: str, *arguments: object) -> None:
        """A scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    """Has at most `CONNECTIONS` at once: a client must not take all threads of the process."""

    daemon_threads = True
    # A client that hangs at the end is left.
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
        """A client that goes away is no error of ours."""
