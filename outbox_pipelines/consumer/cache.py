"""A Redis cache in front of `processed_events`: a hint about handled events that the database verifies.

Invariants:
- An event is added after the database's commit, and each hit is verified: a cache that is wrong, incomplete
  or unavailable costs a query, not an event.
- No failure of Redis is raised. After a failure, Redis is not queried for `pause_seconds`, so an outage costs
  no time per event. Each outage and recovery is logged once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from uuid import UUID

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from outbox_pipelines.core.secret import first_line, register
from outbox_pipelines.core.text import plain
from outbox_pipelines.errors import SetupError

_LOG: Final = logging.getLogger(__name__)
_TIMEOUT: Final = 0.1
_LONGEST_TIMEOUT: Final = 0.5
# Ten years.
_LONGEST: Final = 3650 * 86_400.0
_T = TypeVar("_T")


class RedisCache:
    """The events that a source has handled, as cached in Redis; must be used by one thread at a time.

    Args:
        client: a client with timeouts of at most 0.5 s and no retries, such as the one that `at` creates.
        seconds: how long an event is cached.
        prefix: the prefix of the keys; the source and the id follow.
        pause_seconds: seconds without queries after a failure of Redis.

    Raises:
        SetupError: the client's timeouts are too long, or `seconds` is not positive.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        seconds: float,
        prefix: str = "outbox-handled:",
        pause_seconds: float = 5.0,
    ) -> None:
        if not 0 < seconds <= _LONGEST:
            raise SetupError(f"seconds is {seconds}: give how long an event is cached, such as 3600")
        _require_quick(client.get_connection_kwargs())
        self._client = client
        self._milliseconds = max(1, int(seconds * 1000))
        self._prefix = prefix
        self._pause = pause_seconds
        self._is_unavailable = False
        self._ask_again_at = 0.0

    @classmethod
    def at(cls, url: str, *, seconds: float, timeout: float = _TIMEOUT, **more: Any) -> RedisCache:
        """Return the cache at a URL such as redis://cache:6379/0, with a timeout in seconds."""
        register(url, url.partition("://")[2].rpartition("@")[0].partition(":")[2])
        try:
            client = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:
            raise SetupError(f"the URL of the cache is wrong: {first_line(error)}") from None
        return cls(client, seconds=seconds, **more)

    def known(self, source: str, ids: Sequence[UUID]) -> set[UUID]:
        """Return the ids that Redis has for the source, to be verified; none while Redis is unavailable."""
        if not ids:
            return set()
        found = self._ask(lambda: self._client.mget(self._keys(source, ids)))
        return {each for each, value in zip(ids, found or (), strict=False) if value is not None}

    def remember(self, source: str, ids: Sequence[UUID]) -> None:
        """Add events that were handled, after the database's commit."""
        if ids:
            self._ask(lambda: self._tell(source, ids))

    def _tell(self, source: str, ids: Sequence[UUID]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in self._keys(source, ids):
                pipeline.set(key, b"", px=self._milliseconds)
            pipeline.execute()

    def _keys(self, source: str, ids: Sequence[UUID]) -> list[bytes]:
        start = f"{self._prefix}{source}:".encode()
        return [start + each.bytes for each in ids]

    def _ask(self, ask: Callable[[], _T]) -> _T | None:
        """Return the result; None after a failure, and without a query during the pause."""
        if time.monotonic() < self._ask_again_at:
            return None
        try:
            answer = ask()
        except (redis.RedisError, OSError) as error:
            self._ask_again_at = time.monotonic() + self._pause
            if not self._is_unavailable:
                self._is_unavailable = True
                # It may have a key, which ends with the bytes of an id.
                why = plain(first_line(error))
                _LOG.warning("Redis does not work; using only the database to find duplicates: %s", why)
            return None
        if self._is_unavailable:
            self._is_unavailable = False
            _LOG.warning("Redis works again")
        return answer


def _require_quick(settings: dict[str, Any]) -> None:
    """Raise `SetupError` for long timeouts or retries; a client's defaults are 5 s and several tries."""
    timeouts = [settings.get(name) for name in ("socket_timeout", "socket_connect_timeout")]
    retries = getattr(settings.get("retry"), "_retries", 0)
    if retries or any(seconds is None or seconds > _LONGEST_TIMEOUT for seconds in timeouts):
        raise SetupError(
            "the Redis client's timeouts are too long for an outage: use RedisCache.at(url, …), or give the "
            f"client socket_timeout and socket_connect_timeout of at most {_LONGEST_TIMEOUT} and "
            "retry=Retry(NoBackoff(), 0)"
        )
