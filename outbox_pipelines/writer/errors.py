"""Why an event was not written: the message says what to do."""

from __future__ import annotations


class OutboxError(Exception):
    """The event was not written; the message says why and what to do."""


class AutocommitError(OutboxError):
    """The connection commits every statement by itself: event and business rows could part."""


class PayloadTooLargeError(OutboxError):
    """The payload has more than 1,000,000 bytes as JSON: store it elsewhere and send the reference."""


class InvalidEventError(OutboxError):
    """The payload is not what its event type promises: the message says where, and what is wrong there."""
