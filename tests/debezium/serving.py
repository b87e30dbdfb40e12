"""An HTTP server of a thread, whose answers a function gives: for what plays a worker of Kafka Connect."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """What was asked."""

    method: str
    path: str
    body: Any
    """From JSON; None if there was none."""
    login: str | None


@contextmanager
def serving(answer: Callable[[Asked], tuple[int, str]], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve for the length of the block, at this URL.

    Args:
        answer: returns status and body; called in a thread for each connection.
    """

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            status, text = answer(Asked(self.command, self.path, body, self.headers["Authorization"]))
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:
                # Who asked was killed.
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that does not trust the certificate."""

    server = Quiet(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
