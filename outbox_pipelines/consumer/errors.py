"""What ends a consumer; each message names topic, partition and offset. Wrong settings are `SetupError`."""


class ConsumerError(Exception):
    """The consumer cannot go on; what it had handled before is committed."""


class UnreadableError(ConsumerError):
    """A message is no event in any shape that is known."""


class HandlingError(ConsumerError):
    """A handler, or the database, failed: the transaction was rolled back. The cause is `__cause__`."""
