"""The explorer itself, with protocols small enough to be known by heart."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest

from tests.model.__main__ import main
from tests.model.explore import LIVENESS, Result, explore, fingerprint
from tests.model.random_runs import history, random_runs
from tests.model.scope import Scope
from tests.model.scopes import SCOPES
from tests.model.story import story
from tests.model.toys import Clerks, Walk

lost = functools.partial(Clerks, 2, locks=False)
endless = functools.partial(Clerks, 2, waits=True)


def test_a_right_protocol_is_explored_to_its_end() -> None:
    result = explore(Clerks(2), must=["begin", "crash", "first", "last"])
    assert result.is_good
    assert result.exhausted
    # 12 pairs of idle, begun, read and done, of which one at a time is at work; before and after the crash.
    assert (result.states, result.depth, result.done) == (24, 8, 2)
    assert result.covered["first"] == result.covered["last"] > 0


def test_the_shortest_counterexample_is_reported() -> None:
    result = explore(lost())
    assert result.broken is not None
    assert result.broken.invariant == "no lost update"
    # Both begin and read before either writes: there is no shorter way.
    assert len(result.broken.actions) == 6
    assert not result.exhausted
    text = story(lost, result.broken)
    assert text.splitlines()[0] == "  1. clerk 0: begin"
    assert text.endswith("→ no lost update: 2 have added 1, and the total is 1")


def test_a_livelock_is_found() -> None:
    result = explore(endless())
    assert result.broken is not None
    assert result.broken.invariant == LIVENESS
    assert explore(endless(), liveness=False).is_good


def test_a_dead_end_is_found() -> None:
    class Stuck(Clerks):
        def actions(self) -> list[tuple[object, ...]]:
            return [each for each in super().actions() if each[1] == 0]

    # Not pickled by name: a class of a function.
    globals()["Stuck"] = Stuck
    Stuck.__qualname__ = "Stuck"
    result = explore(Stuck(2))
    assert result.broken is not None
    assert result.broken.invariant == LIVENESS


def test_what_must_be_seen_and_is_not_fails() -> None:
    result = explore(Clerks(2, crashes=0), must=["crash", "write"])
    assert result.missing == {"crash"}
    assert not result.is_good


@pytest.mark.parametrize("bound", [{"states": 5}, {"depth": 3}, {"seconds": 0.0}])
def test_a_bound_is_said(bound: dict[str, Any]) -> None:
    result = explore(Clerks(2), **bound)
    assert not result.exhausted
    assert result.states < 24


def test_a_depth_that_is_enough_exhausts() -> None:
    assert explore(Clerks(2), depth=8).exhausted
    assert not explore(Clerks(2), depth=7).exhausted


def test_it_is_deterministic_also_across_processes() -> None:
    code = (
        "from tests.model.explore import explore; from tests.model.toys import Clerks;"
        "r = explore(Clerks(2, locks=False)); print(r.states, r.transitions, r.broken)"
    )
    told = {subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)}
    result = explore(lost())
    assert told == {f"{result.states} {result.transitions} {result.broken}\n".encode()}


def test_equal_keys_have_one_fingerprint() -> None:
    text = "".join(["a", "b"])
    assert fingerprint((text, text, (1, None))) == fingerprint(("ab", "a" + "b"[:1], (1, None)))
    assert fingerprint((1, 2)) != fingerprint((2, 1))
    assert fingerprint((-1,)) != fingerprint((-2,))


def test_same_seed_same_history() -> None:
    make = functools.partial(Clerks, 4, crashes=3)
    assert history(make, 7, 100, 0.2) == history(make, 7, 100, 0.2)
    assert len({tuple(history(make, seed, 100, 0.2)[0]) for seed in range(20)}) > 10


def test_random_histories_of_a_right_protocol_hold() -> None:
    runs = random_runs(functools.partial(Clerks, 5, crashes=5), seeds=range(200))
    assert runs.broken is None
    assert runs.histories == 200
    assert runs.covered["crash"] > 200


@pytest.mark.parametrize(("make", "invariant"), [(lost, "no lost update"), (endless, LIVENESS)])
def test_a_failing_history_is_shrunk(make: functools.partial[Clerks], invariant: str) -> None:
    large = functools.partial(make.func, 6, **make.keywords, crashes=6)
    runs = random_runs(large, seeds=range(100))
    assert runs.broken is not None
    assert runs.broken.invariant == invariant
    # Two clerks are to blame, and no crash.
    assert len(runs.broken.actions) <= 6
    assert "crash" not in {each[0] for each in runs.broken.actions}
    assert random_runs(large, seeds=range(100)).broken == runs.broken


def test_a_torus_is_explored() -> None:
    """How fast is printed by the command; a test must not depend on it."""
    result = explore(Walk(10), liveness=False)
    assert (result.states, result.transitions, result.depth) == (1_000, 3_000, 27)
    assert result.is_good


def test_the_command_says_what_was_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCOPES, "right", Scope(functools.partial(Clerks, 2), "two clerks", must={"crash"}))
    monkeypatch.setitem(SCOPES, "lost", Scope(lost, "two clerks without a lock"))
    monkeypatch.setitem(SCOPES, "unseen", Scope(functools.partial(Clerks, 1), "alone", must={"war"}))
    assert main(["right"]) == 0
    assert "exhausted: 24 states" in (said := capsys.readouterr().out)
    assert said.endswith("exhausted: 1 of 1 scopes: right\n")
    assert main(["right", "--states", "10"]) == 0
    assert "not exhausted: right: cut off at 1" in capsys.readouterr().out
    assert main(["right", "lost"]) == 1
    assert "no lost update" in capsys.readouterr().out
    assert main(["unseen"]) == 1
    assert "never seen: war" in capsys.readouterr().out
    assert main(["--list"]) == 0
    assert main(["nowhere"]) == 2


def test_what_is_broken_behind_a_bound_is_still_reported() -> None:
    """The runs without faults look further ahead than the exploration."""
    result = explore(lost(), depth=2)
    assert result.broken is not None
    assert result.broken.invariant == "no lost update"


def test_an_empty_result_is_good() -> None:
    assert Result().is_good
