"""Two relays with different descriptions of one table: the later one ends and names the other one."""

from __future__ import annotations

import json
import threading
import tomllib
from contextlib import suppress

import pytest

from outbox_pipelines.config.table_mapping import read_mapping
from outbox_pipelines.errors import SetupError
from outbox_pipelines.existing.table_ownership import TableOwnership
from tests.conftest import wait_until
from tests.existing import textbook
from tests.existing.textbook import Table
from tests.relay import faults


def _other(table: Table) -> Table:
    return table.described(textbook.PUBLISHED_AT_MAPPING.replace('headers = "headers"\n', ""))


def test_the_later_one_ends(table: Table) -> None:
    """Guards against a standby that marks rows in another way when it takes over, unnoticed until then."""
    other = _other(table)
    file = {"OUTBOX_TABLE": json.dumps(table.settings.table)}
    with faults.relay(table.outbox, **file) as process:
        table.write(("a", {"n": 1}))
        wait_until(lambda: not table.pending(), what="an active relay")
        for arguments in (("relay",), ("relay", "--until-empty")):
            ended = other.outbox.process(*arguments, **other.environment)
            assert ended.returncode == 2
            assert ended.stderr.count("\n") == 1, ended.stderr
            assert f":{process.pid}:" in ended.stderr
            assert (
                " relays public.events by a description that differs from that of OUTBOX_TABLE: give "
                "both relays the same file, or stop that relay first" in ended.stderr
            )
        # The first one continues, and a standby of its own waits.
        table.write(("a", {"n": 2}))
        wait_until(lambda: not table.pending())
        with table.relayed(is_standby=True):
            process.kill()
            process.wait()
            table.write(("a", {"n": 3}))
            wait_until(lambda: not table.pending(), what="the standby")
    assert other.drain().events == 0


def test_a_standby_has_its_description_too(table: Table) -> None:
    """Guards against a description that only the owner states: its standby would take over with another."""
    standby = TableOwnership(table.settings, "standby")
    assert standby.try_wait()
    with pytest.raises(SetupError, match=r"^standby relays public.events by a description that differs"):
        TableOwnership(_other(table).settings, "later")
    standby.close()
    TableOwnership(_other(table).settings, "later").close()


@pytest.mark.extended
def test_two_that_start_together_do_not_both_stay(table: Table) -> None:
    """Guards against two relays that look for each other before either can be seen."""
    other = _other(table)
    for _ in range(10):
        barrier = threading.Barrier(2)
        owned: list[TableOwnership] = []

        def start(one: Table, barrier: threading.Barrier, owned: list[TableOwnership]) -> None:
            barrier.wait()
            with suppress(SetupError):
                owned.append(TableOwnership(one.settings, "one"))

        threads = [threading.Thread(target=start, args=(one, barrier, owned)) for one in (table, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert len(owned) <= 1
        for ownership in owned:
            ownership.close()


def test_the_same_description_in_another_file(table: Table) -> None:
    """Guards against comments, the order of lines and the spelling of the table that make a difference."""
    lines = textbook.PUBLISHED_AT_MAPPING.replace("public.", "").splitlines()
    columns = lines.index("[columns]")
    entries = sorted([*lines[columns + 1 :], 'id = "id"'])
    again = table.described("\n".join(["# as before", *lines[: columns + 1], *entries]))
    first, second = read_mapping(table.settings.table), read_mapping(again.settings.table)
    assert str(first) != str(second)
    assert first.digest == second.digest
    owner = TableOwnership(table.settings, "owner")
    TableOwnership(again.settings, "standby").close()
    owner.close()


_BASE = 'name = "t"\n[columns]\nstatus = "s"\n'


@pytest.mark.parametrize(
    "text",
    [
        _BASE + 'headers = "headers"',
        _BASE + 'payload = "body"',
        _BASE + '[status]\nfailed = "DEAD"',
        'name = "t"\n[columns]\npublished_at = "s"',
        'order = "created_at"\n' + _BASE,
        'aggregate_type = "order"\n' + _BASE,
        'aggregate_type = "{event_type}"\n' + _BASE,
        'aggregate_type = "{event_type:first}"\n' + _BASE,
    ],
)
def test_what_makes_a_difference(text: str) -> None:
    """Guards against a difference that is not compared."""
    assert read_mapping(tomllib.loads(_BASE)).digest != read_mapping(tomllib.loads(text)).digest
