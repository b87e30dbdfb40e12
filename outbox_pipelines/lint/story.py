"""What a function does, step by step, as far as it matters to the outbox; and which step can follow which.

Invariants:
- Steps have the order of the source. Loops are not repeated.
- A step follows another only if one run of the function can reach both, without an error in between.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import Enum, auto

from outbox_pipelines.lint.libraries import Thing
from outbox_pipelines.lint.syntax import Touch


class Act(Enum):
    """What a step does."""

    EMIT = auto()
    WRITE = auto()
    READ = auto()
    BEGIN = auto()
    COMMIT = auto()
    ROLLBACK = auto()
    PUBLISH = auto()
    USE = auto()
    """A connection or session is handed to code out of sight."""
    CALL = auto()
    """A function of the application."""


class Ending(Enum):
    """How a branch is left, where it does not go on to what stands behind it."""

    RAISE = auto()
    RETURN = auto()
    NEXT = auto()
    """`continue` or `break`."""


@dataclass(frozen=True)
class Arm:
    """One of the ways at a branch; a loop's body is one, too."""

    branch: int
    index: int
    ending: Ending | None
    is_loop: bool = False


class Shelter(Enum):
    """What a block does for the steps in it."""

    TRANSACTION = auto()
    PERHAPS = auto()
    """A context manager out of sight got the connection: it may well open a transaction."""
    CONNECTION = auto()
    """Its connection or session is closed behind it: nothing goes on after an error."""
    SWALLOW = auto()
    """An error goes no further."""
    EXPECTED = auto()
    """A test that wants the error."""
    COMMITTED = auto()
    """Code that is run once the transaction has been committed."""


@dataclass(frozen=True)
class Around:
    """A block around a step."""

    shelter: Shelter
    thing: Thing | None
    node: ast.AST
    stack: str | None = None
    """The exit stack that holds it."""
    callee: str = ""
    """The key of the application's own context manager."""


@dataclass(frozen=True)
class Step:
    """One thing that a function does."""

    number: int
    act: Act
    node: ast.expr | ast.stmt
    thing: Thing | None
    around: tuple[Around, ...]
    arms: tuple[Arm, ...]
    implicit: bool = False
    """A commit at the end of a block."""
    dropped: bool = False
    """Whether the result is not used."""
    touch: Touch | None = None
    name: str = ""
    """Of a call: whom."""
    callee: str = ""
    """Of a call: the key of the function, where it is known."""

    def works_on(self, thing: Thing | None) -> bool:
        """Return whether it is done on the connection of this thing."""
        return self.thing is not None and thing is not None and self.thing.origin == thing.origin


@dataclass
class Story:
    """A function, or a module's own body, with its steps."""

    name: str
    node: ast.AST
    owner: ast.ClassDef | None = None
    steps: list[Step] = field(default_factory=list)
    returned: list[Thing] = field(default_factory=list)
    """What it returns or yields, as far as that is known."""
    yields_at: int | None = None
    """The line of its first `yield`."""

    @property
    def key(self) -> str:
        """Its name among those of its module."""
        return f"{self.owner.name}.{self.name}" if self.owner and self.node is not self.owner else self.name

    @property
    def called_as(self) -> str:
        """How its module calls it."""
        return f"self.{self.name}" if self.owner else self.name

    def of(self, *acts: Act) -> list[Step]:
        """The steps that do this."""
        return [step for step in self.steps if step.act in acts]

    def on(self, thing: Thing, *acts: Act) -> list[Step]:
        """The steps that do this on the connection of a thing."""
        return [step for step in self.of(*acts) if step.works_on(thing)]


def follows(late: Step, early: Step) -> bool:
    """Return whether `late` can come after `early` in one run."""
    if late.number <= early.number:
        return False
    ways = {arm.branch: arm for arm in late.arms}
    loop: Arm | None = None
    for arm in early.arms:
        other = ways.get(arm.branch)
        if other is not None and other.index != arm.index:
            return False
        if other is None and not _goes_on(arm, loop, ways, late):
            return False
        loop = arm if arm.is_loop else loop
    return True


def _goes_on(arm: Arm, loop: Arm | None, ways: dict[int, Arm], late: Step) -> bool:
    """Return whether what stands behind a branch is reached through this arm of it."""
    match arm.ending:
        case Ending.RAISE:
            return False
        case Ending.RETURN:
            return late.implicit
        case Ending.NEXT:
            return late.implicit or loop is None or loop.branch not in ways
    return True


def ending(body: list[ast.stmt]) -> Ending | None:
    """How a list of statements is left; None if it goes on to what follows it."""
    match body[-1] if body else None:
        case ast.Raise():
            return Ending.RAISE
        case ast.Return():
            return Ending.RETURN
        case ast.Continue() | ast.Break():
            return Ending.NEXT
        case ast.With(body=inner) | ast.AsyncWith(body=inner):
            return ending(inner)
        case ast.If(body=then, orelse=otherwise):
            first, second = ending(then), ending(otherwise)
            return first if first and second else None
    return None
