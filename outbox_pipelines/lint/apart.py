"""Messages sent apart from a commit: a crash between the two loses the second one.

Invariants:
- A place is reported only if rows are certainly written, and certainly committed apart from the message.
- The function that does both is reported, not its callers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outbox_pipelines.lint import hooks
from outbox_pipelines.lint.effects import Effect, Effects, is_statement
from outbox_pipelines.lint.finding import APART
from outbox_pipelines.lint.module import Module
from outbox_pipelines.lint.publishing import before_commit, block_of, is_after_commit, is_relay, told
from outbox_pipelines.lint.story import Act, Shelter, Step, Story, follows
from outbox_pipelines.lint.transactions import Found


@dataclass(frozen=True)
class Done:
    """A step with its effects."""

    step: Step
    effect: Effect

    @property
    def writes_at_once(self) -> bool:
        """Whether its rows are committed when it ends."""
        committed = self.effect.commits or self.effect.statement
        return self.effect.writes is not None and committed

    @property
    def is_both(self) -> bool:
        """Whether the function that it calls is a place of its own."""
        return self.effect.publishes is not None and (self.effect.writes is not None or self.effect.commits)


def beside_commit(story: Story, module: Module, effects: Effects) -> Iterator[Found]:
    """Yield messages after a commit, and messages before a commit that does not include them."""
    done = steps(story, module, effects)
    if is_relay(story) or not any(one.effect.publishes for one in done):
        return
    told_already = {id(node) for _, node, _ in before_commit(story, module, effects)}
    told_already |= {id(node) for _, node, _ in hooks.in_hook(story, module, effects)}
    is_hook = hooks.hook_of(story, module) != ""
    for one in done:
        publish = one.step
        if one.effect.publishes is None or one.is_both or id(publish.node) in told_already:
            continue
        where = told(publish, story, module, effects)
        if is_hook or is_after_commit(publish):
            yield APART, publish.node, f"a crash after the commit loses the message{where}"
        elif block := block_of(publish, story, module, effects):
            line = getattr(block.node, "lineno", 0)
            yield (
                APART,
                publish.node,
                f"the task is queued even if the transaction of line {line} rolls back{where}",
            )
        elif line := _committed_before(publish, done):
            yield APART, publish.node, f"a crash after the commit of line {line} loses the message{where}"
        elif line := _committed_behind(publish, done):
            yield APART, publish.node, f"the message is sent even if line {line} fails{where}"


def steps(story: Story, module: Module, effects: Effects) -> list[Done]:
    """Return the steps that write, commit or publish."""
    found = (Done(step, effects.of_step(step, story, module.path)) for step in story.steps)
    return [one for one in found if one.effect != Effect()]


def _committed_before(publish: Step, done: list[Done]) -> int:
    """The line of a commit, or of a write that is committed at once, after which it comes."""
    for one in done:
        if one.is_both or not follows(publish, one.step):
            continue
        if one.writes_at_once and not _shares_a_block(one.step, publish):
            return one.step.node.lineno
        if _is_commit(one) and any(_goes_before(write, one) for write in done):
            return one.step.node.lineno
    return 0


def _committed_behind(publish: Step, done: list[Done]) -> int:
    """The line of a write behind it that is committed, and not in a transaction around both."""
    for one in done:
        if one.is_both or not follows(one.step, publish):
            continue
        if one.writes_at_once and not _shares_a_block(one.step, publish):
            return one.step.node.lineno
        if _is_commit(one) and any(
            write.effect.writes and follows(write.step, publish) and _goes_before(write, one)
            for write in done
        ):
            return one.step.node.lineno
    return 0


def _is_commit(one: Done) -> bool:
    return one.effect.commits and (one.step.act is Act.COMMIT or one.step.act is Act.CALL)


def _goes_before(write: Done, commit: Done) -> bool:
    """Return whether a commit ends what was written, or is known to end a change made elsewhere."""
    if commit.step.act is Act.COMMIT and not commit.step.implicit and commit.step.thing is not None:
        return True
    return write.effect.writes is not None and (write.step is commit.step or follows(commit.step, write.step))


def _shares_a_block(write: Step, publish: Step) -> bool:
    """Return whether both are in one transaction, which is another rule's."""
    return is_statement(write) is False and any(
        one.shelter is Shelter.TRANSACTION and one in publish.around for one in write.around
    )
