"""Draw the phases of a transaction from the code's own table: ``python -m tests.model.relay.diagram``."""

from __future__ import annotations

from outbox_pipelines.relay.core.transactions import TRANSITIONS, Phase


def diagram() -> str:
    """Return it as Mermaid's text."""
    lines = [f"    [*] --> {Phase.NONE.value}"]
    lines += [f"    {before.value} --> {after.value}: {why}" for (before, why), after in TRANSITIONS.items()]
    return "\n".join(["stateDiagram-v2", *lines])


if __name__ == "__main__":
    print(diagram())
