"""Small protocols for the tests of the explorer: one that is right, and some that are not.

Clerks add to a shared counter by reading and writing it; a lock makes that right. A fault stops a clerk, who
begins again.
"""

from __future__ import annotations

from collections.abc import Collection

from tests.model.explore import Action, Broken, Key


class Clerks:
    """Each of them adds 1, once.

    Args:
        locks: whether a clerk takes the lock before reading; otherwise updates are lost.
        waits: whether a clerk gives the lock back and begins again if another one is waiting: livelock.
        crashes: how many faults may happen.
    """

    FAULTS: Collection[str] = ("crash",)

    def __init__(self, clerks: int = 2, *, locks: bool = True, waits: bool = False, crashes: int = 1) -> None:
        self.locks = locks
        self.waits = waits
        self.crashes = crashes
        self.total = 0
        self.owner = -1
        self.read: list[int | None] = [None] * clerks
        self.at = ["idle"] * clerks
        self.covered: set[str] = set()

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for nth, at in enumerate(self.at):
            if at == "idle" and (not self.locks or self.owner < 0):
                found.append(("begin", nth))
            elif at == "begun":
                found.append(("read", nth))
            elif at == "read":
                found.append(("write", nth))
            if self.crashes and at in ("begun", "read"):
                found.append(("crash", nth))
        return found

    def do(self, action: Action) -> None:
        name, nth = action
        if name == "begin":
            self.at[nth] = "begun"
            self.owner = nth if self.locks else -1
        elif name == "read":
            self.at[nth], self.read[nth] = "read", self.total
        elif name == "crash":
            self.crashes -= 1
            self._end(nth, "idle")
        elif self.waits and "idle" in self.at:
            self._end(nth, "idle")
        else:
            self.covered.add("last" if "done" in self.at else "first")
            value = self.read[nth]
            assert value is not None
            self.total = value + 1
            self._end(nth, "done")

    def _end(self, nth: int, at: str) -> None:
        self.at[nth], self.read[nth] = at, None
        if self.owner == nth:
            self.owner = -1

    def check(self) -> None:
        done = self.at.count("done")
        if self.total != done:
            raise Broken("no lost update", f"{done} have added 1, and the total is {self.total}")

    def key(self) -> Key:
        return self.crashes, self.total, self.owner, tuple(self.at), tuple(self.read)

    def is_done(self) -> bool:
        return self.at.count("done") == len(self.at)

    def tell(self, action: Action) -> str:
        return f"clerk {action[1]}: {action[0]}"


class Walk:
    """A point on a torus; for measuring how fast states are explored."""

    FAULTS: Collection[str] = ()

    def __init__(self, size: int) -> None:
        self.at = [0, 0, 0]
        self.size = size
        self.rest = {"some": [1, 2, 3], "more": {4: "four", 5: "five"}}

    def actions(self) -> list[Action]:
        return [("go", axis) for axis in range(3)]

    def do(self, action: Action) -> None:
        self.at[action[1]] = (self.at[action[1]] + 1) % self.size

    def check(self) -> None: ...

    def key(self) -> Key:
        return tuple(self.at)

    def is_done(self) -> bool:
        return not any(self.at)
