"""Both kinds of what is relayed implement the protocol, and reading one loads no client of Kafka."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Final

import pytest

from outbox_pipelines.existing import kind as existing
from outbox_pipelines.relay import append_only
from outbox_pipelines.relay.kinds import Kind

# Compared by mypy, too.
_KINDS: Final[tuple[Kind, ...]] = (append_only, existing)
_FUNCTIONS: Final = [name for name, _ in inspect.getmembers(Kind, inspect.isfunction) if name[0] != "_"]


@pytest.mark.parametrize("kind", _KINDS)
def test_has_each_function(kind: Kind) -> None:
    assert len(_FUNCTIONS) == 9
    assert [name for name in _FUNCTIONS if not callable(getattr(kind, name, None))] == []


@pytest.mark.parametrize("kind", [append_only.__name__, existing.__name__])
def test_reading_needs_no_kafka(kind: str) -> None:
    program = f"import sys, {kind}; print([name for name in sys.modules if name == 'confluent_kafka'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
