"""kill -9 of a cut-over to the real Debezium and back, before and after each statement and each REST call."""

from __future__ import annotations

import psycopg
import pytest

from tests.conftest import Outbox, clean_environment
from tests.interop.test_cutover_to_debezium import shop
from tests.interop.test_debezium_on_connect import Shop, place
from tests.relay.cdc.deaths import Commands, die_everywhere
from tests.relay.cdc.test_switch import writing
from tests.relay.parked import numbers_by_key
from tests.relay.threads import quick, running, wait_until_relayed
from tests.relay.topic import create_topic

__all__ = ["place", "shop"]


# Each of the deaths takes about 15 s; with --thorough there are four times as many.
@pytest.mark.timeout(1800)
def test_every_statement_and_call(shop: Shop, is_thorough: bool) -> None:
    """Guards against a change of which one half is forgotten: in the row, in the slot or in Kafka Connect."""
    outbox = Outbox(shop.settings)
    create_topic(outbox)
    settings = quick(outbox)
    environment = clean_environment() | outbox.environment | shop.environment
    commands = Commands(settings, environment, shop.password)
    with running(settings), writing(outbox, pace=0.01) as counts:
        deaths = die_everywhere(commands, 1 if is_thorough else 4)
    with running(settings):
        wait_until_relayed(outbox)
    assert deaths > 12
    assert numbers_by_key(outbox.messages()) == {key: list(range(count)) for key, count in counts.items()}
    assert f"connector: {settings.connector} (none)\n" in shop.run("debezium", "status").stdout
    with psycopg.connect(settings.require_dsn()) as connection:
        query = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        assert connection.execute(query).fetchone() == (0,)
