"""Why an event was not written: the message says what to do."""

from __future__ import annotations

from outbox_pipelines import Error


class OutboxError(Error):
    """The event was not written; the message says why and what to do."""


class AutocommitError(OutboxError):
    """The connection commits each statement separately: an event could commit without its business rows."""


class PayloadTooLargeError(OutboxError):
    """The payload has more than 1,000,000 bytes as JSON: store it as an object, by `bodies.large`."""


class BodyStoreError(OutboxError):
    """The store of large payloads is unavailable, or refused a request."""


class InvalidEventError(OutboxError):
    """The payload does not match the schema of its event type; the message names the place and the error."""
