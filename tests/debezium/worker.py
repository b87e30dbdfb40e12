"""A tiny HTTP server that answers as a worker of Kafka Connect: `answers.json` was recorded from one."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("answers.json").read_text())


@dataclass
class Asked:
    """What was asked."""

    method: str
    path: str
    body: Any
    login: str | None


@dataclass
class FakeWorker:
    """Its URL, what to answer (the last answer stays), and what was asked."""

    url: str
    answers: dict[str, list[dict[str, Any]]]
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def answering(
    tls: ssl.SSLContext | None = None, **answers: list[str | dict[str, Any]]
) -> Iterator[FakeWorker]:
    """A worker with answers by the end of the path or by method (`get`, …): recorded ones or others."""
    texts = {name: [ANSWERS[x] if isinstance(x, str) else x for x in each] for name, each in answers.items()}

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            worker.asked.append(Asked(self.command, self.path, body, self.headers["Authorization"]))
            last = self.path.split("?")[0].rpartition("/")[2]
            left = texts.get(last) or texts[self.command.lower()]
            answer = left.pop(0) if len(left) > 1 else left[0]
            sent = answer["body"]
            text = (sent if isinstance(sent, str) else json.dumps(sent)).encode()
            self.send_response(answer["status"])
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that does not trust the certificate."""

    server = Quiet(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    scheme = "http" if tls is None else "https"
    worker = FakeWorker(f"{scheme}://127.0.0.1:{server.server_port}", texts)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
