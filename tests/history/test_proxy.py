"""The proxy alone: if the network does not break as configured, every fault test is worthless."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.history.proxy import Proxy


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """In front of a server that says everything twice."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1000):
                    connection.sendall(data * 2)
                connection.sendall(b"bye")
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with Proxy(server.getsockname()[1]) as proxy:
        yield proxy
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def _connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def _says(connection: socket.socket, words: bytes) -> bytes:
    connection.sendall(words)
    return connection.recv(2 * len(words), socket.MSG_WAITALL)


def _is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def _is_refused(proxy: Proxy) -> bool:
    # The reset may come before `connect` returns.
    try:
        with _connect(proxy) as connection:
            return _is_cut(connection)
    except ConnectionError:
        return True


def test_passes_both_ways_and_last_words_too(proxy: Proxy) -> None:
    """Guards against bytes that are lost where nothing is broken, as a server's reason for closing."""
    with _connect(proxy) as connection:
        assert _says(connection, b"ab") == b"abab"
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(3, socket.MSG_WAITALL) == b"bye"
        assert connection.recv(1) == b""
    wait_until(lambda: proxy.connections == 0, what="the connection's end")


def test_cuts_all_and_goes_on(proxy: Proxy) -> None:
    """Guards against a cut that leaves a connection, or lets no new one in."""
    with _connect(proxy) as one, _connect(proxy) as other:
        assert _says(one, b"a") + _says(other, b"b") == b"aabb"
        assert proxy.cut() == 2
        assert _is_cut(one)
        assert _is_cut(other)
    with _connect(proxy) as connection:
        assert _says(connection, b"c") == b"cc"


def test_cuts_one(proxy: Proxy) -> None:
    """Guards against a cut of one session that takes its neighbours with it."""
    with _connect(proxy) as one, _connect(proxy) as other:
        assert _says(one, b"a") + _says(other, b"b") == b"aabb"
        assert proxy.cut(random.Random(1)) == 1
        assert proxy.connections == 1
        dead, alive = (one, other) if _is_cut_soon(one) else (other, one)
        assert _is_cut(dead)
        assert _says(alive, b"c") == b"cc"


def _is_cut_soon(connection: socket.socket) -> bool:
    connection.settimeout(0.5)
    try:
        return _is_cut(connection)
    except TimeoutError:
        return False
    finally:
        connection.settimeout(5)


def test_refuses_new_ones_only(proxy: Proxy) -> None:
    """Guards against a refusal that also cuts what is open, which is another fault."""
    with _connect(proxy) as old:
        assert _says(old, b"a") == b"aa"
        proxy.refuse()
        assert _is_refused(proxy)
        assert _says(old, b"b") == b"bb"
        proxy.heal()
        with _connect(proxy) as new:
            assert _says(new, b"c") == b"cc"


def test_swallows_until_it_is_healed(proxy: Proxy) -> None:
    """Guards against a black hole that answers, or loses what a network would send again."""
    with _connect(proxy) as old:
        assert _says(old, b"a") == b"aa"
        proxy.swallow()
        with _connect(proxy) as new:
            for connection in (old, new):
                connection.sendall(b"b")
                connection.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(5)
            proxy.heal()
            assert old.recv(2, socket.MSG_WAITALL) + new.recv(2, socket.MSG_WAITALL) == b"bbbb"


def test_loses_answers_and_no_questions(proxy: Proxy) -> None:
    """Guards against an answer that arrives late instead of never, and work that is not done."""
    with _connect(proxy) as connection:
        assert _says(connection, b"a") == b"aa"
        proxy.swallow_answers()
        connection.sendall(b"b")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(5)
        proxy.cut()
        proxy.heal()
        assert _is_cut(connection)
        with _connect(proxy) as another:
            assert _says(another, b"c") == b"cc"


def test_is_narrow(proxy: Proxy) -> None:
    """Guards against a throttle that lets everything through at once."""
    with _connect(proxy) as connection:
        proxy.throttle(1_000)
        started = time.monotonic()
        assert _says(connection, b"a" * 100) == b"a" * 200
        assert time.monotonic() - started >= 0.2


def test_delays_both_ways(proxy: Proxy) -> None:
    """Guards against a slow network that is not slow."""
    with _connect(proxy) as connection:
        proxy.delay(0.1)
        started = time.monotonic()
        assert _says(connection, b"a") == b"aa"
        assert time.monotonic() - started >= 0.2


def test_without_a_server_behind_it(proxy: Proxy) -> None:
    """Guards against a proxy that looks alive while its server is down."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()[1]
    with Proxy(nobody) as alone:
        assert _is_refused(alone)
