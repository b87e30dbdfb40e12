"""A tiny HTTP server that answers as a worker of Kafka Connect: `answers.json` was recorded from one."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.debezium.serving import Asked, serving

ANSWERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("answers.json").read_text())


@dataclass
class FakeWorker:
    """Its URL, what to answer (the last answer stays), and what was asked."""

    answers: dict[str, list[dict[str, Any]]]
    url: str = ""
    asked: list[Asked] = field(default_factory=list)

    def answer(self, asked: Asked) -> tuple[int, str]:
        """Return the next answer."""
        self.asked.append(asked)
        last = asked.path.split("?")[0].rpartition("/")[2]
        left = self.answers.get(last) or self.answers[asked.method.lower()]
        answer = left.pop(0) if len(left) > 1 else left[0]
        sent = answer["body"]
        return answer["status"], sent if isinstance(sent, str) else json.dumps(sent)


@contextmanager
def answering(
    tls: ssl.SSLContext | None = None, **answers: list[str | dict[str, Any]]
) -> Iterator[FakeWorker]:
    """A worker with answers by the end of the path or by method (`get`, …): recorded ones or others."""
    worker = FakeWorker(
        {name: [ANSWERS[x] if isinstance(x, str) else x for x in each] for name, each in answers.items()}
    )
    with serving(worker.answer, tls) as worker.url:
        yield worker
