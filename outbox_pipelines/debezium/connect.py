"""A client of Kafka Connect's REST, which reads what a cluster says about a connector.

Invariants:
- It changes nothing.
- Each call ends within its deadline, with an answer or with an error of one line.
- A call that the cluster cannot do at that moment, because it rebalances (409) or its leader has just ended
  (500), is repeated until the deadline.
- User and password of the URL are in a header and never in a message.
- A certificate is verified, by the authorities of the system or those of SSL_CERT_FILE.
"""

from __future__ import annotations

import json
import ssl
import time
from base64 import b64encode
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from outbox_pipelines.config.types import connect_urls
from outbox_pipelines.errors import NotReadyError, SetupError, UnavailableError

SECONDS: Final = 30.0
"""How long a call takes at most, by default."""
_PAUSE: Final = 0.25
_LONGEST: Final = 300
# What a worker says whose leader has ended, or is busy; with the status of an error that lasts.
_PASSING: Final = ("forward REST request", "Request timed out", "rebalance is expected")


class MissingError(SetupError):
    """The cluster has no such connector."""


class Connect:
    """A Kafka Connect cluster.

    Args:
        url: of its REST, as in OUTBOX_CONNECT_URL: of several workers, separated by commas, the first that
            answers is asked.
        seconds: how long a call takes at most.
        deadline: when the last call has ended, by `time.monotonic`; instead of `seconds`.

    Raises:
        SetupError: it is not such a URL.
    """

    def __init__(self, url: str, *, seconds: float = SECONDS, deadline: float | None = None) -> None:
        try:
            self._workers = [urlsplit(each) for each in connect_urls(url)]
        except ValueError as error:
            raise SetupError(f"OUTBOX_CONNECT_URL {error}") from None
        self._seconds = seconds
        self._deadline = deadline

    @property
    def where(self) -> str:
        """The cluster for people: hosts without credentials."""
        return ", ".join(f"{each.scheme}://{_host(each)}" for each in self._workers)

    def config(self, name: str) -> dict[str, str]:
        """Return the configuration of a connector; raise `MissingError` if there is none."""
        return dict(self._get(f"/connectors/{_quoted(name)}/config"))

    def status(self, name: str) -> dict[str, Any]:
        """Return the state of a connector and its tasks; raise `MissingError` if there is none.

        Right after it was made, there may be no state for a moment.
        """
        return dict(self._get(f"/connectors/{_quoted(name)}/status"))

    def offsets(self, name: str) -> list[dict[str, Any]]:
        """Return what is committed of a connector's progress: for Debezium one entry, or none."""
        found = self._get(f"/connectors/{_quoted(name)}/offsets")
        return list(found.get("offsets") or [])

    def _get(self, path: str) -> Any:
        begun = time.monotonic()
        deadline = begun + self._seconds if self._deadline is None else self._deadline
        while True:
            status, text = self._ask(path, deadline)
            if status < 300:
                return _parsed(text, self.where)
            said = _message(text)
            if status == 404:
                raise MissingError(f"Kafka Connect ({self.where}): {said}")
            if status in (401, 403):
                raise SetupError(
                    f"Kafka Connect ({self.where}) refuses the credentials (HTTP {status}): in "
                    "OUTBOX_CONNECT_URL, write user, colon, password and @ before the host, with % and two "
                    "hexadecimal digits for special characters"
                )
            if not _is_passing(status, said):
                raise SetupError(f"Kafka Connect ({self.where}) refuses (HTTP {status}): {said}")
            if time.monotonic() + _PAUSE > deadline:
                raise NotReadyError(
                    f"Kafka Connect ({self.where}) could not do it within {deadline - begun:.0f} s (HTTP "
                    f"{status}): {said}. Run the command again when its workers have settled"
                )
            time.sleep(_PAUSE)

    def _ask(self, path: str, deadline: float) -> tuple[int, str]:
        """Return status and text of the first worker that answers."""
        problem: Exception | None = None
        for number, worker in enumerate(self._workers):
            left = deadline - time.monotonic()
            try:
                # A worker that is frozen must leave time for the others.
                return _exchange(worker, path, max(0.1, left / (len(self._workers) - number)))
            except (OSError, HTTPException) as error:
                problem = error
        raise UnavailableError(f"Kafka Connect ({self.where}) does not answer {_why(problem)}")


def _exchange(worker: Any, path: str, seconds: float) -> tuple[int, str]:
    kind = HTTPSConnection if worker.scheme == "https" else HTTPConnection
    connection = kind(worker.hostname, worker.port, timeout=seconds)
    headers = {"Accept": "application/json"}
    if worker.username is not None:
        login = f"{unquote(worker.username)}:{unquote(worker.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
    try:
        connection.request("GET", worker.path.rstrip("/") + path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def _why(problem: Exception | None) -> str:
    """Return the cause in parentheses, and what to do."""
    if isinstance(problem, ssl.SSLCertVerificationError):
        cause = problem.verify_message.rstrip(".")
        return (
            f"with a certificate that is trusted ({cause}): name the file of its authority "
            "in SSL_CERT_FILE, and in OUTBOX_CONNECT_URL a host that the certificate has"
        )
    if isinstance(problem, ssl.SSLError):
        return f"by TLS ({problem.reason}): write http:// in OUTBOX_CONNECT_URL if its workers do not use TLS"
    text = getattr(problem, "strerror", None) or str(problem) or type(problem).__name__
    return f"({text}): check OUTBOX_CONNECT_URL, and that a worker runs"


def _is_passing(status: int, said: str) -> bool:
    return status in (409, 502, 503, 504) or (status == 500 and any(text in said for text in _PASSING))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        raise SetupError(
            f"{where} does not answer as Kafka Connect does: check the address in OUTBOX_CONNECT_URL"
        ) from None


def _message(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    said = found.get("message") if isinstance(found, dict) else None
    return _line(str(said or "no reason given"))


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _host(worker: Any) -> str:
    name = f"[{worker.hostname}]" if ":" in worker.hostname else worker.hostname
    return name if worker.port is None else f"{name}:{worker.port}"
