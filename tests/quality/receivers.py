"""What takes messages on the loopback address: a webhook, and a mail server, as far as a client needs one."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any


class Webhook:
    """What was posted."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.port = 0

    @property
    def address(self) -> str:
        """As apprise takes it."""
        return f"json://127.0.0.1:{self.port}/secret-token"


@contextmanager
def webhook() -> Iterator[Webhook]:
    received = Webhook()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(received.status)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.port = server.server_port
    with _serving(server):
        yield received


class MailBox:
    """What was mailed."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []
        self.port = 0
        self.refuses = ""
        """What is said to each recipient, if any."""

    @property
    def address(self) -> str:
        """As apprise takes it."""
        return f"mailto://127.0.0.1:{self.port}?from=outbox@example.com&to=operator@example.com&mode=insecure"


@contextmanager
def mail_box() -> Iterator[MailBox]:
    received = MailBox()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self._say("220 here")
            for line in self.rfile:
                verb = line.split()[0].upper()
                if verb == b"DATA":
                    self._say("354 go on")
                    received.mails.append(self._mail())
                if verb == b"RCPT" and received.refuses:
                    self._say(received.refuses)
                    continue
                self._say("221 bye" if verb == b"QUIT" else "250 ok")
                if verb == b"QUIT":
                    return

        def _mail(self) -> EmailMessage:
            lines = iter(self.rfile.readline, b".\r\n")
            text = b"".join(line.removeprefix(b".") if line.startswith(b"..") else line for line in lines)
            mail = message_from_bytes(text, policy=policy.default)
            assert isinstance(mail, EmailMessage)
            return mail

        def _say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    received.port = server.server_address[1]
    with _serving(server):
        yield received


@contextmanager
def _serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
