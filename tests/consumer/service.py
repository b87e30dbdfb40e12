"""A consumer in a process of its own, which can be killed, or kill itself at a certain point.

Usage: python -m tests.consumer.service DSN KAFKA TOPIC DIES_AT, where DIES_AT is `handler` (in the handler of
the 5th event), `commit` (between the database's commit of the 5th and its offset), or `never`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import psycopg

from outbox_pipelines.consumer import Event
from outbox_pipelines.consumer.membership import Member
from tests.consumer.place import STATIC, Place, effect

_FATAL = 5


def main(dsn: str, kafka: str, topic: str, dies_at: str) -> None:
    calls = {"handler": 0, "commit": 0}

    def reached(point: str) -> None:
        calls[point] += 1
        if point == dies_at and calls[point] == _FATAL:
            os.kill(os.getpid(), signal.SIGKILL)

    def handler(event: Event, connection: psycopg.Connection[Any]) -> None:
        effect(event, connection)
        reached("handler")

    done = Member.done

    def late(self: Member, messages: Any) -> None:
        reached("commit")
        done(self, messages)

    Member.done = late  # type: ignore[method-assign]
    consumer = Place(dsn, kafka, topic).bare(kafka=STATIC)
    consumer.on("order.placed")(handler)
    print(consumer.run())


if __name__ == "__main__":
    main(*sys.argv[1:])
