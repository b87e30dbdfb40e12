"""Broken relays, each with the interleaving that undoes it made by hand: the judge finds them, every time.

The same interleavings with the real relay are in order, so that it is the relay which is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_pipelines.relay import service
from tests.conftest import Outbox, wait_until
from tests.history import broken, business
from tests.history.processes import Process
from tests.history.verify import verdict

Connection = psycopg.Connection[Any]


@pytest.fixture
def connect(shop: Outbox) -> Iterator[Callable[[], Connection]]:
    """Writers that the test controls: connections in which nothing commits automatically."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(shop.connect(autocommit=False))


def _real(shop: Outbox) -> Callable[[], object]:
    return lambda: service.relay(shop.settings, until_empty=True)


def _broken(shop: Outbox, kind: type[broken.Broken]) -> broken.Broken:
    with shop.connect() as connection:
        connection.execute(kind.prepare.encode())
    return kind(shop.settings)


# --- a transaction that commits late, with a low number ---------------------------------------------------


def _late_commit(connect: Callable[[], Connection], step: Callable[[], object]) -> None:
    late, quick = connect(), connect()
    business.count(late, "order", 1)
    business.count(quick, "order", 2)
    quick.commit()
    step()
    late.commit()
    step()


def test_polling_by_seq_loses_what_commits_late(shop: Outbox, connect: Callable[[], Connection]) -> None:
    """Guards G1 against the first idea that everyone has."""
    _late_commit(connect, _broken(shop, broken.PollsBySeq).step)
    assert verdict(shop, calm=True).wrong == ["lost write (1): order/1/1"]


# --- the lower transaction id commits second, and a third one runs with an id between them ----------------


def _lower_id_second(connect: Callable[[], Connection], step: Callable[[], object]) -> None:
    lower, between, higher = connect(), connect(), connect()
    for connection in (lower, between, higher):
        connection.execute("SELECT pg_current_xact_id()")
    business.count(higher, "order", 1)
    higher.commit()
    business.count(lower, "order", 1)
    lower.commit()
    step()
    between.commit()
    step()


def test_a_cut_at_a_transaction_id_reorders(shop: Outbox, connect: Callable[[], Connection]) -> None:
    """Guards G2 against the horizon of running transactions, taken for an order of commits."""
    relay = _broken(shop, broken.CutsAtXid)
    # Transactions of other databases on the server hold the horizon back, too.
    _lower_id_second(connect, lambda: wait_until(relay.step, what="the horizon to pass an event"))
    assert verdict(shop, calm=True).wrong == ["out of order (1): order/1/1 after 2"]


# --- the transaction that began first gets its account's lock second --------------------------------------


def _older_second(connect: Callable[[], Connection], step: Callable[[], object]) -> None:
    older, younger = connect(), connect()
    older.execute("SELECT now()")
    business.count(younger, "order", 1)
    younger.commit()
    business.count(older, "order", 1)
    older.commit()
    step()


def test_order_by_time_reorders(shop: Outbox, connect: Callable[[], Connection]) -> None:
    """Guards G2 against `created_at`, which is when a transaction began."""
    _older_second(connect, _broken(shop, broken.OrdersByTime).step)
    assert verdict(shop, calm=True).wrong == ["out of order (1): order/1/1 after 2"]


@pytest.mark.parametrize("interleave", [_late_commit, _lower_id_second, _older_second])
def test_the_real_relay_in_the_same_interleavings(
    shop: Outbox,
    connect: Callable[[], Connection],
    interleave: Callable[[Callable[[], Connection], Callable[[], object]], None],
) -> None:
    """Guards against interleavings that no relay could get right."""
    interleave(connect, _real(shop))
    found = verdict(shop, calm=True)
    assert found.wrong == []
    assert found.committed == 2


# --- killed between the settle and the acknowledgement ----------------------------------------------------


def test_settling_first_loses_what_a_kill_finds_in_the_buffer(
    shop: Outbox, connect: Callable[[], Connection], tmp_path: Path
) -> None:
    """Guards G1 against a position ahead of the acknowledgements."""
    position = _position(_broken(shop, broken.SettlesFirst).connection)
    relay = Process("relay", broken.command("settles_first"), shop.environment, tmp_path)
    writer = connect()
    business.count(writer, "order", 1)
    relay.start()
    try:
        writer.commit()
        wait_until(lambda: position() > 0, what="the relay to settle")
    finally:
        relay.kill()
    assert verdict(shop).wrong == ["lost write (1): order/1/1"]


def _position(connection: Connection) -> Callable[[], int]:
    def read() -> int:
        row = connection.execute("SELECT at::bigint FROM position").fetchone()
        assert row is not None
        return int(row[0])

    return read


# --- claims ---------------------------------------------------------------------------------------------


def _commit_after_claim(connect: Callable[[], Connection], relay: broken.Broken) -> None:
    first, middle, last = connect(), connect(), connect()
    for account, connection in enumerate((first, middle, last)):
        business.count(connection, "order", account)
    first.commit()
    last.commit()
    rows = relay.read()
    relay.publish(rows)
    relay.flush()
    middle.commit()
    relay.settle(rows)
    relay.step()


def test_settling_a_range_loses_what_committed_since_the_claim(
    shop: Outbox, connect: Callable[[], Connection]
) -> None:
    """Guards G1 against marking by BETWEEN: the statement sees more than the claim did."""
    _commit_after_claim(connect, _broken(shop, broken.SettlesRange))
    assert verdict(shop, calm=True).wrong == ["lost write (1): order/1/1"]


def test_settling_exactly_what_was_claimed_loses_nothing(
    shop: Outbox, connect: Callable[[], Connection]
) -> None:
    """Guards against an interleaving that no claiming relay could get right."""
    _commit_after_claim(connect, _broken(shop, broken.Claims))
    found = verdict(shop, calm=True)
    assert found.wrong == []
    assert found.committed == 3


def test_two_that_claim_without_ownership_reorder(shop: Outbox, connect: Callable[[], Connection]) -> None:
    """Guards G2 against SKIP LOCKED as a way to run several relays."""
    one, other = _broken(shop, broken.Claims), broken.Claims(shop.settings)
    writer = connect()
    business.count(writer, "order", 1)
    writer.commit()
    claimed = one.read()
    business.count(writer, "order", 1)
    writer.commit()
    assert other.step() == 1
    one.publish(claimed)
    one.flush()
    one.settle(claimed)
    assert verdict(shop, calm=True).wrong == ["out of order (1): order/1/1 after 2"]
