"""The second judge finds each anomaly in a history changed by hand, and agrees with the first one."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_pipelines.settings import load_settings
from tests.conftest import Outbox
from tests.history import __main__ as program
from tests.history import broken, business, porcupine, verify
from tests.history.judge import judge
from tests.history.record import Committed, Delivery, Effect, Fault, History, Message, save
from tests.interop import build

_EVENTS = 4


@pytest.fixture(scope="module", autouse=True)
def built() -> Path:
    return build.porcupine(load_settings())


def _history(delivery: Delivery = "exactly_once", faults: tuple[Fault, ...] = ()) -> History:
    """Two accounts, whose events are delivered one a second; a consumer with all effects."""
    history = History("test", 0, delivery, consumer="test", faults=list(faults))
    for n in range(1, _EVENTS + 1):
        for partition, account in enumerate("ab"):
            token = f"{account}{n}"
            history.committed.append(Committed("order", account, n, token, 100.0 + n - 0.5))
            message = Message("order", partition, n, account, n, token, f"id-{token}", 100.0 + n)
            history.messages.append(message)
            history.effects.append(Effect("order", account, n, token))
    return history


def _at(history: History, token: str) -> int:
    return next(i for i, message in enumerate(history.messages) if message.token == token)


def _drop(history: History) -> None:
    del history.messages[_at(history, "a2")]


def _drop_last(history: History) -> None:
    del history.messages[_at(history, "a4")]


def _swap(history: History) -> None:
    one, other = _at(history, "a2"), _at(history, "a3")
    messages = history.messages
    messages[one], messages[other] = (
        messages[one]._replace(offset=messages[other].offset),
        messages[other]._replace(offset=messages[one].offset),
    )


def _deliver_again(history: History, **changes: object) -> None:
    message = history.messages[_at(history, "a2")]
    history.messages.append(message._replace(offset=9, at=120.0)._replace(**changes))  # type: ignore[arg-type]


def _add(history: History) -> None:
    history.messages.append(Message("order", 0, 9, "a", 5, "rolled back", "id", 109.0))


def _of_another(history: History) -> None:
    message = history.messages[_at(history, "b2")]
    history.messages.append(message._replace(partition=0, offset=9, key="a"))


def _too_early(history: History) -> None:
    event = history.committed[2]
    history.committed[2] = event._replace(at=history.messages[2].at + 0.5)


def _elsewhere(history: History) -> None:
    history.messages[_at(history, "a3")] = history.messages[_at(history, "a3")]._replace(partition=7)


def _lose_effect(history: History) -> None:
    del history.effects[2]


def _repeat_effect(history: History) -> None:
    history.effects.append(history.effects[2])


def _swap_effects(history: History) -> None:
    history.effects[2], history.effects[4] = history.effects[4], history.effects[2]


def _invent_effect(history: History) -> None:
    history.effects.append(Effect("order", "a", 5, "none"))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_drop, "lost write: order/a/2"),
        (_drop_last, "lost write: order/a/4"),
        (_swap, "out of order: order/a/3 at 0:2 before order/a/2"),
        (_deliver_again, "duplicate: order/a/2 at 0:9"),
        (lambda history: _deliver_again(history, id="another"), "phantom: order/a/2 at 0:9"),
        (_add, "aborted read: order/a/5 at 0:9"),
        (_of_another, "phantom: order/a/2 at 0:9"),
        (_too_early, "dirty read: order/a/2 at 0:2 before its commit"),
        (_elsewhere, "out of order: order/a/4 at 0:4 before order/a/3"),
        (_lose_effect, "lost effect: order/a/2"),
        (_repeat_effect, "duplicate effect: order/a/2"),
        (_swap_effects, "effect out of order: order/a/3 before order/a/2"),
        (_invent_effect, "phantom effect: order/a/5"),
    ],
)
def test_each_anomaly_is_found(change: Callable[[History], None], found: str) -> None:
    history = _history()
    assert len(porcupine.judge(history)) == 1
    change(history)
    assert porcupine.judge(history)[1:] == [found]


@pytest.mark.parametrize(
    ("fault", "excused"),
    [
        (Fault("kill relay", 110, 111, disturbs=True), True),
        (Fault("kill relay", 50, 92.5, disturbs=True), True),
        (Fault("kill relay", 50, 91.5, disturbs=True), False),
        (Fault("kill relay", 120.5, 121, disturbs=True), False),
        (Fault("kill writer", 110, 111, disturbs=False), False),
    ],
    ids=["between", "just over", "long over", "later", "of a writer"],
)
def test_a_redelivery_needs_a_fault(fault: Fault, excused: bool) -> None:
    history = _history("at_least_once", (fault,))
    _deliver_again(history)
    found = ["duplicate: order/a/2 at 0:9"]
    assert porcupine.judge(history)[1:] == ([] if excused else found)


def _changed(chance: random.Random) -> History:
    faults = [Fault("kill relay", at := chance.uniform(80, 110), at + 1, disturbs=True)]
    delivery: Delivery = chance.choice(["at_least_once", "exactly_once"])
    history = _history(delivery, tuple(faults[: chance.randint(0, 1)]))
    messages = history.messages
    for _ in range(chance.randint(0, 3)):
        i = chance.randrange(len(messages))
        it = messages[i]
        match chance.randrange(7):
            case 0:
                del messages[i]
            case 1:
                again = it._replace(offset=it.offset + chance.randint(1, 3) * 0.1)  # type: ignore[arg-type]
                messages.append(again._replace(at=it.at + 0.5))
            case 2:
                _swap(history) if {"a2", "a3"} <= {each.token for each in messages} else None
            case 3:
                messages[i] = it._replace(token="another")
            case 4:
                messages[i] = it._replace(n=chance.randint(1, _EVENTS))
            case 5:
                messages[i] = it._replace(at=it.at - 0.6)
            case 6 if history.effects:
                history.effects.insert(0, history.effects.pop(chance.randrange(len(history.effects))))
    messages.sort(key=lambda each: (each.partition, each.offset))
    # Offsets are whole numbers, and the broker's clock does not go back.
    for i, it in enumerate(messages):
        before = [each.at for each in messages[:i] if each.partition == it.partition]
        messages[i] = it._replace(offset=i, at=max([it.at, *before]))
    return history


def test_both_judges_agree() -> None:
    """Guards against a judge that is wrong in a way of its own: 300 histories with up to three changes."""
    wrong = 0
    for seed in range(300):
        history = _changed(random.Random(seed))
        first, (_, *second) = judge(history).wrong, porcupine.judge(history)
        assert bool(first) == bool(second), (seed, first, second)
        named = {line.split(" (")[0] for line in first}
        assert {line.split(":")[0] for line in second} <= named, (seed, first, second)
        wrong += bool(first)
    assert 50 < wrong < 290


def test_the_faults_of_broken_relays(outbox: Outbox) -> None:
    """Guards G1: the second judge sees the loss that polling by number has, in real servers."""
    with outbox.connect() as connection:
        business.prepare(connection)
        connection.execute(broken.PollsBySeq.prepare.encode())
    relay = broken.PollsBySeq(outbox.settings)
    with outbox.connect(autocommit=False) as late, outbox.connect(autocommit=False) as quick:
        business.count(late, "order", 1)
        business.count(quick, "order", 2)
        quick.commit()
        relay.step()
        late.commit()
        relay.step()
    relay.close()
    assert porcupine.judge(verify.history(outbox, calm=True))[1:] == ["lost write: order/1/1"]


def test_the_command_has_both_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = _history()
    _drop(history)
    save(history, tmp_path / "history.jsonl")
    assert program.main(["check", str(tmp_path / "history.jsonl")]) == 1
    printed = capsys.readouterr().out
    assert "porcupine (1): lost write: order/a/2" in printed
    assert "lost write (1): order/a/2" in printed


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """Guards against a good result for what was not read."""
    save(_history(), path := tmp_path / "history.jsonl")
    path.write_text(path.read_text()[:-5])
    with pytest.raises(subprocess.CalledProcessError, match="exit status 2"):
        porcupine.check(path)
