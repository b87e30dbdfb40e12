"""Proxies before brokers that see whole requests, and make some of a kind come late.

A client asks again when its connection breaks. What it asked first may still be in the network; the broker
takes it when it comes, from whatever connection.

Invariants:
- The bytes of one connection stay in order: a late request is the last one of its connection.
- A request arrives whole, at most once for each time that the client asked.
- What is still held when the network is healed is passed on then.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from tests.history.proxy import Pair, Proxy, reset

PRODUCE, FIND, INIT, ADD = "Produce", "FindCoordinator", "InitProducerId", "AddPartitionsToTxn"
COMMIT, ABORT = "EndTxn commit", "EndTxn abort"
_NAMES: Final[Mapping[int, str]] = {0: PRODUCE, 10: FIND, 22: INIT, 24: ADD}
_END_TXN: Final = 26
# Ends of late requests that stay open: a broker that sees the end might not do what it was asked.
_OPEN: Final = 20


@dataclass(eq=False)
class Late:
    """A request that is to come late: the client's connection breaks, and the request is passed on later."""

    name: str
    skip: int = 0
    """How many of the kind pass before it."""
    moments: tuple[str, ...] = ()
    """The kinds that must pass in this order, through any connection, before it is passed on."""
    seconds: float = 0.0
    """From the last of those until it is passed on."""
    pause: float = 0.0
    """How long the connection of the last moment is slow then: the late one overtakes what follows."""
    arrives: bool = False
    """It comes at once and its answer is lost: the moments do not matter."""
    again: Callable[[], Late] | None = None
    """The next one, when this one has come."""
    _deliver: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def is_held(self) -> bool:
        return self._deliver is not None


class Requests:
    """The requests through all proxies before a cluster, and what is to be done to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: list[Late] = []
        self._slow: Mapping[str, float] = {}
        self._calling = threading.Lock()
        self._at: dict[str, Callable[[KafkaProxy], None]] = {}
        self.seen: Counter[str] = Counter()
        """All of them, by kind."""
        self.came_late: Counter[str] = Counter()
        """Those that were passed on late, or whose answer was lost."""

    def delay(self, late: Late) -> None:
        """Have a request come late, once."""
        with self._lock:
            self._late.append(late)

    def slow(self, seconds: Mapping[str, float]) -> None:
        """Have each request of these kinds wait for so long, with what is behind it."""
        self._slow = seconds

    @contextmanager
    def at(self, name: str, do: Callable[[KafkaProxy], None]) -> Iterator[None]:
        """Within the block, call back right after the next request of the kind was passed on, once.

        Args:
            do: gets the proxy that the request went through.
        """
        self._at[name] = do
        try:
            yield
        finally:
            # What has begun ends within the block.
            with self._calling:
                self._at.pop(name, None)

    def heal(self) -> None:
        """Pass on what is held, and everything at once from now on."""
        with self._lock:
            held, self._late, self._slow = self._late, [], {}
        for late in held:
            self._pass_on(late)

    def take(self, name: str, deliver: Callable[[], None]) -> Late | None:
        """Count a request; keep it, and return the order for that, if it is to be late.

        Args:
            deliver: passes it on.
        """
        with self._lock:
            self.seen[name] += 1
            for late in self._late:
                if late.name == name and not late.is_held:
                    if late.skip == 0:
                        late._deliver = deliver
                        return late
                    late.skip -= 1
        return None

    def given_up(self, late: Late) -> None:
        """The client of a request that was kept has lost its connection: it gets no answer any more."""
        if late.arrives or not late.moments:
            self._later(late)

    def before(self, name: str) -> float:
        """How long a request of this kind waits."""
        return self._slow.get(name, 0.0)

    def passed(self, name: str, proxy: KafkaProxy) -> float:
        """A request was passed on: returns how long its connection is slow from now on."""
        if name in self._at:
            with self._calling:
                if (do := self._at.pop(name, None)) is not None:
                    do(proxy)
        pause = 0.0
        with self._lock:
            due = []
            for late in self._late:
                if late.is_held and late.moments and late.moments[0] == name:
                    late.moments = late.moments[1:]
                    if not late.moments:
                        due.append(late)
        for late in due:
            pause = max(pause, late.pause)
            self._later(late)
        return pause

    def _later(self, late: Late) -> None:
        timer = threading.Timer(0.0 if late.arrives else late.seconds, self._pass_on, [late])
        timer.daemon = True
        timer.start()

    def _pass_on(self, late: Late) -> None:
        with self._lock:
            deliver, late._deliver = late._deliver, None
            if late in self._late:
                self._late.remove(late)
                if late.again is not None:
                    self._late.append(late.again())
            if deliver is not None:
                self.came_late[late.name] += 1
        if deliver is not None:
            # The broker may be gone by now.
            with suppress(OSError):
                deliver()


class KafkaProxy(Proxy):
    """A proxy before a broker."""

    def __init__(self, target: int, requests: Requests) -> None:
        self._requests = requests
        self._open: deque[socket.socket] = deque()
        super().__init__(target)

    def close(self) -> None:
        while self._open:
            reset(self._open.popleft())
        super().close()

    def _pieces(self, pair: Pair, source: socket.socket) -> Iterator[bytes]:
        pieces = super()._pieces(pair, source)
        return pieces if source is pair.server else self._questions_of(pair, pieces)

    def _questions_of(self, pair: Pair, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for request in whole(pieces):
            name = name_of(request)
            if (late := self._requests.take(name, partial(pair.server.sendall, request))) is not None:
                self._give_up(pair)
                self._requests.given_up(late)
                raise ConnectionAbortedError
            self._closed.wait(self._requests.before(name))
            yield request
            self._closed.wait(self._requests.passed(name, self))

    def _give_up(self, pair: Pair) -> None:
        """Reset the connection for the client, and keep it for the server."""
        with self._lock:
            if pair in self._pairs:
                self._pairs.remove(pair)
                self._open.append(pair.server)
            ends = [self._open.popleft() for _ in range(len(self._open) - _OPEN)]
        for end in (pair.client, *ends):
            reset(end)


def whole(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Requests, each with its size before it, from a stream of bytes."""
    left = bytearray()
    for piece in pieces:
        left += piece
        while len(left) >= 4 and len(left) >= (size := 4 + struct.unpack_from(">i", left)[0]):
            yield bytes(left[:size])
            del left[:size]


def name_of(request: bytes) -> str:
    """The kind of a request; a transaction's end by what it asks for."""
    key, version = struct.unpack_from(">hh", request, 4)
    if key == _END_TXN:
        # Newer versions end with the number of tagged fields, which is 0.
        return COMMIT if request[-1 if version < 3 else -2] else ABORT
    return _NAMES.get(key, f"request {key}")
