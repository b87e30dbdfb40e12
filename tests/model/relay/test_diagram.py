"""What the documentation shows of the core is what the core does."""

from __future__ import annotations

from pathlib import Path

from tests.model.relay.diagram import diagram


def test_the_documentation_shows_the_transitions() -> None:
    """Guards against a picture of transitions that the code does not make."""
    assert f"```mermaid\n{diagram()}\n```" in Path("docs/architecture.md").read_text()
