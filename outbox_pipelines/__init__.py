"""Transactional outbox on PostgreSQL and Kafka: write events with your rows, relay them in order."""

__version__ = "0.1.0"


class Error(Exception):
    """The base of all errors that this package raises for its users; the message says what to do."""


def __dir__() -> list[str]:
    # Dagster's `dg` looks here for components.
    return [*globals(), "OutboxComponent"]


def __getattr__(name: str) -> object:
    if name != "OutboxComponent":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Loaded on request, and by name: the writer and the consumer need no Dagster.
    from importlib import import_module

    try:
        return import_module("outbox_pipelines.defs.component").OutboxComponent
    except ModuleNotFoundError as error:
        raise AttributeError(f"{name} needs the extra 'dagster': {error}") from error
