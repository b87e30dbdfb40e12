"""A table that Sequin publishes: no row is marked, and no message has a header."""

from __future__ import annotations

from typing import Final

import pytest

from outbox_pipelines.errors import NotReadyError
from outbox_pipelines.existing import describe
from outbox_pipelines.existing.adopt import planning, steps
from outbox_pipelines.existing.adopt.drain import Rest
from tests.existing.adopt.conftest import Make
from tests.existing.adopt.debezium_table import published

pytestmark = pytest.mark.extended

# The table is the user's own. Sequin needs a primary key, and old values of the whole row in the log.
_WHOLE_ROWS: Final = "REPLICA IDENTITY FULL"
_MESSAGES: Final = "CREATE TABLE messages (message_id uuid PRIMARY KEY, message jsonb)"


def test_its_slot_says_what_is_published(make: Make) -> None:
    """Guards against a description that asks for a mark, or takes the table for one of Sequin's own."""
    with published(make, publication="FOR TABLE outbox") as table:
        settings = table.adopted.settings
        with table.adopted.connect() as connection:
            connection.execute(f"ALTER TABLE outbox {_WHOLE_ROWS}".encode())
            connection.execute(_MESSAGES)
            connection.execute("ALTER PUBLICATION dbz_publication ADD TABLE messages")
        whole = describe.describe(settings, "public.outbox")
        assert whole.incomplete == []
        assert f'slot = "{table.slot}"' in whole.text
        # One column with everything: a relay needs to know the aggregate and the type.
        bare = describe.describe(settings, "public.messages")
        assert bare.incomplete == ["aggregate_id", "event_type"]
        assert 'id = "message_id"' in bare.text
        assert 'payload = "message"' in bare.text


def test_what_it_has_published_is_not_found(make: Make) -> None:
    """Guards against events that are published twice, or never, because no message has an id."""
    with published(make) as table:
        settings = table.adopted.settings
        with table.adopted.connect() as connection:
            connection.execute(f"ALTER TABLE outbox {_WHOLE_ROWS}".encode())
        table.write(0)
        steps.prepare(settings)
        steps.switch(settings, list(planning.plan(settings).judged.consequences), seconds=30, say=print)
        table.write(1)
        table.publish(confirm=False, has_header=False)
        with pytest.raises(NotReadyError, match="missing in Kafka: 1 event of before the switch"):
            steps.drain(settings, seconds=0, say=print, rest=Rest.WAIT)
        # An operator who knows that all of them are published says so.
        assert steps.drain(settings, seconds=0, say=print, rest=Rest.SKIP) == 0
        assert table.adopted.relay().events == 1
