"""A TCP proxy on 127.0.0.1 that plays a broken network between two programs.

Invariants:
- Bytes that were taken are passed on in order or not at all: a connection is cut, never garbled.
- A black hole keeps what it swallowed and passes it on when it is healed, as a network that comes back does.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from outbox_pipelines.local.server import free_port

# A connection that is closed with this says "reset" instead of "end".
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Passes connections on to a port, until it gets an order to do worse."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._questions = threading.Event()
        self._answers = threading.Event()
        self._forgotten: list[threading.Event] = []
        self._refuses = False
        self.refused = 0
        """Connections that were reset at once."""
        self._delay = 0.0
        self._rate: float | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._pairs: list[Pair] = []
        self._threads: list[threading.Thread] = []
        self.port = free_port()
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self._listener.settimeout(0.2)
        self.heal()
        self._start(self._accept)

    def heal(self) -> None:
        """Passes everything on at once, from now on."""
        self._refuses, self._delay, self._rate = False, 0.0, None
        self._questions.set()
        self._answers.set()

    def refuse(self) -> None:
        """Resets every new connection; those that are open go on."""
        self._refuses = True

    def swallow(self) -> None:
        """A black hole: accepts connections and bytes, and passes nothing on."""
        self._questions.clear()
        self._answers.clear()

    def swallow_answers(self) -> None:
        """Passes on what clients say, and nothing of what the server answers. Where it is cut before it is
        healed, the answers are lost although the work was done."""
        self._answers.clear()

    def forget(self) -> None:
        """Passes nothing on of the open connections, as a pooler that has lost them; new ones pass."""
        self.swallow()
        self._forgotten += [self._questions, self._answers]
        self._questions, self._answers = threading.Event(), threading.Event()
        self.heal()

    def forget_one(self, port: int) -> None:
        """The same for one connection: that of this port, as the server sees it."""
        with self._lock:
            (pair,) = [each for each in self._pairs if each.server.getsockname()[1] == port]
        pair.passes.clear()

    def delay(self, seconds: float) -> None:
        """Passes whatever comes on so much later."""
        self._delay = seconds

    def throttle(self, rate: float) -> None:
        """Passes on so many bytes a second, in each direction of each connection."""
        self._rate = rate

    def cut(self, chance: random.Random | None = None) -> int:
        """Resets all connections, or one that chance chooses; returns how many."""
        with self._lock:
            pairs = [chance.choice(self._pairs)] if chance and self._pairs else list(self._pairs)
        for pair in pairs:
            self._drop(pair)
        return len(pairs)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._pairs)

    def close(self) -> None:
        """Ends it, with everything in it."""
        self._closed.set()
        with self._lock:
            passing = [each.passes for each in self._pairs]
        for flows in (*self._forgotten, *passing, self._questions, self._answers):
            flows.set()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=run, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                if self._refuses:
                    self.refused += 1
                    raise ConnectionRefusedError
                server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                reset(client)
                continue
            for end in (client, server):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = Pair(client, server)
            with self._lock:
                self._pairs.append(pair)
            self._start(self._pump, pair, client, server, self._questions)
            self._start(self._pump, pair, server, client, self._answers)

    def _pump(self, pair: Pair, source: socket.socket, to: socket.socket, flows: threading.Event) -> None:
        with suppress(OSError):
            for data in self._pieces(pair, source):
                self._closed.wait(self._delay)
                if (rate := self._rate) is not None:
                    self._closed.wait(len(data) / rate)
                flows.wait()
                pair.passes.wait()
                to.sendall(data)
            # Last words go on: a server says why it closes, and the other direction ends on its own.
            to.shutdown(socket.SHUT_WR)
            pair.half_closed.append(source)
            if len(pair.half_closed) < 2:
                return
        self._drop(pair)

    def _pieces(self, pair: Pair, source: socket.socket) -> Iterator[bytes]:
        """What one end says, to its last word."""
        while data := source.recv(65_536):
            yield data

    def _drop(self, pair: Pair) -> None:
        with self._lock:
            if pair not in self._pairs:
                return
            self._pairs.remove(pair)
        for end in (pair.client, pair.server):
            reset(end)


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(eq=False)
class Pair:
    """One connection: its two ends, and those of them that said that they are done."""

    client: socket.socket
    server: socket.socket
    half_closed: list[socket.socket] = field(default_factory=list)
    passes: threading.Event = field(default_factory=_set)


def reset(end: socket.socket) -> None:
    """Close a connection as if it were broken."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        # The thread that reads from it wakes up by this, not by `close`.
        end.shutdown(socket.SHUT_RDWR)
    end.close()
