"""What a function does to the database and to brokers, directly and through the functions that it calls.

Invariants:
- Of functions that call each other recursively, only the effects before the recursion count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outbox_pipelines.lint.libraries import Library, Role
from outbox_pipelines.lint.project import Project
from outbox_pipelines.lint.story import Act, Shelter, Step, Story


@dataclass(frozen=True)
class Site:
    """A place in the source, as shown to the user, with what is done there."""

    path: str
    line: int
    name: str
    """Of the function."""
    is_task: bool = False
    """Whether it is a queued Celery task and not a message."""


@dataclass(frozen=True)
class Effect:
    """What a step, or all steps of a function, do.

    Args:
        publishes: where a message is sent.
        writes: where rows are written.
        commits: whether a transaction is ended for certain.
        statement: whether rows are written through Django outside of any block: committed at once, unless
            a caller has opened one.
        ends: whether a transaction may be ended, by something unknown too.
    """

    publishes: Site | None = None
    writes: Site | None = None
    commits: bool = False
    statement: bool = False
    ends: bool = False

    def __or__(self, other: Effect) -> Effect:
        return Effect(
            self.publishes or other.publishes,
            self.writes or other.writes,
            self.commits or other.commits,
            self.statement or other.statement,
            self.ends or other.ends,
        )


_NOTHING = Effect()


class Effects:
    """The effects of the functions of an application, each worked out once."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._known: dict[str, Effect] = {}

    def of(self, key: str) -> Effect:
        """Of a function, by its key."""
        if key not in self._known:
            self._known[key] = _NOTHING
            path, _, name = key.partition("::")
            module = self._project.modules.get(path)
            story = module.story(name) if module else None
            self._known[key] = self.of_story(story, path) if story else _NOTHING
        return self._known[key]

    def forget(self) -> None:
        """Forget derived results, because more files have been read."""
        self._known.clear()

    def publishing(self) -> set[str]:
        """Names of the functions that publish, and of methods without their class."""
        return {
            story.name
            for path, module in list(self._project.modules.items())
            for story in module.stories
            if story.name and self.of(f"{path}::{story.key}").publishes
        }

    def of_story(self, story: Story, path: str) -> Effect:
        """Of a function, by its story."""
        effect = _NOTHING
        for step in story.steps:
            effect |= self.of_step(step, story, path)
        return effect

    def of_step(self, step: Step, story: Story, path: str) -> Effect:
        """Of one step, where it stands."""
        site = Site(path, step.node.lineno, story.key or "the module")
        match step.act:
            case Act.PUBLISH:
                is_task = bool(step.thing and step.thing.library is Library.CELERY)
                return Effect(publishes=replace(site, is_task=is_task))
            case Act.WRITE | Act.EMIT:
                at_once = is_statement(step)
                by_itself = bool(step.thing and step.thing.autocommit and not _in_a_block(step))
                return Effect(writes=site, statement=at_once, commits=by_itself)
            case Act.COMMIT:
                # A function that commits a session has changed one of its objects.
                changed = step.thing is not None and step.thing.role is Role.SESSION and not step.implicit
                return Effect(writes=site if changed else None, commits=step.thing is not None, ends=True)
            case Act.CALL if step.callee:
                found = self.of(step.callee)
                if step.implicit:
                    # The end of a block: what is written in it has steps of its own.
                    return Effect(commits=found.commits, ends=found.ends)
                return replace(found, statement=found.statement and not _in_a_block(step))
        return _NOTHING

    def commits_behind(self, key: str) -> bool:
        """Return whether a context manager commits what is done in its block."""
        path, _, name = key.partition("::")
        module = self._project.modules.get(path)
        story = module.story(name) if module else None
        if story is None or story.yields_at is None:
            return False
        return any(
            step.thing is not None and (step.node.lineno > story.yields_at or step.implicit)
            for step in story.of(Act.COMMIT)
        )


def is_statement(step: Step) -> bool:
    """Return whether Django commits it at once, unless a caller has opened a block."""
    return bool(step.thing and step.thing.library is Library.DJANGO) and not _in_a_block(step)


def _in_a_block(step: Step) -> bool:
    return any(one.shelter is Shelter.TRANSACTION for one in step.around)
