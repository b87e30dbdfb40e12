"""One drain by the real relay, in a process of its own, as `outbox relay --until-empty` does it.

As a program: ``python -m benchmarks.relay`` with the settings in the environment prints events, seconds from
the taken shard to the moved position, and the peak resident memory in MB.
"""

from __future__ import annotations

import resource

from outbox_pipelines.relay import service
from outbox_pipelines.settings import load_settings

if __name__ == "__main__":
    totals = service.relay(load_settings(), until_empty=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(totals.events, totals.seconds, peak)
