"""What all Kafka clients of a consumer have in common: the settings of the cluster, and the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

_OURS: Final = logging.getLogger("outbox_pipelines")
CLIENT_LOG: Final = logging.getLogger("outbox_pipelines.librdkafka")
"""The log of Kafka's client, which repeats errors often: shown only if this package's level is debug."""
# The settings of a consumer that other clients accept.
_SHARED: Final = ("bootstrap.servers", "security.protocol", "client.id", "client.rack")
_SHARED_PREFIXES: Final = ("sasl.", "ssl.", "socket.", "broker.", "enable.ssl", "https.")


def _is_wanted(_record: logging.LogRecord) -> bool:
    return _OURS.isEnabledFor(logging.DEBUG)


# Here, for an application that configures logging itself.
CLIENT_LOG.addFilter(_is_wanted)


def shared(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a consumer that other clients of the same cluster accept."""
    return {
        name: value for name, value in kafka.items() if name in _SHARED or name.startswith(_SHARED_PREFIXES)
    }
