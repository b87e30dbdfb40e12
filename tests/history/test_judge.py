"""The judge must find what it is for, and accuse nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.history import __main__ as program
from tests.history.judge import judge
from tests.history.record import (
    HANDLES_REPLAYS,
    Committed,
    Delivery,
    Effect,
    Exit,
    Fault,
    History,
    Message,
    Replay,
    Replayed,
    ReplayEffect,
    Unhandled,
    load,
    save,
)

_COMMITTED = [Committed("order", "1", n, f"token-{n}") for n in (1, 2, 3)]


def _message(number: int, offset: int, **changes: object) -> Message:
    token, name = f"token-{number}", f"id-{number}"
    message = Message("order", 0, offset, "1", number, token, name, 100.0 + offset)
    return message._replace(**changes)  # type: ignore[arg-type]


def _history(
    *numbers: int, delivery: Delivery = "at_least_once", faults: list[Fault] | None = None
) -> History:
    messages = [_message(n, offset) for offset, n in enumerate(numbers)]
    return History("test", 0, delivery, list(_COMMITTED), messages, faults or [])


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ((1, 2, 3), []),
        ((1, 3), ["lost write (1): order/1/2"]),
        ((), ["lost write (3): order/1/1, order/1/2, order/1/3"]),
        ((1, 2, 3, 4), ["aborted read (1): order/1/4"]),
        ((1, 3, 2), ["out of order (1): order/1/2 after 3"]),
        ((3, 1, 2), ["out of order (2): order/1/1 after 3, order/1/2 after 3"]),
        ((1, 2, 1, 2, 3), ["duplicate (2): order/1/1, order/1/2"]),
    ],
)
def test_each_kind_of_damage_is_found(numbers: tuple[int, ...], wrong: list[str]) -> None:
    """Guards against a judge that cannot find anything."""
    assert judge(_history(*numbers)).wrong == wrong


@pytest.mark.parametrize(
    "changes",
    [{"key": "2"}, {"kind": "payment"}, {"n": 3}],
    ids=["another key", "another topic", "another number"],
)
def test_what_was_committed_otherwise_is_a_phantom(changes: dict[str, object]) -> None:
    """Guards against taking an event for another one that was committed."""
    history = _history(1, 3)
    history.messages.append(_message(2, 9, **changes))
    verdict = judge(history)
    assert len(verdict.phantom) == 1
    assert verdict.lost_write == ["order/1/2"]


def test_the_twin_that_was_rolled_back_is_an_aborted_read() -> None:
    """Guards G1 against events of transactions that never committed."""
    history = _history(1, 3)
    history.messages.append(_message(2, 9, token="another"))
    assert judge(history).wrong == ["lost write (1): order/1/2", "aborted read (1): order/1/2"]


@pytest.mark.parametrize(("committed_at", "wrong"), [(101.0009, []), (101.5, ["0.500"]), (None, [])])
def test_what_is_published_before_its_commit_is_a_dirty_read(
    committed_at: float | None, wrong: list[str]
) -> None:
    """Guards G1 against a source that delivers a transaction which may still be aborted."""
    history = _history(1, 2, 3)
    history.committed[1] = history.committed[1]._replace(at=committed_at)
    assert judge(history).dirty_read == [f"order/1/2 {early} s before its commit" for early in wrong]


def test_one_event_under_two_ids_is_a_phantom() -> None:
    """Guards against a relay that draws ids: no consumer could tell its duplicates."""
    history = _history(1, 2, 3, 2, faults=[Fault("kill", 0, 200, disturbs=True)])
    history.messages[-1] = history.messages[-1]._replace(id="another")
    assert judge(history).wrong == ["phantom (1): order/1/2 as id-2 and as another"]


def test_one_account_in_two_partitions_is_reordered() -> None:
    """Guards against a partitioner that does not keep an aggregate together."""
    history = _history(1, 2)
    history.messages.append(_message(3, 0, partition=1))
    assert judge(history).wrong == ["out of order (1): order/1/3 in another partition than 2"]


def test_other_accounts_are_not_waited_for() -> None:
    """Guards against an order over all accounts, which is not guaranteed."""
    history = _history(2, 3)
    history.committed[0] = Committed("order", "2", 1, "token-1")
    history.messages.append(_message(1, 9, key="2"))
    assert judge(history).wrong == []


@pytest.mark.parametrize(
    ("fault", "excused"),
    [
        (Fault("kill relay", 102, 103, disturbs=True), True),
        (Fault("black hole", 50, 95, disturbs=True), True),
        (Fault("kill relay", 50, 60, disturbs=True), False),
        (Fault("kill relay", 150, 160, disturbs=True), False),
        (Fault("kill writer", 102, 103, disturbs=False), False),
    ],
    ids=["between", "just over", "long over", "later", "of a writer"],
)
def test_a_duplicate_needs_a_fault_that_explains_it(fault: Fault, excused: bool) -> None:
    """Guards against a relay that delivers twice as it likes, and against blaming one that was killed."""
    verdict = judge(_history(1, 2, 3, 1, faults=[fault]))
    assert verdict.redelivered == 1
    assert verdict.duplicate == ([] if excused else ["order/1/1"])


def test_exactly_once_has_no_excuse() -> None:
    """Guards against duplicates that `read_committed` should not see, whatever happened."""
    always = Fault("kill relay", 0, 1000, disturbs=True)
    history = _history(1, 2, 3, 1, delivery="exactly_once", faults=[always])
    assert judge(history).wrong == ["duplicate (1): order/1/1"]


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ((1, 2, 3), []),
        ((1, 3), ["lost effect (1): order/1/2"]),
        ((1, 2, 2, 3), ["duplicate effect (1): order/1/2"]),
        ((1, 3, 2), ["effect out of order (1): order/1/2 after 3"]),
        ((1, 2, 3, 4), ["phantom effect (1): order/1/4"]),
        ((1, 2, 1, 3), ["duplicate effect (1): order/1/1"]),
    ],
)
def test_each_kind_of_damage_by_a_consumer_is_found(numbers: tuple[int, ...], wrong: list[str]) -> None:
    """Guards against a judge that looks at messages alone, and one whom faults or duplicates soften."""
    always = Fault("kill consumer", 0, 1000, disturbs=True)
    history = _history(1, 2, 3, 1, 2, 3, faults=[always])
    history.consumer = "test"
    history.effects = [Effect("order", "1", n, f"token-{n}") for n in numbers]
    assert judge(history).wrong == wrong


@pytest.mark.parametrize(
    ("state", "said"),
    [("failed", "a dead letter after 1 attempts: oh"), ("waiting", "waiting after 1 attempts: oh")],
)
def test_what_became_of_an_event_without_effect_is_said(state: str, said: str) -> None:
    """Guards against a finding that cannot be explained once the database is gone."""
    history = _history(1, 2, 3)
    history.consumer = "test"
    history.effects = [Effect("order", "1", n, f"token-{n}") for n in (1, 3)]
    history.unhandled = [Unhandled("token-2", state, 1, "oh")]
    assert judge(history).wrong == [f"lost effect (1): order/1/2, {said}"]


def _with_replay(*numbers: int, resumed: bool = False, handled: tuple[int, ...] = ()) -> History:
    """A good history, and a replay that had to send two events and has sent these."""
    history = _history(1, 2, 3)
    history.replays = [Replay("r", ["token-1", "token-2"], resumed)]
    history.replayed = [
        Replayed("r", "order", 0, 10 + offset, "1", n, f"token-{n}", f"id-{n}")
        for offset, n in enumerate(numbers)
    ]
    history.replay_effects = [ReplayEffect("r", f"token-{n}") for n in handled]
    return history


@pytest.mark.parametrize(
    ("numbers", "resumed", "wrong"),
    [
        ((1, 2), False, []),
        ((1, 2, 3), False, []),
        ((1, 2, 1, 2), True, []),
        ((1, 2, 2), False, ["duplicate replay (1): order/1/2"]),
        ((1,), True, ["lost replay (1): token-2"]),
        ((2, 1), True, ["replay out of order (1): order/1/1"]),
        ((1, 2, 4), False, ["phantom replay (1): order/1/4"]),
    ],
)
def test_each_kind_of_damage_by_a_replay_is_found(
    numbers: tuple[int, ...], resumed: bool, wrong: list[str]
) -> None:
    """Guards against a judge that takes replayed messages for live ones, or does not look at them."""
    assert judge(_with_replay(*numbers, resumed=resumed)).wrong == wrong


def test_a_resumed_replay_in_exactly_once_has_no_excuse() -> None:
    """Guards against a replay whose transactions do not hold its position."""
    history = _with_replay(1, 2, 1, resumed=True)
    history.delivery = "exactly_once"
    assert judge(history).wrong == ["duplicate replay (1): order/1/1"]


@pytest.mark.parametrize(
    "changes",
    [{"replay": "another"}, {"partition": 1}, {"key": "2"}, {"id": "another"}],
    ids=["another replay", "another partition", "another key", "another id"],
)
def test_what_was_published_otherwise_is_no_replay(changes: dict[str, Any]) -> None:
    """Guards against a replayed event that no consumer recognizes, or that leaves its aggregate."""
    history = _with_replay(1, 2, 3)
    history.replayed[2] = history.replayed[2]._replace(**changes)
    assert len(judge(history).phantom_replay) == 1


@pytest.mark.parametrize(
    ("handled", "wrong"),
    [
        ((1, 2), []),
        ((1,), ["lost effect of replay (1): order/1/2"]),
        ((1, 2, 2), ["duplicate effect of replay (1): token-2"]),
    ],
)
def test_a_replayed_event_is_handled_once(handled: tuple[int, ...], wrong: list[str]) -> None:
    history = _with_replay(1, 2, 1, resumed=True, handled=handled)
    history.consumer = HANDLES_REPLAYS
    history.effects = [Effect("order", "1", n, f"token-{n}") for n in (1, 2, 3)]
    assert judge(history).wrong == wrong


def test_effects_of_other_accounts_may_come_in_any_order() -> None:
    """Guards against an order over all keys, which no consumer of several partitions can have."""
    history = _history(1, 2, 3)
    history.committed.append(Committed("order", "2", 1, "other"))
    history.messages.append(_message(1, 9, key="2", token="other"))
    history.consumer = "test"
    history.effects = [Effect("order", *about) for about in (("1", 1, "token-1"), ("1", 2, "token-2"))]
    history.effects += [Effect("order", "2", 1, "other"), Effect("order", "1", 3, "token-3")]
    assert judge(history).wrong == []


def test_a_relay_that_ends_for_no_reason() -> None:
    """Guards against restarts that hide a relay which ends on its own."""
    history = _history(1, 2, 3, faults=[Fault("kill database", 10, 20, disturbs=True)])
    history.exits = [Exit("relay 1", 15, 2, "cannot connect"), Exit("relay 2", 99, 1, "oh")]
    assert judge(history).wrong == ["exited (1): relay 2 with 1: oh"]


def test_a_history_is_kept_and_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a failure that cannot be looked at again."""
    monkeypatch.setenv("HISTORIES", str(tmp_path))
    history = _history(1, 3, faults=[Fault("kill relay", 1, 2, disturbs=True)])
    history.exits.append(Exit("relay 1", 1.5, 2, "cannot connect"))
    history.stuck.append("no events")
    history.different.append("relay 1: asks another thing")
    history.consumer = "idempotent"
    history.effects.append(Effect("order", "1", 1, "token-1"))
    history.unhandled.append(Unhandled("token-2", "failed", 1, "oh"))
    history.replays.append(Replay("r", ["token-1"], True))
    history.replayed.append(Replayed("r", "order", 0, 9, "1", 1, "token-1", "id-1"))
    history.replay_effects.append(ReplayEffect("r", "token-1"))
    program.report(history)
    (path,) = tmp_path.iterdir()
    assert load(path) == history
    assert str(path) in capsys.readouterr().out
    assert program.main(["check", str(path)]) == 1
    assert "lost write (1): order/1/2" in capsys.readouterr().out


def test_a_good_history_passes_the_command(tmp_path: Path) -> None:
    """Guards against a check that fails whatever it is given."""
    save(_history(1, 2, 3), tmp_path / "good.jsonl")
    assert program.main(["check", str(tmp_path / "good.jsonl")]) == 0
