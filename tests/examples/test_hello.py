"""The first minute of `examples/`."""

from __future__ import annotations

import os
import subprocess

from tests.conftest import Outbox
from tests.examples.services import EXAMPLES, ROOT, python


def test_an_order_is_written_relayed_and_handled(outbox: Outbox) -> None:
    """Guards against the first program that people run, and one that runs only once."""
    given = {"OUTBOX_DSN": outbox.settings.dsn.reveal(), "OUTBOX_KAFKA": outbox.settings.kafka}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    for order in (1, 2):
        ran = subprocess.run(
            python("hello.py"),
            cwd=EXAMPLES,
            env=clean | given | {"PYTHONPATH": str(ROOT)},
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        )
        assert ran.stdout.splitlines()[-1] == f"handled  order {order} has its invoice"
    with outbox.connect() as connection:
        assert connection.execute("SELECT * FROM hello_invoices ORDER BY 1").fetchall() == [(1, 5), (2, 5)]
