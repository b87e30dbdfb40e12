"""Make the jobs of an outbox, with its names, tags, executor and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from outbox_pipelines.defs import storage
from outbox_pipelines.defs.outbox import Outbox


def job(
    outbox: Outbox,
    name: str,
    description: str,
    *,
    repeats: bool = True,
    tags: Mapping[str, str] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], dg.JobDefinition]:
    """Return the decorator of a job of ops.

    Args:
        repeats: False if Dagster must not retry it: it would also act on what has come since, or
            something else retries it.
    """
    return dg.job(
        name=outbox.name_of(name),
        tags={**outbox.run_tags, **(tags or {}), **({} if repeats else {"dagster/max_retries": "0"})},
        executor_def=outbox.executor,
        description=outbox.text(description),
        # Without its own, a job gets the I/O manager and the loggers of the definitions that it is merged
        # into.
        resource_defs={"io_manager": storage.nothing},
        logger_defs=storage.LOGGERS,
        **options,
    )


def op_job(
    outbox: Outbox,
    name: str,
    description: str,
    *,
    pool: str | None = None,
    config_schema: Any = None,
    **options: Any,
) -> Callable[[Callable[..., None]], dg.JobDefinition]:
    """Return the decorator of the only op of a job, which has the name of its function.

    Args:
        pool: of the op.
        config_schema: of the op, unless its function has a parameter `config`.
        options: those of `job`.
    """

    def decorate(step: Callable[..., None]) -> dg.JobDefinition:
        op = dg.op(name=outbox.name_of(step.__name__), pool=pool, config_schema=config_schema)(step)

        @job(outbox, name, description, **options)
        def only() -> None:
            op.alias(step.__name__)()

        return only

    return decorate


def asset_job(outbox: Outbox, name: str, description: str, selection: dg.AssetSelection) -> Any:
    """Return a job that materializes assets or runs checks."""
    return dg.define_asset_job(
        outbox.name_of(name),
        selection=selection,
        tags=outbox.run_tags,
        executor_def=outbox.executor,
        description=outbox.text(description),
    )
