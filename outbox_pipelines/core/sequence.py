"""What is wrong with an outbox whose sequence (`outbox_seq`) gives numbers (`seq`) that it has already.

Invariants:
- The relay knows events by their numbers. It refuses to run while the sequence is behind, and to publish two
  events that have the same number; `outbox relay --rebase` corrects both.
"""

from __future__ import annotations

from typing import Final, LiteralString

from outbox_pipelines.errors import SetupError

# The sequence is not part of the snapshot: no visible row has a number that it has not reached yet.
DRAWN: Final = "coalesce(pg_sequence_last_value('outbox_seq'::regclass), 0)"
STATE: Final[LiteralString] = f"SELECT {DRAWN}, outbox_last_seq()"
_REMEDY: Final = "run `outbox relay --rebase`, which raises the sequence and numbers unpublished events again"


class SequenceError(SetupError):
    """The sequence was set back; `outbox relay --rebase` corrects what follows from it."""


def behind(drawn: int, last: int) -> str | None:
    """Return what is wrong with a sequence at `drawn` if the outbox has had the number `last`."""
    if drawn >= last:
        return None
    return (
        f"the sequence outbox_seq is at {drawn:,}, behind seq {last:,} of the outbox (it was set back, or "
        f"restored without its value), and gives events the numbers of others: {_REMEDY}"
    )


def twice(seq: int) -> SequenceError:
    """Return the error for two events that have this number."""
    return SequenceError(
        f"two events have seq {seq:,}, because the sequence outbox_seq was set back: {_REMEDY}"
    )
