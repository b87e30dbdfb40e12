"""The idempotent consumer in small scopes, and the defects that the model has to find."""

from __future__ import annotations

import inspect

import pytest

from outbox_pipelines.consumer import consumer_sql as queries
from outbox_pipelines.consumer import (
    database_retry,
    deliveries,
    handler_breakers,
    handler_transactions,
    inbox,
    items,
    membership,
    partition_owners,
    processed_events,
    settlement,
    work,
)
from tests.model.consumer import process
from tests.model.consumer.breaks import BREAKS, broken
from tests.model.consumer.process import ENDED, TOP, Program, Setting, Top
from tests.model.consumer.scopes import CONSUMER

# Those nearest to the beginning, which are all of half of the scopes.
_MOST = 8_000
SMALL = [name for name, scope in CONSUMER.items() if scope.is_small and not scope.seeds]
CHEAP = [name for name, each in BREAKS.items() if each.is_cheap]


@pytest.mark.thorough
@pytest.mark.parametrize("name", SMALL)
def test_every_state_of_a_small_scope_holds(name: str, is_thorough: bool) -> None:
    """G10, and everything that has to be seen is seen."""
    scope = CONSUMER[name]
    result = scope.explored(states=None if is_thorough else _MOST)
    assert result.broken is None, scope.told(result)
    assert result.exhausted or (not is_thorough and result.states >= _MOST)
    assert not result.missing


def test_random_histories_of_a_large_scope_hold() -> None:
    scope = CONSUMER["consumer-large"]
    runs = scope.at_random(seeds=20)
    assert runs.broken is None, scope.told(runs)
    assert runs.histories == 20


@pytest.mark.parametrize("name", CHEAP)
def test_a_defect_is_found(name: str) -> None:
    """Guards against a model that finds nothing because it looks at nothing."""
    each = BREAKS[name]
    scope = CONSUMER[each.scope]
    with broken(each):
        result = scope.explored(states=50_000)
        assert result.broken is not None
        assert result.broken.invariant == each.invariant, scope.told(result)
        assert scope.told(result)


def test_random_histories_find_a_defect_and_shrink_it() -> None:
    scope = CONSUMER["consumer-large"]
    with broken(BREAKS["a batch leaves what waits"]):
        runs = scope.at_random(seeds=50)
        assert runs.broken is not None
        assert runs.broken.invariant == "accounted"
        assert len(runs.broken.actions) < 30
        assert runs.broken == scope.at_random(first=runs.seed or 0, seeds=1).broken


def test_the_breaks_are_gone_afterwards() -> None:
    for each in BREAKS.values():
        before = [change.of.__dict__[change.method] for change in each.changes]
        with broken(each):
            assert [change.of.__dict__[change.method] for change in each.changes] != before
        assert [change.of.__dict__[change.method] for change in each.changes] == before


def test_all_state_of_the_code_is_in_the_model() -> None:
    """Guards against an attribute that a process remembers in production, and forgets in the model.

    A new attribute either belongs into `process.Top`, or into this list, if no decision depends on it.
    """
    kept = {
        deliveries.InboxWorker: {"look_at"},
        handler_breakers.Breakers: {"_of"},
        partition_owners.CrashGuard: {"_owned", "_suspect"},
        membership.Member: {"_commit_at", "_gone", "_left", "_new", "_stored"},
    }
    # Empty at the top of the loop, measured, or always the same.
    other = {
        work.Work: {
            *("types", "counts", "figures", "retry", "guard", "breakers", "transactions", "settlement"),
            *("inbox", "_plan", "_handlers", "_processed", "_items", "_deliveries", "_shares", "_least"),
            # How many events share a transaction, and are polled: those of a scope are fewer, or one.
            *("_pace", "_polled"),
        },
        database_retry.DatabaseRetry: {
            *("awaits", "is_called", "_plan", "_database", "_lines"),
            # Of a start, and of standbys, which the model does not have.
            *("_has_begun", "_safe_at"),
        },
        deliveries.InboxWorker: {
            *("plan", "handlers", "retry", "inbox", "items", "breakers", "transactions", "settlement"),
            *("counts", "figures", "measure_at"),
        },
        handler_breakers.Breakers: {"plan", "handlers", "inbox", "retry", "counts", "figures"},
        handler_transactions.HandlerTransactions: {
            *("plan", "database", "retry", "processed", "inbox", "pace", "figures", "_open"),
        },
        settlement.Settlement: {
            *("plan", "retry", "processed", "inbox", "breakers", "counts", "types", "_lines"),
        },
        deliveries.Deliveries: {
            *("plan", "retry", "guard", "breakers", "transactions", "settlement", "inbox", "counts"),
        },
        processed_events.ProcessedEvents: {"_database", "_dedupe_table", "_same", "_marks"},
        items.ItemReader: {"plan", "reader", "handlers", "types", "mark"},
        partition_owners.CrashGuard: {"_database", "_same"},
        membership.Member: {
            *("_client", "_settings", "_topics", "_lost_clients", "_lines", "_is_known", "_refusal"),
            *("_patience", "_polled_at", "_kept", "_lag_at", "lag"),
        },
    }
    run = process.Run(Setting(("works",), ("a",)), Top(), ((False, False),))
    with process._surroundings(run), pytest.raises(process.PauseError):
        run.execute()
    assert run.objects.keys() == other.keys()
    for of, its in run.objects.items():
        assert set(vars(its)) == kept.get(of, set()) | other[of], of


def test_a_process_goes_from_top_to_top() -> None:
    program = Program(Setting(("works",), ("a",)))
    state = program.begin
    for request, answer in (
        (TOP, True),
        (("poll", ()), ((("assign", 0),), ((0, 0, 0),))),
        (("OWN_FREE", (0,), 0), ()),
        (("stay",), ()),
        (("stay",), ()),
        (("RECORD", 0), True),
        (("commit", (0,)), None),
        (("HEADS", ()), ()),
    ):
        assert program.request(state) == request
        state = program.move(state, False, answer)
    assert program.request(state) == TOP
    assert program.top(state) == Top(
        looks=False, commits=True, owned=(0,), assigned=(0,), stored=((0, 1),), has_stored=True
    )
    runs = program.runs
    assert program.move(program.begin, False, True)
    assert program.runs == runs
    state = program.move(state, True, True)
    assert program.request(state) == ("DISOWN", (0,))
    state = program.move(program.move(state, True, None), True, None)
    assert program.request(state) == ENDED


def test_every_statement_of_the_work_is_known() -> None:
    """Guards against a statement that the model takes for another one."""
    used = {
        name
        for module in (
            *(database_retry, handler_transactions, inbox, partition_owners, processed_events),
            *(deliveries, settlement, work),
        )
        for name in vars(queries)
        if name.isupper() and f"queries.{name}" in inspect.getsource(module)
    }
    # Before the first event, where an id is no UUID, and where it is not that of its row; for standbys, which
    # the model does not have; and for metrics.
    others = {"TABLES", "VERSIONS", "FOREIGN", "CONTENTS", "RECORD_ID", "IS_SAME", "REACH_STANDBYS", "STATUS"}
    assert used - others == set(process._NAMES.values())
