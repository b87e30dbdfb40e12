"""A port on 127.0.0.1 that leads to another one and passes everything on later, like a server far away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def slow_link(target: int, seconds: float) -> Iterator[int]:
    """Yield a port that leads to the port `target`; each direction takes `seconds` longer."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", target))
                for end, other in ((client, server), (server, client)):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    ends.append(end)
                    threading.Thread(target=_pass_on, args=(end, other, seconds), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        _close(listener)
        accepting.join()
        for end in ends:
            _close(end)


def _pass_on(source: socket.socket, to: socket.socket, seconds: float) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            time.sleep(seconds)
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


def _close(end: socket.socket) -> None:
    # A thread that waits for the socket is woken by this, not by `close`.
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
