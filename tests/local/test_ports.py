"""No two servers are given one port, and the one it was given to can have it."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest

from outbox_pipelines.local.server import free_port

# The same dice in another process.
ELSEWHERE = """
import random
from outbox_pipelines.local.server import free_port
random.seed(3)
print(free_port())
"""


def test_the_same_dice_give_another_port() -> None:
    def thrown() -> int:
        random.seed(3)
        return free_port()

    first, second = thrown(), thrown()
    shown = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True)
    assert len({first, second, int(shown.stdout)}) == 3


def test_a_server_has_its_port_and_has_it_again() -> None:
    port = free_port()
    for _ in range(2):
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port)),
        ):
            server.accept()[0].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    assert free_port(port) == port


def test_a_port_in_use_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(port) != port
