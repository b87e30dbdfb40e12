"""The proxy of requests alone: if none comes late as ordered, no history shows what late requests do."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.history.requests import ABORT, ADD, COMMIT, PRODUCE, KafkaProxy, Late, Requests, name_of, whole

_KEYS = {PRODUCE: 0, ADD: 24, COMMIT: 26, ABORT: 26}


def _request(name: str, words: bytes = b"", version: int = 1) -> bytes:
    last = {COMMIT: b"\x01", ABORT: b"\x00"}.get(name, b"") + (b"\x00" if version >= 3 else b"")
    body = struct.pack(">hhi", _KEYS[name], version, 7) + words + last
    return struct.pack(">i", len(body)) + body


class Broker:
    """Takes requests down, and answers each with itself."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                for request in whole(iter(lambda: connection.recv(1000), b"")):
                    self.asked.append(request)
                    connection.sendall(request)
        except OSError:
            return

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.close()


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def proxy(broker: Broker, requests: Requests) -> Iterator[KafkaProxy]:
    with KafkaProxy(broker.port, requests) as proxy:
        yield proxy


def _connect(proxy: KafkaProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def _ask(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    return _receive(connection, len(request))


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size and (some := connection.recv(size)):
        received += some
    return received


def _is_reset(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_passes_requests_whole_and_in_order(broker: Broker, proxy: KafkaProxy, requests: Requests) -> None:
    """Guards against requests that are lost, cut or mixed up where nothing is ordered."""
    words = [_request(PRODUCE, b"a" * 3000), _request(ADD), _request(COMMIT), _request(PRODUCE, b"b")]
    with _connect(proxy) as connection:
        stream = b"".join(words)
        for start in range(0, len(stream), 700):
            connection.sendall(stream[start : start + 700])
        assert _receive(connection, len(stream)) == stream
    assert broker.asked == words
    assert requests.seen == {PRODUCE: 2, ADD: 1, COMMIT: 1}


def test_a_request_comes_at_its_moment(broker: Broker, proxy: KafkaProxy, requests: Requests) -> None:
    """Guards against a late request that comes early, not at all, twice, or with the client's connection."""
    late = Late(COMMIT, skip=1, moments=(COMMIT, ADD, PRODUCE), seconds=0.01, pause=1)
    requests.delay(late)
    first, again, next_one = _request(COMMIT, b"first"), _request(COMMIT, b"again"), _request(PRODUCE, b"1")
    with _connect(proxy) as one, _connect(proxy) as other:
        passes = _ask(one, _request(COMMIT))
        one.sendall(first)
        assert _is_reset(one)
        assert late.is_held
        for request in (_request(PRODUCE), _request(ADD), again, _request(ADD), next_one):
            assert _ask(other, request) == request
        # What follows the moment on its connection is overtaken.
        assert _ask(other, _request(PRODUCE, b"2")) == _request(PRODUCE, b"2")
    assert broker.asked[0] == passes
    assert broker.asked[4] == _request(ADD)
    # Connections have no order among them.
    assert sorted(broker.asked[5:7]) == sorted([next_one, first])
    assert broker.asked[7:] == [_request(PRODUCE, b"2")]
    assert requests.came_late == {COMMIT: 1}


def test_requests_of_several_brokers_are_seen_together(broker: Broker, requests: Requests) -> None:
    """Guards against a moment that never comes, since the coordinator is not the leader."""
    requests.delay(Late(COMMIT, moments=(COMMIT, PRODUCE)))
    with KafkaProxy(broker.port, requests) as coordinator, KafkaProxy(broker.port, requests) as leader:
        with _connect(coordinator) as one:
            one.sendall(_request(COMMIT, b"first"))
            assert _is_reset(one)
        with _connect(coordinator) as one, _connect(leader) as other:
            _ask(one, _request(COMMIT))
            assert len(broker.asked) == 1
            _ask(other, _request(PRODUCE))
            wait_until(lambda: len(broker.asked) == 3, what="the late request")
    assert _request(COMMIT, b"first") in broker.asked


def test_a_request_whose_answer_is_lost(broker: Broker, proxy: KafkaProxy, requests: Requests) -> None:
    """Guards against a client that gets the answer, or a broker that is not asked."""
    requests.delay(Late(PRODUCE, arrives=True))
    with _connect(proxy) as connection:
        connection.sendall(_request(PRODUCE))
        assert _is_reset(connection)
    wait_until(lambda: broker.asked == [_request(PRODUCE)], what="the request")
    with _connect(proxy) as connection:
        assert _ask(connection, _request(PRODUCE)) == _request(PRODUCE)


def test_one_after_the_other(broker: Broker, proxy: KafkaProxy, requests: Requests) -> None:
    """Guards against a fault that ends with its first request."""
    requests.delay(Late(ADD, arrives=True, again=lambda: Late(PRODUCE, arrives=True)))
    for n, name in enumerate((ADD, PRODUCE), 1):
        with _connect(proxy) as connection:
            connection.sendall(_request(name))
            assert _is_reset(connection)
        wait_until(lambda: len(broker.asked) == n, what="the request")  # noqa: B023 - waits here


def test_passes_on_what_is_held_when_it_is_healed(
    broker: Broker, proxy: KafkaProxy, requests: Requests
) -> None:
    """Guards against a request that never comes, which is another fault, and one that is held afterwards."""
    requests.delay(Late(COMMIT, moments=(PRODUCE,), again=lambda: Late(COMMIT, moments=(PRODUCE,))))
    with _connect(proxy) as connection:
        connection.sendall(_request(COMMIT))
        assert _is_reset(connection)
    assert broker.asked == []
    requests.heal()
    wait_until(lambda: broker.asked == [_request(COMMIT)], what="the request")
    with _connect(proxy) as connection:
        assert _ask(connection, _request(COMMIT)) == _request(COMMIT)


def test_delays_requests_of_a_kind(broker: Broker, proxy: KafkaProxy, requests: Requests) -> None:
    """Guards against a kind that is not slow, and others that are."""
    with _connect(proxy) as one, _connect(proxy) as other:
        requests.slow({PRODUCE: 3600})
        one.sendall(_request(PRODUCE))
        wait_until(lambda: requests.seen[PRODUCE] == 1, what="the request")
        _ask(other, _request(ADD))
        assert broker.asked == [_request(ADD)]
        requests.slow({PRODUCE: 0.2})
        started = time.monotonic()
        _ask(other, _request(PRODUCE))
        assert time.monotonic() - started >= 0.2


def test_calls_back_once_within_the_block(broker: Broker, proxy: KafkaProxy, requests: Requests) -> None:
    """Guards against a broker that is killed before it was asked, twice, or after the fault."""
    called: list[tuple[KafkaProxy, int]] = []

    def do(through: KafkaProxy) -> None:
        wait_until(lambda: len(broker.asked) == 2, what="the request")
        called.append((through, len(broker.asked)))

    with _connect(proxy) as connection:
        with requests.at(COMMIT, do):
            _ask(connection, _request(ABORT))
            for _ in range(2):
                _ask(connection, _request(COMMIT))
        assert called == [(proxy, 2)]
        with requests.at(COMMIT, do):
            pass
        _ask(connection, _request(COMMIT))
    assert len(called) == 1


@pytest.mark.parametrize("version", [1, 2, 3, 5])
def test_tells_commits_from_aborts(version: int) -> None:
    """Guards against a rule for commits that holds aborts, in any version of the request."""
    assert [name_of(_request(name, version=version)) for name in (COMMIT, ABORT)] == [COMMIT, ABORT]
